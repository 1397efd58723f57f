"""What a run has saved, as `pliant checkpoints` looks at it."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pliant.checkpoints import reader, retention
from pliant.checkpoints.manifest import Manifest, manifest_in
from pliant.checkpoints.places import Places, places_of
from pliant.checkpoints.writer import age
from pliant.cli.options import runs_directory
from pliant.data.store import Prepared, find_store, store_root, stores_of
from pliant.errors import FilesDamaged, UserError
from pliant.files import file_lock
from pliant.spec import JobSpec
from pliant.spec.load import build_spec, read_yaml
from pliant.training import export as exporting


@dataclass(frozen=True)
class Run:
    """A run's directory and what it was asked to do."""

    directory: Path
    spec: JobSpec
    """As it was resolved."""
    places: Places


def open_run(name: str, runs_dir: str | None) -> Run:
    """Raises `UserError` where there is none."""
    directory = runs_directory(runs_dir) / name
    path = directory / "resolved.yaml"
    if not path.is_file():
        raise UserError(f"There is no run {name} in {directory.parent}. Check --runs-dir.")
    spec = build_spec(read_yaml(path), origin=str(path))
    return Run(directory, spec, places_of(directory, spec.checkpoint.storage))


def rows(run: Run) -> list[dict[str, Any]]:
    """Every checkpoint with the reason why it stays or goes, the newest first."""
    found = retention.survey(run.places.checkpoints, _policy(run))
    decision = retention.decide(found, _policy(run), _is_idle(run))
    reasons = decision.kept | decision.doomed
    return [_row(run, one, reasons[one]) for one in sorted(reasons, key=_age, reverse=True)]


def committed(run: Run, step: int | None) -> list[str]:
    """Of that step, the newest first. Raises `UserError` where there is none."""
    names = reader.committed(run.places.checkpoints)
    steps = {name: _age(name)[1] for name in names}
    chosen = [name for name in names if step in (None, steps[name])]
    if not chosen:
        there = ", ".join(map(str, sorted(set(steps.values())))) or "none"
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise UserError(
            f"{run.places.checkpoints.place()} holds {what}. Steps that are there: {there}."
        )
    return chosen


def damage(run: Run, name: str) -> list[str]:
    """What is wrong with a checkpoint, a sentence each."""
    storage = run.places.checkpoints
    try:
        checkpoint = reader.Checkpoint(storage, name, Manifest.read(storage, name))
    except FilesDamaged as error:
        return [error.message]
    return [error.message for error in reader.damages(checkpoint, run.places.ledger)]


def prune(run: Run, dry_run: bool) -> dict[str, str]:
    """Removes what the spec does not keep; the names with the reasons. The newest whole one stays.

    Raises `UserError` while the job runs, and `FilesDamaged` where none is whole."""
    storage, ledger = run.places.checkpoints, run.places.ledger
    with _alone(run):
        newest = reader.newest(storage, ledger)
        good = None if newest is None else newest.name
        found = retention.survey(storage, _policy(run))
        decision = retention.decide(found, _policy(run), is_idle=True, good=good)
        if not dry_run:
            retention.prune(storage, _policy(run), ledger, is_idle=True, good=good)
    return decision.doomed


def export(
    run: Run, step: int | None, to: Path | None, dtype: str, max_shard_bytes: int, adapter: bool
) -> str:
    """Writes the weights of a step; says where they are."""
    checkpoint = _whole(run, step)
    at = f"step-{checkpoint.manifest.step:08d}" + ("-adapter" if adapter else "")
    directory = (to or run.directory / "export" / at).expanduser().absolute()
    source = _source(run)
    weights = exporting.DTYPES[dtype]
    if adapter:
        exporting.export_adapter(source, checkpoint, directory, weights)
    else:
        exporting.export_model(source, checkpoint, directory, weights, max_shard_bytes)
    size_bytes = sum(path.stat().st_size for path in directory.iterdir())
    return f"step {checkpoint.manifest.step} is in {directory}, {_size(size_bytes)}"


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("step", "attempt", "workers", "size", "age", "metrics", "why"):
        table.add_column(heading, justify="left" if heading in ("metrics", "why") else "right")
    for row in rows:
        saved = row.get("saved")
        metrics = [f"{key} {value:.4g}" for key, value in row.get("metrics", {}).items()]
        table.add_row(
            str(row["step"]),
            str(row["attempt"]),
            str(row.get("world_size", "?")),
            _size(row["size_bytes"]) if "size_bytes" in row else "?",
            "?" if saved is None else _duration(time.time() - saved),
            ", ".join(metrics),
            row["why"],
        )
    Console().print(table)


