"""The number of workers that somebody asked a job for: `wanted.json` in the run directory.

A file, so that it reaches a job wherever its driver runs, and stands when the driver starts again.
"""

import json
import time
from pathlib import Path

import yaml

from pliant.errors import UserError
from pliant.files import file_lock, write_atomically
from pliant.spec.elastic import ElasticSpec
from pliant.tracking import Journal
from pliant.tracking.mlflow_tracker import JOURNAL_FILE

FILE = "wanted.json"
POLL_S = 0.25


class WantedWorkers:
    """What the driver watches."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        self._seen: int | None = None
        self.value: int | None = None
        """None: as many as there is room for."""

    def changed(self) -> bool:
        """Whether another number is wanted than at the last call."""
        before = self.value
        try:
            written = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            written = None
        if written != self._seen:
            self._seen = written
            self.value = read(self._path)
        return self.value != before


def read(path: Path) -> int | None:
    """What the file says; None where it says nothing that can be understood."""
    try:
        wanted = json.loads(path.read_bytes())["workers"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return wanted if isinstance(wanted, int) else None


def resize(run_dir: Path, wanted: int | None, wait_s: float) -> str:
    """Leaves word for the job, waits until it has so many workers, and says what came of it.

    Raises `UserError` where there is no such run or its spec does not allow the number.
    """
    elastic = _elastic_of(run_dir)
    _check(run_dir.name, wanted, elastic)
    write_atomically(run_dir / FILE, json.dumps({"workers": wanted}).encode())
    goal = "as many workers as there is room for" if wanted is None else f"{wanted} workers"
    if not _is_running(run_dir):
        return f"{run_dir.name} is not running; it will have {goal} when it is started again"
    if wanted is None or not wait_s:
        return f"{run_dir.name} was asked for {goal}"
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        attempts = [e for e in Journal(run_dir / JOURNAL_FILE).events() if e["kind"] == "attempt"]
        if attempts and attempts[-1]["world_size"] == wanted:
            return f"{run_dir.name} has {goal}, from step {attempts[-1]['step']} on"
        time.sleep(POLL_S)
    return f"{run_dir.name} was asked for {goal}, and has not got there within {wait_s:g} s"


def _check(name: str, wanted: int | None, elastic: ElasticSpec) -> None:
    sizes = elastic.allowed_workers or range(elastic.min_workers, elastic.max_workers + 1)
    if wanted is not None and wanted not in sizes:
        allowed = ", ".join(map(str, sorted(sizes)))
        raise UserError(
            f"{wanted} workers were asked for, and {name} may have {allowed}. Choose one of these, "
            "or change elastic.min_workers and max_workers and start it again."
        )


def _elastic_of(run_dir: Path) -> ElasticSpec:
    path = run_dir / "resolved.yaml"
    if not path.is_file():
        raise UserError(
            f"There is no run {run_dir.name} in {run_dir.parent}. Check --runs-dir.",
        )
    return ElasticSpec.model_validate(yaml.safe_load(path.read_bytes())["elastic"])


def _is_running(run_dir: Path) -> bool:
    try:
        with file_lock(run_dir / ".lock", wait=False):
            return False
    except BlockingIOError:
        return True
