"""Which pieces make which pack, and which packs make which step: arithmetic, the same everywhere.

What an epoch holds follows from the lengths of the pieces, the seed and the epoch's number alone.
Its pieces come in windows (`order`); each window is packed by best fit and its packs shuffled.
Pieces of badly filled packs are carried into the next window. One pass over the lengths writes an
index (the first pack of each window and the pieces carried into it), so that any window can be
planned again by itself: a reader finds its place in an epoch without replaying what came before.

The number of workers appears nowhere in this module.
"""

import hashlib
import json
import logging
import shutil
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pliant.data.order import MixedOrder, Mixture, Order, PassOrder, counts_of, shuffled
from pliant.data.packing import Packing, best_fit_decreasing, one_a_pack, select, well_filled
from pliant.data.store import Split
from pliant.errors import DataError

log = logging.getLogger(__name__)

PLAN_VERSION = 1
KEPT_WINDOWS = 8


@dataclass(frozen=True)
class PlanSettings:
    """All that the order depends on beside the lengths."""

    seq_len: int
    global_batch_size: int
    window: int
    packing: bool
    shuffle: bool
    seed: int
    mixture: Mixture | None = None
    """The shares of the data set's parts in an epoch; None: every piece once. A mixture is always
    shuffled."""


@dataclass(frozen=True)
class Cursor:
    """Our place in the data: `pack` packs of epoch `epoch` are done."""

    epoch: int
    pack: int


@dataclass(frozen=True)
class StepRange:
    """The packs of one step: `first` up to `last` of an epoch."""

    epoch: int
    first: int
    last: int


@dataclass(frozen=True)
class _Carried:
    """Pieces handed on from one window to the next, and how often that has happened to each."""

    pieces: NDArray[np.int64]
    ages: NDArray[np.uint8]


_NOTHING = _Carried(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint8))


class EpochPlan:
    """The packs of one epoch."""

    def __init__(
        self,
        lengths: NDArray[np.int32],
        order: Order,
        settings: PlanSettings,
        epoch: int,
    ) -> None:
        self._lengths = lengths
        self._order = order
        self._settings = settings
        self._epoch = epoch
        self._planned: OrderedDict[int, Packing] = OrderedDict()
        self._first_pack: NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        self._carried: list[NDArray[Any]] = []

    @property
    def num_windows(self) -> int:
        return self._order.num_windows

    @property
    def num_packs(self) -> int:
        return int(self._first_pack[-1])

    def packs(self, first: int, last: int) -> Packing:
        """Packs `first` up to `last`; the items are piece ids."""
        parts = [self._part(window, first, last) for window in self._windows_of(first, last)]
        if len(parts) == 1:
            return parts[0]
        counts = np.concatenate([np.diff(part.starts) for part in parts])
        return Packing(
            items=np.concatenate([part.items for part in parts]),
            starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        )

    def build_index(self) -> None:
        """The one pass over all lengths."""
        first_pack, bounds, pieces, ages = [0], [0], [], []
        carried = _NOTHING
        for window in range(self.num_windows):
            pieces.append(carried.pieces)
            ages.append(carried.ages)
            bounds.append(bounds[-1] + len(carried.pieces))
            packing, carried = self._plan(window, carried)
            first_pack.append(first_pack[-1] + packing.num_packs)
        self._first_pack = np.array(first_pack, dtype=np.int64)
        self._carried = [
            np.array(bounds, dtype=np.int64),
            np.concatenate([_NOTHING.pieces, *pieces]),
            np.concatenate([_NOTHING.ages, *ages]),
        ]

    def save_index(self, path: Path) -> None:
        """Writes the index beside `path` and moves it there whole; another writer may be first.

        Writers on several machines may share a process id, and so may one that died before.
        """
        scratch = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        scratch.mkdir(parents=True)
        try:
            for name, array in zip(_INDEX_FILES, [self._first_pack, *self._carried], strict=True):
                np.save(scratch / f"{name}.npy", array)
            scratch.rename(path)
        except OSError:
            shutil.rmtree(scratch)
            if not path.is_dir():
                raise

    def load_index(self, path: Path) -> None:
        self._first_pack, *self._carried = [
            np.load(path / f"{name}.npy", mmap_mode="r") for name in _INDEX_FILES
        ]

    def _windows_of(self, first: int, last: int) -> range:
        low = int(np.searchsorted(self._first_pack, first, side="right")) - 1
        high = int(np.searchsorted(self._first_pack, last, side="left"))
        return range(low, max(high, low + 1))

    def _part(self, window: int, first: int, last: int) -> Packing:
        base = int(self._first_pack[window])
        packing = self._window(window)
        low, high = max(first - base, 0), min(last - base, packing.num_packs)
        return select(packing, np.arange(low, high, dtype=np.int64))

    def _window(self, window: int) -> Packing:
        if window in self._planned:
            self._planned.move_to_end(window)
            return self._planned[window]
        bounds, pieces, ages = self._carried
        part = slice(bounds[window], bounds[window + 1])
        packing, _ = self._plan(window, _Carried(pieces[part], ages[part]))
        self._planned[window] = packing
        if len(self._planned) > KEPT_WINDOWS:
            self._planned.popitem(last=False)
        return packing

    def _plan(self, window: int, carried: _Carried) -> tuple[Packing, _Carried]:
        """The window's packs (items are piece ids) and what it hands on."""
        fresh = self._order.window(window)
        pieces = np.concatenate([carried.pieces, fresh])
        settings = self._settings
        if not settings.packing:
            packing, left = one_a_pack(len(pieces)), _NOTHING
        else:
            ages = np.concatenate([carried.ages, np.zeros(len(fresh), dtype=np.uint8)])
            is_last = window == self.num_windows - 1
            packing, left = _pack_window(pieces, ages, self._lengths[pieces], settings, is_last)
        if settings.shuffle:
            key = (settings.seed, self._epoch, 2, window)
            packing = select(packing, shuffled(packing.num_packs, *key))
        return Packing(items=pieces[packing.items], starts=packing.starts), left


