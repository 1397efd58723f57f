"""`pliant`: run, check and look after jobs."""

import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from pliant import __version__
from pliant.cli import checkpoints, data
from pliant.cli.options import (
    Address,
    AsJson,
    Overlays,
    RunsDir,
    Settings,
    SpecArgument,
    runs_directory,
)
from pliant.errors import Interrupted, PliantError, UserError
from pliant.spec import JobSpec, load_spec
from pliant.spec.resolve import unresolved

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Elastic, exact training of language models on Ray.",
)
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(data.app, name="data")


@app.command()
def run(
    spec_path: SpecArgument,
    overlay: Overlays = None,
    settings: Settings = None,
    runs_dir: RunsDir = None,
    address: Address = None,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke", help="Two steps, an evaluation, a checkpoint and a resume, then stop."
        ),
    ] = False,
    as_json: AsJson = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the logs of Ray too.")] = False,
) -> None:
    """Train a model, or go on training one. A job started again under its name continues."""
    quiet_libraries()
    from pliant.cli.display import TerminalDisplay, console_for, print_summary
    from pliant.cluster.session import ray_session
    from pliant.training.launch import run_job
    from pliant.training.smoke import run_smoke

    spec = load_spec(spec_path, overlay or [], settings=settings or [])
    directory = runs_directory(runs_dir)
    console = console_for(as_json)
    display = TerminalDisplay(console)
    job = run_smoke if smoke else run_job
    with (
        stopped_by_signals() as stop,
        ray_session(address, logical_cpus(spec), verbose),
        stopped_by_signals(stop),  # Ray has put handlers of its own in their place
    ):
        try:
            outcome = job(spec, directory, display, stop)
        finally:
            display.close()
    if as_json:
        typer.echo(json.dumps(json.loads((outcome.run_dir / "summary.json").read_bytes())))
    else:
        print_summary(console, outcome)
    if outcome.error is not None:
        raise outcome.error
    if outcome.summary.state == "INTERRUPTED":
        raise Interrupted(outcome.summary.reason or "interrupted")


@app.command()
def check(
    spec_path: SpecArgument,
    overlay: Overlays = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Validate a spec, resolve what can be resolved beforehand, and print the result."""
    from pliant.training.beforehand import resolve_beforehand
    from pliant.training.planning import recorded

    spec = resolve_beforehand(load_spec(spec_path, overlay or [], settings=settings or []))
    tree = recorded(spec)
    later = unresolved(spec)
    if as_json:
        typer.echo(json.dumps({"spec": tree, "decided_at_start": later}))
        return
    typer.echo(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), nl=False)
    if later:
        typer.echo(f"# decided when the job starts: {', '.join(later)}")


@app.command()
def schema() -> None:
    """Print the JSON schema of a job spec, for editors."""
    typer.echo(json.dumps(JobSpec.model_json_schema(), indent=2))


@app.command()
def submit(
    spec_path: SpecArgument,
    runs_dir: Annotated[
        str, typer.Option("--runs-dir", help="An absolute path that all nodes share.")
    ],
    overlay: Overlays = None,
    settings: Settings = None,
    address: Annotated[
        str, typer.Option("--address", help="Of the cluster's dashboard, http://HOST:8265.")
    ] = "auto",
    working_dir: Annotated[
        Path | None,
        typer.Option("--working-dir", help="A directory to send along: own code, local data."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Show the job's output.")] = False,
) -> None:
    """Send a job to a cluster, through Ray's Jobs API."""
    from pliant.cluster import submit as jobs

    plan = jobs.plan(spec_path, runs_dir, overlay or [], settings or [], working_dir)
    client = jobs.connect(address)
    submission_id = jobs.submit(client, plan)
    typer.echo(f"submitted {submission_id}")
    if follow:
        for chunk in jobs.logs(client, submission_id, follow=True):
            typer.echo(chunk, nl=False)
        info = jobs.wait(client, submission_id, timeout_s=60)
        raise typer.Exit(info.exit_code if info.exit_code is not None else 4)


JobName = Annotated[str, typer.Argument(metavar="NAME", help="A job's name or submission id.")]
Dashboard = Annotated[
    str, typer.Option("--address", help="Of the cluster's dashboard, http://HOST:8265.")
]


@app.command()
def status(name: JobName, address: Dashboard = "auto", as_json: AsJson = False) -> None:
    """Say how a submitted job is doing."""
    from pliant.cluster import submit as jobs

    info = jobs.status(jobs.connect(address), name)
    if as_json:
        typer.echo(json.dumps(asdict(info), default=str))
    else:
        typer.echo(f"{info.submission_id}  {info.status}  {info.message or ''}".rstrip())


@app.command()
def logs(
    name: JobName,
    address: Dashboard = "auto",
    follow: Annotated[bool, typer.Option("--follow", help="Until the job ends.")] = False,
) -> None:
    """Print the output of a submitted job."""
    from pliant.cluster import submit as jobs

    for chunk in jobs.logs(jobs.connect(address), name, follow=follow):
        typer.echo(chunk, nl=False)


@app.command()
def stop(name: JobName, address: Dashboard = "auto") -> None:
    """Ask a submitted job to stop; it takes a checkpoint first."""
    from pliant.cluster import submit as jobs

    info = jobs.stop(jobs.connect(address), name)
    typer.echo(f"{info.submission_id}  {info.status}")


@app.command()
def resize(
    name: JobName,
    workers: Annotated[
        str, typer.Option("--workers", metavar="N", help="A number, or auto for all there is.")
    ],
    runs_dir: RunsDir = None,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", help="Wait for it for so long.")
    ] = 0.0,
) -> None:
    """Ask a running job for a number of workers; it makes its state safe first, and loses no step.

    The wish stands until there is another one, also when the job is started again.
    """
    from pliant.training import wanted

    if workers != "auto" and not workers.isdecimal():
        raise UserError(f"--workers is {workers}, and a number or auto is needed.")
    count = None if workers == "auto" else int(workers)
    typer.echo(wanted.resize(runs_directory(runs_dir) / name, count, wait))


