"""`pliant data`: prepare, verify, describe and show the data of a job."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pliant.cli.options import (
    Address,
    AsJson,
    Overlays,
    RunsDir,
    Settings,
    SpecArgument,
    runs_directory,
)

if TYPE_CHECKING:
    from pliant.data.store import Prepared
    from pliant.spec import JobSpec

app = typer.Typer(no_args_is_help=True, help="Prepare, verify, describe and show a job's data.")


@app.command()
def prepare(
    spec_path: SpecArgument,
    overlay: Overlays = None,
    settings: Settings = None,
    runs_dir: RunsDir = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Tokenize the data of a job, on CPUs only. What is prepared already is not done again."""
    from pliant.cli import data_views
    from pliant.data.account import account_for
    from pliant.training.planning import training_plan

    with _prepared(spec_path, overlay, settings, runs_dir, address) as (spec, prepared):
        if as_json:
            counts = {"path": prepared.store.place(), "accounting": prepared.manifest["accounting"]}
            typer.echo(json.dumps(counts))
            return
        data_views.print_accounting(prepared)
        typer.echo(account_for(prepared, training_plan(spec, prepared)).sentence())
        typer.echo(f"the store is {prepared.store.place()}")


@app.command()
def verify(
    spec_path: SpecArgument,
    overlay: Overlays = None,
    settings: Settings = None,
    runs_dir: RunsDir = None,
) -> None:
    """Read every file of the prepared store and compare it with its digest; exit code 5 where one
    is damaged."""
    from pliant.data.prepare import find_prepared
    from pliant.data.store import store_root
    from pliant.errors import NegativeVerdict, UserError
    from pliant.spec import load_spec

    spec = load_spec(spec_path, overlay or [], settings=settings or [])
    root = store_root(spec.data, runs_directory(runs_dir))
    prepared = find_prepared(spec, root)
    if prepared is None:
        raise UserError(f"The data of {spec.name} is not prepared. `pliant data prepare`.")
    damage = prepared.damage()
    if damage:
        raise NegativeVerdict("\n".join(damage), damage=damage)
    typer.echo(f"{prepared.store.place()}: whole, {prepared.num_files} files")


@app.command()
def stats(
    spec_path: SpecArgument,
    overlay: Overlays = None,
    settings: Settings = None,
    runs_dir: RunsDir = None,
    address: Address = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="NAME", help="An earlier run, for drift.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--png", help="Also draw the lengths, as a PNG.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """How long the samples are, how rows would be filled, and what packing gains."""
    from pliant.cli import data_views

    directory = runs_directory(runs_dir)
    with _prepared(spec_path, overlay, settings, runs_dir, address) as (spec, prepared):
        found = data_views.describe(spec, prepared, directory, against)
        if picture is not None:
            data_views.draw(prepared, picture)
        if as_json:
            typer.echo(json.dumps(found.as_dict()))
        else:
            data_views.print_description(found)


@app.command()
def show(
    spec_path: SpecArgument,
    count: Annotated[int, typer.Option("-n", help="How many rows.", min=1)] = 3,
    first: Annotated[int, typer.Option("--first", help="The epoch's row to begin with.")] = 0,
    epoch: Annotated[int, typer.Option("--epoch", min=0)] = 0,
    overlay: Overlays = None,
    settings: Settings = None,
    runs_dir: RunsDir = None,
    address: Address = None,
) -> None:
    """Print rows as the model sees them: packed, decoded, what is trained in colour."""
    from pliant.cli import data_views
    from pliant.training.planning import training_plan

    with _prepared(spec_path, overlay, settings, runs_dir, address) as (spec, prepared):
        plan = training_plan(spec, prepared)
        data_views.show_rows(prepared, plan, epoch, first, count)


@contextmanager
def _prepared(
    spec_path: Path,
    overlay: list[Path] | None,
    settings: list[str] | None,
    runs_dir: str | None,
    address: str | None,
) -> Iterator[tuple["JobSpec", "Prepared"]]:
    """The spec and its prepared data, which is prepared if need be: only then Ray is started."""
    from pliant.cli.data_views import PreparingDisplay
    from pliant.cluster.session import ray_session
    from pliant.data.prepare import find_prepared
    from pliant.data.prepare import prepare as prepare_data
    from pliant.data.store import store_root
    from pliant.spec import load_spec
    from pliant.training.planning import check_plugins

    spec = load_spec(spec_path, overlay or [], settings=settings or [])
    check_plugins(spec)
    root = store_root(spec.data, runs_directory(runs_dir))
    prepared = find_prepared(spec, root)
    if prepared is None:
        with ray_session(address, 1), PreparingDisplay() as display:
            prepared = prepare_data(spec, root, display.update)
    yield spec, prepared
