"""The record of which pieces were trained in which step, and its comparison with the plan.

What is recorded are the ids that travelled with the tensors that were run; they are never derived
from the plan. A ledger file holds the steps between two checkpoints and counts only once a
checkpoint's manifest names it: the steps of an attempt that died before its next checkpoint are not
in the record, and their repetition does not appear twice.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pliant.batch import StepBatch
from pliant.data.plan import DataPlan
from pliant.files import replacing

Entries = list[tuple[int, NDArray[np.int64]]]
"""(step, the pieces that a rank ran in it)."""


class Ledger:
    """One rank's steps since the last checkpoint."""

    def __init__(self) -> None:
        self._entries: Entries = []

    def record(self, step: int, batch: StepBatch) -> None:
        """Step number `step` (from 0) was done with this rank's part of `batch`."""
        pieces = [micro.piece_ids for micro in batch.micro_batches]
        self._entries.append((step, np.concatenate(pieces)))

    def take(self) -> Entries:
        """What was recorded since the last call."""
        entries, self._entries = self._entries, []
        return entries


def write_ledger(path: Path, ranks: Iterable[Entries]) -> tuple[int, int]:
    """The entries of all ranks as one file; returns the first and the last step in it."""
    entries = sorted((entry for rank in ranks for entry in rank), key=lambda entry: entry[0])
    table = pa.table(
        {
            "step": pa.array([step for step, _ in entries], type=pa.int64()),
            "pieces": pa.array([ids for _, ids in entries], type=pa.list_(pa.int64())),
        }
    )
    with replacing(path) as file:
        pq.write_table(table, file, compression="zstd")
    return entries[0][0], entries[-1][0]


@dataclass(frozen=True)
class Audit:
    """The ledger against the plan."""

    steps: int
    missing: int
    """Pieces that the plan has and the ledger has not."""
    duplicated: int
    """Entries beyond those that the plan has."""
    misplaced: int
    """Pieces that were trained in another step than planned."""

    @property
    def is_exact(self) -> bool:
        return not (self.missing or self.duplicated or self.misplaced)


def audit(files: Iterable[Path], plan: DataPlan, num_steps: int) -> Audit:
    """Compares what was trained with steps 0 to `num_steps` of the plan, as multisets of pieces
    per epoch and step by step."""
    trained = _read(files)
    missing = duplicated = misplaced = 0
    lost: dict[int, list[NDArray[np.int64]]] = {}
    found: dict[int, list[NDArray[np.int64]]] = {}
    for step in range(num_steps):
        epoch = plan.locate(step).epoch
        planned = np.sort(plan.packs_of(step).items)
        actual = np.sort(np.concatenate(trained.pop(step, [_NONE])))
        if not np.array_equal(planned, actual):
            lost.setdefault(epoch, []).append(_beyond(planned, actual))
            found.setdefault(epoch, []).append(_beyond(actual, planned))
    for epoch in lost:
        absent = np.sort(np.concatenate(lost[epoch]))
        extra = np.sort(np.concatenate(found[epoch]))
        misplaced += len(absent) - len(_beyond(absent, extra))
        missing += len(_beyond(absent, extra))
        duplicated += len(_beyond(extra, absent))
    duplicated += sum(len(ids) for parts in trained.values() for ids in parts)
    return Audit(num_steps, missing, duplicated, misplaced)


_NONE = np.empty(0, dtype=np.int64)


def _read(files: Iterable[Path]) -> dict[int, list[NDArray[np.int64]]]:
    trained: dict[int, list[NDArray[np.int64]]] = {}
    for path in files:
        table = pq.read_table(path)
        pieces = table.column("pieces").combine_chunks()
        offsets, flat = pieces.offsets.to_numpy(), pieces.values.to_numpy()
        for row, step in enumerate(table.column("step").to_pylist()):
            trained.setdefault(step, []).append(flat[offsets[row] : offsets[row + 1]])
    return trained


def _beyond(left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int64]:
    """The multiset difference left - right."""
    values, counts = np.unique(left, return_counts=True)
    others, other_counts = np.unique(right, return_counts=True)
    at = np.searchsorted(others, values)
    at_safe = np.minimum(at, max(len(others) - 1, 0))
    same = others[at_safe] == values if len(others) else np.zeros(len(values), dtype=bool)
    taken = np.where(same, other_counts[at_safe] if len(others) else 0, 0)
    return np.repeat(values, np.maximum(counts - taken, 0))
