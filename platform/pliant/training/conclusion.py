"""Ends a job: compares the ledger with the plan, sums up, and closes the record."""

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import ray

from pliant.checkpoints import reader
from pliant.checkpoints.manifest import Manifest
from pliant.checkpoints.places import Places, places_of
from pliant.data.feeder import BlockGrid
from pliant.data.ledger import Audit, audit
from pliant.data.statistics import histogram
from pliant.data.store import Split
from pliant.errors import DataError, FilesDamaged, JobError, PliantError
from pliant.tracking import Journal, Summary, loss_plot, read_summary, summarize, write_summary
from pliant.tracking.mlflow_tracker import JOURNAL_FILE
from pliant.tracking.plots import lengths_plot
from pliant.training.holders import stop_holders
from pliant.training.worker import WorkerTask

TRACKING_DEADLINE_S = 30.0
RUN_ID_DEADLINE_S = 5.0
PICTURES = ("loss.png", "lengths.png")
NOTHING_CHECKED = Audit(steps=0, missing=0, duplicated=0, misplaced=0)


class StopSignal(Protocol):
    """Set when the user wants the job to stop."""

    def is_set(self) -> bool: ...


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    summary: Summary
    run_dir: Path
    mlflow_uri: str
    error: PliantError | None
    unsent_events: int


def conclude(
    task: WorkerTask, recorder: Any, uri: str, error: PliantError | None, stop: StopSignal
) -> Outcome:
    """Everything that is left to do once the workers have ended."""
    run_dir = task.run_dir
    places = places_of(run_dir, task.spec.checkpoint.storage)
    checkpoint, checked = None, NOTHING_CHECKED
    try:
        checkpoint = newest_manifest(places)
        checked = check_ledger(places, task.grid, checkpoint)
    except FilesDamaged as damage:
        error = error or damage
    except (OSError, pa.ArrowException) as problem:
        error = error or JobError(
            f"The checkpoints in {places.checkpoints.place()} could not be looked at: {problem}. "
            "Start the job again once they can be read."
        )
    state, reason = _verdict(task, checkpoint, error, checked, stop)
    ray.get(recorder.append.remote({"kind": "end", "state": state, "reason": reason}))
    run_id = ray.get(recorder.run_id.remote(RUN_ID_DEADLINE_S))
    summary = summarize(
        Journal(run_dir / JOURNAL_FILE).events(),
        state=state,
        reason=reason,
        samples_missing=checked.missing + checked.misplaced,
        samples_duplicated=checked.duplicated,
        mlflow_run_id=run_id,
    )
    shutil.rmtree(run_dir / "ray", ignore_errors=True)
    try:
        write_summary(run_dir / "summary.json", summary)
        loss_plot(Journal(run_dir / JOURNAL_FILE).events(), run_dir / "loss.png")
        _draw_lengths(task.grid.split.open(), run_dir / "lengths.png")
    except (OSError, DataError) as failure:
        error = error or _unwritten(run_dir, checkpoint, failure)
    for name in ("spec.yaml", "resolved.yaml", "manifest.json", "summary.json", *PICTURES):
        ray.get(recorder.artifact.remote(run_dir / name))
    status = {"FINISHED": "FINISHED", "INTERRUPTED": "KILLED"}.get(state, "FAILED")
    unsent = ray.get(recorder.finish.remote(status, TRACKING_DEADLINE_S))
    ray.kill(recorder)
    is_on_disk = (checkpoint.step if checkpoint else 0) >= summary.steps
    if is_on_disk or state != "INTERRUPTED":  # else the next start goes on from memory
        stop_holders(task.spec.name, run_dir)
    if error is None and state == "FAILED":
        error = JobError(reason or "The job failed.")
    if error is not None and "details" in error.facts:
        with suppress(OSError):  # what matters is in the message
            (run_dir / "error.txt").write_text(error.details, encoding="utf-8")
            error = JobError(f"{error.message} The whole report is in {run_dir / 'error.txt'}.")
    return Outcome(summary, run_dir, uri, error, unsent)


def _draw_lengths(split: Split, path: Path) -> None:
    """How long the training samples are, in tokens."""
    found = histogram(split.samples)
    lengths_plot(found.edges, found.counts, int(split.lengths.max()), path)


def _unwritten(run_dir: Path, checkpoint: Manifest | None, failure: Exception) -> JobError:
    problem = getattr(failure, "strerror", None) or failure
    kept = f"the checkpoint of step {checkpoint.step}" if checkpoint else "no checkpoint"
    return JobError(
        f"The job's summary could not be written to {run_dir}: {problem}. "
        f"There is {kept}. Make room and start the job again: it goes on from there, or only sums "
        "up."
    )


def _verdict(
    task: WorkerTask,
    checkpoint: Manifest | None,
    error: PliantError | None,
    checked: Audit,
    stop: StopSignal,
) -> tuple[str, str | None]:
    steps = checkpoint.step if checkpoint else 0
    if error is not None:
        return "FAILED", error.message
    if not checked.is_exact:
        return "FAILED", (
            f"The ledger differs from the plan: {checked.missing} samples missing, "
            f"{checked.duplicated} duplicated, {checked.misplaced} in the wrong step."
        )
    if steps == task.spec.training.steps:
        return "FINISHED", None
    if stop.is_set():
        return "INTERRUPTED", f"stopped after step {steps}; start it again to go on"
    return "FAILED", f"The workers ended after step {steps} of {task.spec.training.steps}."


def newest_manifest(places: Places) -> Manifest | None:
    """Of the newest checkpoint that is whole; None where there is none yet. Only sizes are
    compared: the ranks know the digests of what they wrote, and check those of what they load."""
    checkpoint = reader.newest(places.checkpoints, places.ledger, digests=False)
    return None if checkpoint is None else checkpoint.manifest


def check_ledger(places: Places, grid: BlockGrid, checkpoint: Manifest | None) -> Audit:
    """What the newest checkpoint says was trained, against the plan up to its step."""
    if checkpoint is None:
        return NOTHING_CHECKED
    files = [
        places.ledger.fetch(entry.file, entry.size_bytes, entry.sha256)
        for entry in checkpoint.ledger
    ]
    return audit(files, grid.open(), checkpoint.step)


def finished_before(task: WorkerTask, uri: str) -> Outcome | None:
    """How the job ended, where it was started again though there is nothing left to do."""
    path = task.run_dir / "summary.json"
    if not path.is_file():
        return None
    summary = read_summary(path)
    is_done = summary.state == "FINISHED" and summary.steps == task.spec.training.steps
    return Outcome(summary, task.run_dir, uri, None, 0) if is_done else None