@app.command()
def sync(name: JobName, runs_dir: RunsDir = None) -> None:
    """Send to MLflow what could not be sent while a job ran."""
    from pliant.tracking import sync as send

    run_dir = runs_directory(runs_dir) / name
    if not run_dir.is_dir():
        raise UserError(f"There is no run {name} in {run_dir.parent}. Check --runs-dir.")
    unsent = send(run_dir)
    typer.echo("everything is in MLflow" if not unsent else f"{unsent} events are still unsent")
    raise typer.Exit(3 if unsent else 0)


@app.command()
def ui(
    runs_dir: RunsDir = None,
    port: Annotated[int, typer.Option("--port")] = 5000,
) -> None:
    """Serve MLflow's page on the runs of a directory."""
    database = runs_directory(runs_dir) / "mlflow.db"
    if not database.is_file():
        raise UserError(f"{database} does not exist. Run a job first, `make demo` for one.")
    command = ["mlflow", "server", "--backend-store-uri", f"sqlite:///{database}"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    typer.echo(f"MLflow is starting: http://127.0.0.1:{port} answers soon. Ctrl-C ends it.")
    os.execv(sys.executable, [sys.executable, "-m", *command])


@app.command()
def version() -> None:
    """Print pliant's version."""
    typer.echo(__version__)


def quiet_libraries() -> None:
    """Ray prints a paragraph of advice when a worker dies, which pliant says in a line (Ray reads
    the variable when it is imported), and libraries warn each other of what will be renamed."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")


def logical_cpus(spec: JobSpec) -> int:
    """For an embedded Ray: room for every worker, and one CPU beside them."""
    return round(spec.elastic.max_workers * spec.resources.cpus_per_worker) + 1


class stopped_by_signals:  # noqa: N801 - reads as a statement
    """Within it, SIGINT and SIGTERM ask for a stop; a second one ends the process."""

    def __init__(self, event: threading.Event | None = None) -> None:
        self._event = event or threading.Event()

    def __enter__(self) -> threading.Event:
        self._before: dict[int, Any] = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self._event

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        if self._event.is_set():
            raise KeyboardInterrupt
        self._event.set()


def entry(arguments: list[str] | None = None) -> None:
    """The process edge: every error of pliant's own becomes one sentence and an exit code."""
    sys.exit(main(arguments))


def main(arguments: list[str] | None = None, command: Callable[..., Any] = app) -> int:
    """Runs a command line; returns the exit code."""
    try:
        result = command(args=arguments, standalone_mode=False)
        return int(result) if isinstance(result, int) else 0
    except PliantError as error:
        prefix = "pliant: " if not isinstance(error, Interrupted) else ""
        print(f"{prefix}{error.message}", file=sys.stderr)
        return error.exit_code
    except typer.Exit as ending:
        return ending.exit_code
    except KeyboardInterrupt:
        print("pliant: ended at once; the last checkpoint stands.", file=sys.stderr)
        return 130
    except Exception as error:
        usage = getattr(error, "format_message", None)
        if usage is None:
            raise
        print(f"pliant: {usage()} Try `pliant --help`.", file=sys.stderr)
        return 2
