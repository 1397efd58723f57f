"""Runs that take snapshots, end without a word, and go on; what `test_hot_state` runs in each
rank."""

import os
import shutil
import threading
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch.distributed as dist

from fakes.engines import here, whole_state
from fakes.jobs import tiny_spec
from fakes.restarts import Run, run_of, scramble
from pliant.checkpoints import reader, snapshot
from pliant.checkpoints.manifest import Manifest
from pliant.checkpoints.snapshot import Roots
from pliant.training import saving
from pliant.training.state import KEY_FILE

SAVED, HOT, LAST = 2, 4, 6
RUNS = ("on 1", "on 2", "on 3")


def on_two_ranks(root: Path) -> dict[str, Any]:
    killed = [_until_killed(root / name) for name in RUNS]
    return {
        "killed": killed,
        "later": later(root, RUNS[1]),
        "torn": _torn(root / "torn"),
        "altered": _altered(root / "altered"),
        "full_disk": _full_disk(root / "full disk"),
        "closed": _closed_while_saving(root / "closed"),
        "resized": _resized(root / "resized"),
        "digests": _altered_digest(root / "digests"),
    }


def later(root: Path, name: str) -> dict[str, Any]:
    """Goes on from the snapshot, on however many ranks these are."""
    with run_of(tiny_spec(), root / name, hot_every=1, change=scramble) as run:
        found = {"progress": run.progress, "state": _state(run), "damage": run.state.damage}
        run.state.attempt = 2
        run.train(LAST)
        run.state.save(run.progress, wait=True)
        return found | {"final": _state(run), "ledger": _ledger(root / name)}


def _until_killed(run_dir: Path) -> dict[str, Any]:
    """A checkpoint, snapshots after it, and then nothing more is kept."""
    with run_of(tiny_spec(), run_dir, hot_every=1) as run:
        run.state.attempt = 1
        run.train(SAVED)
        run.state.save(run.progress, wait=True)
        pages = set()
        while run.progress.step < HOT:
            run.train(run.progress.step + 1)
            pages |= {view.data_ptr() for view in _slots(run).latest.views}
        found = {"progress": run.progress, "state": _state(run), "pages": len(pages)}
        found["views"] = len(_slots(run).latest.views)
        run.train(LAST, keeps=False)
        return found | {"final": _state(run)}


def _torn(run_dir: Path, at: int = 0) -> dict[str, Any]:
    """The newest snapshot of rank 1 is no file of tensors any more."""
    _until_killed(run_dir)
    dist.barrier()
    if here().rank == 0:
        roots = Roots.of(run_dir, (run_dir / KEY_FILE).read_text())
        newest = next(p for p in snapshot.find(roots.paths) if p.rank == 1 and p.age == (1, HOT))
        with Path(newest.file).open("r+b") as file:
            file.seek(at, os.SEEK_END if at else os.SEEK_SET)
            file.write(b"\xff" * 64)
    dist.barrier()
    with run_of(tiny_spec(), run_dir, hot_every=1, change=scramble) as run:
        return {"step": run.progress.step, "damage": run.state.damage}


def _altered(run_dir: Path) -> dict[str, Any]:
    """The last numbers in the newest snapshot of rank 1 are other ones."""
    return _torn(run_dir, at=-64)


def _full_disk(run_dir: Path) -> dict[str, Any]:
    """The disk of the last rank is full when the first checkpoint is taken, and not later."""
    usage = namedtuple("usage", "total used free")
    real = shutil.disk_usage
    with run_of(tiny_spec(), run_dir, hot_every=1) as run:
        run.train(1)
        if here().rank == here().world_size - 1:
            shutil.disk_usage = lambda path: usage(9, 9, 0)  # type: ignore[assignment]
        run.state.save(run.progress)
        run.state._save.done.wait()
        dist.barrier()
        shutil.disk_usage = real
        run.train(2)
        run.state.save(run.progress)
        run.train(3)
        run.state.just_in_time(run.progress, durable=True)
        return {
            "events": [(event["kind"], event["step"]) for event in run.events],
            "steps": run.progress.step,
            "ledger": _ledger(run_dir),
        }


def _closed_while_saving(run_dir: Path) -> dict[str, Any]:
    """The attempt ends while rank 1's file is being stored."""
    goes_on, real = threading.Event(), saving.store_rank_file

    def slow(*args: Any) -> Any:
        goes_on.wait()
        return real(*args)

    with run_of(tiny_spec(), run_dir, hot_every=1) as run:
        run.train(1)
        if here().rank == 1:
            saving.store_rank_file = slow  # type: ignore[assignment]
        run.state.save(run.progress)
        save = run.state._save
        if here().rank == 0:
            save.done.wait()
        run.state.close()
        was_blocked = not save.done.is_set()
        goes_on.set()
        save.done.wait()
        saving.store_rank_file = real
        run.state.close()
    dist.barrier()
    names = reader.committed(run_dir / "checkpoints")
    with run_of(tiny_spec(), run_dir, hot_every=1) as run:
        return {"was_blocked": was_blocked, "committed": names, "step": run.progress.step}


def _resized(run_dir: Path) -> dict[str, Any]:
    """Snapshots are rare, and the group is about to end between two."""
    with run_of(tiny_spec(), run_dir, hot_every=100) as run:
        run.train(3)
        run.state.just_in_time(run.progress, durable=False)
        saved = _state(run)
    names = reader.committed(run_dir / "checkpoints")
    with run_of(tiny_spec(), run_dir, hot_every=100, change=scramble) as run:
        loaded = _state(run)
    return {"step": run.progress.step, "committed": names, "saved": saved, "loaded": loaded}


def _altered_digest(run_dir: Path) -> dict[str, Any]:
    """Of a tensor in the newest checkpoint, as if it had been put together wrongly."""
    with run_of(tiny_spec(), run_dir) as run:
        for step in (1, 2):
            run.train(step)
            run.state.save(run.progress, wait=True)
    if here().rank == 0:
        name = reader.committed(run_dir / "checkpoints")[0]
        manifest = Manifest.read(run_dir / "checkpoints", name)
        altered = dict.fromkeys(manifest.digests, "0" * 16)
        replace(manifest, digests=altered).write(run_dir / "checkpoints", name)
    dist.barrier()
    with run_of(tiny_spec(), run_dir, change=scramble) as run:
        return {"step": run.progress.step, "damage": run.state.damage}


def _slots(run: Run) -> Any:
    return run.state._snapshots.slots  # type: ignore[union-attr]


def _state(run: Run) -> Any:
    return {key: tensor.clone() for key, tensor in whole_state(run.engine).items()}


def _ledger(run_dir: Path) -> list[tuple[int, int]]:
    """(step, piece) of everything that the newest checkpoint says was trained."""
    newest = reader.newest(run_dir / "checkpoints", run_dir / "ledger")
    assert newest is not None
    tables = [pq.read_table(run_dir / "ledger" / entry.file) for entry in newest.manifest.ledger]
    rows = [row for table in tables for row in table.to_pylist()]
    return sorted((row["step"], piece) for row in rows for piece in row["pieces"])