class DataPlan:
    """The steps of a whole run: an `EpochPlan` per epoch, each indexed once and kept on disk."""

    def __init__(self, split: Split, settings: PlanSettings) -> None:
        self.split = split
        self.settings = settings
        self._epochs: dict[int, EpochPlan] = {}
        self._last_steps: list[int] = []
        self._index_root = split.workspace / "orders" / _digest(settings)

    def epoch(self, number: int) -> EpochPlan:
        if number not in self._epochs:
            self._epochs = {n: plan for n, plan in self._epochs.items() if n == number - 1}
            self._epochs[number] = self._open(number)
        return self._epochs[number]

    def steps_of(self, epoch: int) -> int:
        return -(-self.epoch(epoch).num_packs // self.settings.global_batch_size)

    def steps_in(self, epochs: int) -> int:
        """Steps of the first `epochs` epochs."""
        while len(self._last_steps) < epochs:
            before = self._last_steps[-1] if self._last_steps else 0
            steps = self.steps_of(len(self._last_steps))
            if steps == 0:
                raise DataError("The training set holds no pack. Add data, or shorten seq_len.")
            self._last_steps.append(before + steps)
        return self._last_steps[epochs - 1] if epochs else 0

    def locate(self, step: int) -> StepRange:
        """The packs of a step; steps count from 0 over all epochs."""
        epoch = next(
            (n for n, end in enumerate(self._last_steps) if step < end), len(self._last_steps)
        )
        while self.steps_in(epoch + 1) <= step:
            epoch += 1
        size = self.settings.global_batch_size
        first = (step - self.steps_in(epoch)) * size
        return StepRange(epoch, first, min(first + size, self.epoch(epoch).num_packs))

    def cursor(self, steps_done: int) -> Cursor:
        if steps_done == 0:
            return Cursor(0, 0)
        last = self.locate(steps_done - 1)
        return Cursor(last.epoch, last.last)

    def packs_of(self, step: int) -> Packing:
        place = self.locate(step)
        return self.epoch(place.epoch).packs(place.first, place.last)

    def steps(self, first: int, last: int) -> Iterator[tuple[int, Packing]]:
        """Steps `first` up to `last` with their packs."""
        for step in range(first, last):
            yield step, self.packs_of(step)

    def _open(self, number: int) -> EpochPlan:
        split = self.split
        order = order_of(split, self.settings, number)
        plan = EpochPlan(split.lengths, order, self.settings, number)
        path = self._index_root / f"epoch-{number:05d}"
        if not path.is_dir():
            plan.build_index()
            try:
                plan.save_index(path)
            except OSError as error:  # a full disk must not end a run
                log.warning("Every process indexes epoch %d for itself: %s", number, error)
                return plan
        plan.load_index(path)
        return plan


def order_of(split: Split, settings: PlanSettings, epoch: int) -> Order:
    """In which order an epoch takes the pieces of a split."""
    mixture = settings.mixture
    if mixture is None:
        return PassOrder(
            split.shard_starts, settings.window, settings.shuffle, settings.seed, epoch
        )
    counts = counts_of(mixture, split.parts, split.lengths)
    return MixedOrder(split.parts, counts, settings.window, settings.seed, epoch)


_INDEX_FILES = ("first_pack", "carried_bounds", "carried_pieces", "carried_ages")


def _pack_window(
    pieces: NDArray[np.int64],
    ages: NDArray[np.uint8],
    lengths: NDArray[np.int32],
    settings: PlanSettings,
    is_last: bool,
) -> tuple[Packing, _Carried]:
    packing = best_fit_decreasing(lengths, settings.seq_len)
    if is_last:
        return packing, _NOTHING
    keep = well_filled(packing, lengths, ages, settings.seq_len)
    rest = select(packing, np.flatnonzero(~keep)).items
    older = np.add(ages[rest], 1, dtype=np.uint8)
    left = _Carried(pieces[rest], older)
    return select(packing, np.flatnonzero(keep)), left


def _digest(settings: PlanSettings) -> str:
    """Of all that decides the order. What a plan without a mixture is called does not depend on
    there being mixtures."""
    fields = {name: value for name, value in asdict(settings).items() if value is not None}
    text = json.dumps({"version": PLAN_VERSION, **fields}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
