"""Arguments and options that several commands share."""

import os
from pathlib import Path
from typing import Annotated

import typer

from pliant.errors import UserError

SpecArgument = Annotated[Path, typer.Argument(metavar="SPEC", help="A job spec: one YAML file.")]
Overlays = Annotated[
    list[Path] | None, typer.Option("--overlay", help="A YAML file laid over the spec.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Changes one field.")
]
RunsDir = Annotated[
    str | None, typer.Option("--runs-dir", help="Where runs are kept; by default ./runs.")
]
Address = Annotated[
    str | None,
    typer.Option("--address", envvar="RAY_ADDRESS", help="A Ray cluster; without it, an own one."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def runs_directory(given: str | None) -> Path:
    """Where runs are kept. A Ray job's working directory vanishes with the job, so that a job that
    names no place has its runs kept in the home directory."""
    if given is not None and "://" in given:
        raise UserError(
            f"--runs-dir is {given}, and runs are kept on a file system that all nodes share. "
            "Mount it and give the path."
        )
    if given is None and "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        given = str(Path.home() / "pliant-runs")
    return Path(given or "runs").expanduser().absolute()