def parse_size(text: str) -> int:
    """Bytes of "5GB", "500 MB", "2GiB" or a plain number. Raises `UserError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text.strip(), re.IGNORECASE)
    size = 0
    if match:
        base = 1024 if match[3] else 1000
        size = int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))
    if size < 1:
        raise UserError(f"--max-shard-size is {text}. Give a size such as 500MB or 5GB.")
    return size


def _row(run: Run, name: str, why: str) -> dict[str, Any]:
    attempt, step = _age(name)
    row: dict[str, Any] = {"name": name, "step": step, "attempt": attempt, "why": why}
    storage = run.places.checkpoints
    try:
        manifest = Manifest.read(storage, name)
    except FilesDamaged:
        return row
    info = storage.info(manifest_in(name))
    return row | {
        "world_size": manifest.world_size,
        "size_bytes": sum(file.size_bytes for file in manifest.files),
        "saved": None if info is None else info.modified,
        "metrics": manifest.metrics,
    }


def _whole(run: Run, step: int | None) -> reader.Checkpoint:
    """Raises `FilesDamaged` where the step's files are not what was written."""
    names = committed(run, step)
    if step is None:
        newest = reader.newest(run.places.checkpoints, run.places.ledger)
        assert newest is not None
        return newest
    storage = run.places.checkpoints
    checkpoint = reader.Checkpoint(storage, names[0], Manifest.read(storage, names[0]))
    reader.verify(checkpoint, run.places.ledger)
    return checkpoint


def _source(run: Run) -> exporting.Run:
    prepared = _prepared(run)
    if prepared is None:
        return exporting.Run(run.spec, _vocab_size(run), _tokenizer(run))
    known = prepared.manifest
    return exporting.Run(
        run.spec, _vocab_size(run), _tokenizer(run), known["eos_id"], known["pad_id"]
    )


def _vocab_size(run: Run) -> int:
    """As the data was prepared; of a model that needs no such number, its own."""
    prepared = _prepared(run)
    if prepared is not None:
        return int(prepared.manifest["vocab_size"])
    config = run.spec.model.config
    if config is not None:
        return int(config["vocab_size"])
    if run.spec.model.path is not None:
        return 1  # the model brings its vocabulary; what is built is only tried on token 0
    raise UserError(
        f"The prepared data of {run.spec.name} is gone, and with it the size of the vocabulary "
        "that model.factory is called with. Start the job again with `pliant run`, which prepares "
        "it."
    )


def _tokenizer(run: Run) -> Path | None:
    """The directory that the job took its tokenizer from, else the copy beside its data."""
    given = run.spec.data.tokenizer.path
    if given is not None and (Path(given).expanduser() / "tokenizer.json").is_file():
        return Path(given).expanduser()
    prepared = _prepared(run)
    return None if prepared is None else prepared.tokenizer_path()


def _prepared(run: Run) -> Prepared | None:
    """The prepared data, where it is still there."""
    try:
        key = json.loads((run.directory / "manifest.json").read_bytes())["data"]["key"]
    except (OSError, ValueError, KeyError):
        return None
    data = run.spec.data
    store = stores_of(data, store_root(data, run.directory.parent)).below(key)
    return find_store(store)


def _policy(run: Run) -> retention.Policy:
    return retention.Policy.of(run.spec.checkpoint)


@contextmanager
def _alone(run: Run) -> Iterator[None]:
    """Raises `UserError` while a driver has the run."""
    try:
        with file_lock(run.directory / ".lock", wait=False):
            yield
    except BlockingIOError:
        raise UserError(
            f"{run.directory.name} is running, and a running job prunes for itself. Stop it first."
        ) from None


def _is_idle(run: Run) -> bool:
    try:
        with _alone(run):
            return True
    except UserError:
        return False


def _age(name: str) -> tuple[int, int]:
    found = age(name)
    assert found is not None
    return found


def _size(size_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:,.1f} {unit}"
    return f"{size_bytes} bytes"


def _duration(seconds: float) -> str:
    for unit, factor in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
