"""`pliant checkpoints`: list, verify, prune and export what a run has saved. Needs no cluster."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pliant.errors import NegativeVerdict

app = typer.Typer(no_args_is_help=True, help="List, verify, prune and export checkpoints.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="A job's name.")]
RunsDir = Annotated[
    str | None, typer.Option("--runs-dir", help="Where runs are kept; by default ./runs.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


class Dtype(StrEnum):
    """What weights are written in."""

    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


@app.command("list")
def list_checkpoints(name: Name, runs_dir: RunsDir = None, as_json: AsJson = False) -> None:
    """Show every checkpoint and why it is kept."""
    from pliant.cli import stored

    run = stored.open_run(name, runs_dir)
    rows = stored.rows(run)
    if as_json:
        typer.echo(json.dumps(rows))
    elif not rows:
        typer.echo(f"{run.places.checkpoints.place()} holds no checkpoints yet")
    else:
        stored.print_table(rows)


@app.command()
def verify(
    name: Name,
    runs_dir: RunsDir = None,
    step: Annotated[int | None, typer.Option("--step", help="By default all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read every file and compare it with its digest; exit code 5 where one is not whole."""
    from pliant.cli import stored

    run = stored.open_run(name, runs_dir)
    damaged = {one: stored.damage(run, one) for one in stored.committed(run, step)}
    if as_json:
        typer.echo(json.dumps([{"name": one, "damage": d} for one, d in damaged.items()]))
    else:
        for one, sentences in damaged.items():
            typer.echo(f"{one}: {'damaged' if sentences else 'whole'}")
    sentences = [sentence for found in damaged.values() for sentence in found]
    if sentences:
        raise NegativeVerdict("\n".join(sentences), damage=sentences)


@app.command()
def prune(
    name: Name,
    runs_dir: RunsDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove what the spec's retention does not keep, of a job that is not running."""
    from pliant.cli import stored

    run = stored.open_run(name, runs_dir)
    doomed = stored.prune(run, dry_run)
    for one, why in doomed.items():
        typer.echo(f"{one}: {why}")
    typer.echo(f"{len(doomed)} {'would go' if dry_run else 'removed'}")


@app.command()
def export(
    name: Name,
    runs_dir: RunsDir = None,
    step: Annotated[
        int | None, typer.Option("--step", help="By default the newest that is whole.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="A new directory; by default in the run's.")
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option("--dtype", help='Of the weights; "auto" is that of the training.')
    ] = Dtype.auto,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", help="Of one file, such as 500MB or 5GB.")
    ] = "5GB",
    adapter: Annotated[
        bool,
        typer.Option("--adapter/--merge", help="LoRA: the adapters alone, or merged weights."),
    ] = False,
) -> None:
    """Write a checkpoint's weights for transformers, `AutoModelForCausalLM.from_pretrained`."""
    from pliant.cli import stored

    run = stored.open_run(name, runs_dir)
    precision = run.spec.training.precision if dtype is Dtype.auto else dtype.value
    shards = stored.parse_size(max_shard_size)
    typer.echo(stored.export(run, step, to, precision, shards, adapter))
