"""In which order an epoch takes the pieces: arithmetic on the seed and the epoch's number.

An order is cut into windows, which are packed one by one. Shards are the unit of reading, so groups
of shards are shuffled, and then the pieces within a group: a reader needs the shards of one group,
or of one group for each part of a mixture, at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

GROUP_PIECES = 262_144
"""Pieces that are shuffled together; whole shards, at least one."""

Run = tuple[int, int]
"""Pieces `first` up to `last`."""


class Order(Protocol):
    """The order of one epoch."""

    @property
    def num_windows(self) -> int: ...

    def window(self, number: int) -> NDArray[np.int64]:
        """The pieces of a window."""


class PassOrder:
    """Every piece once."""

    def __init__(
        self,
        shard_starts: NDArray[np.int64],
        window: int,
        shuffle: bool,
        seed: int,
        epoch: int,
    ) -> None:
        groups = groups_of(list(pairwise(shard_starts.tolist())))
        self._pass = _Pass(groups, seed, epoch) if shuffle else _Unshuffled(groups)
        self._size = window
        windows = [-(-size // window) for size in self._pass.sizes]
        self._first_window = np.cumsum([0, *windows])

    @property
    def num_windows(self) -> int:
        return int(self._first_window[-1])

    def window(self, number: int) -> NDArray[np.int64]:
        """A window never reaches over the end of a group."""
        group = int(np.searchsorted(self._first_window, number, side="right")) - 1
        begin = (number - int(self._first_window[group])) * self._size
        return self._pass.group(group)[begin : begin + self._size]


class MixedOrder:
    """So many pieces of each part of a mixture, evenly over the epoch.

    A part's passes follow one another without regard to the epochs' ends: whatever the shares, no
    piece of a part comes again before all of the part's have come.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[Run]],
        counts: Sequence[int],
        window: int,
        seed: int,
        epoch: int,
    ) -> None:
        self._parts = [_Passes(groups_of(runs), seed) for runs in parts]
        self._counts = counts
        self._epoch = epoch
        self._num_windows = -(-sum(counts) // window)

    @property
    def num_windows(self) -> int:
        return self._num_windows

    def window(self, number: int) -> NDArray[np.int64]:
        """Every window has the parts in the mixture's proportion, to within one piece of each."""
        pieces = []
        for part, count in zip(self._parts, self._counts, strict=True):
            begin, end = (count * n // self._num_windows for n in (number, number + 1))
            done = self._epoch * count
            pieces.append(part.pieces(done + begin, done + end))
        return np.concatenate(pieces)


@dataclass(frozen=True)
class Mixture:
    """The parts of a data set and their shares of an epoch."""

    by: str
    """What the shares are of: "samples" or "tokens"."""
    weights: tuple[float, ...]
    """By part, in any scale."""


def counts_of(
    mixture: Mixture, parts: Sequence[Sequence[Run]], lengths: NDArray[np.int32]
) -> list[int]:
    """How many pieces of each part an epoch has. An epoch is as large as the whole data set, in
    pieces or in tokens, and at least one piece of each part is in it."""
    sizes = np.array([sum(last - first for first, last in runs) for runs in parts])
    tokens = np.array([_tokens_in(runs, lengths) for runs in parts])
    shares = np.array(mixture.weights) / sum(mixture.weights)
    if mixture.by == "tokens":
        counts = shares * tokens.sum() * sizes / tokens
    else:
        counts = shares * sizes.sum()
    return [max(1, int(count)) for count in np.rint(counts)]


def _tokens_in(runs: Sequence[Run], lengths: NDArray[np.int32]) -> int:
    return sum(int(lengths[first:last].sum(dtype=np.int64)) for first, last in runs)


def groups_of(shards: Sequence[Run]) -> list[Run]:
    """Neighbouring shards put together until a group is large enough; empty ones are left out."""
    groups: list[Run] = []
    begin = end = 0
    for first, last in shards:
        if end > begin and (end - begin >= GROUP_PIECES or first != end):
            groups.append((begin, end))
            begin = first
        elif end == begin:
            begin = first
        end = last
    return [*groups, (begin, end)] if end > begin else groups


class _Unshuffled:
    """Groups as they lie."""

    def __init__(self, groups: list[Run]) -> None:
        self._groups = groups

    @property
    def sizes(self) -> list[int]:
        return [last - first for first, last in self._groups]

    def group(self, number: int) -> NDArray[np.int64]:
        return np.arange(*self._groups[number], dtype=np.int64)


class _Pass(_Unshuffled):
    """One pass over groups, shuffled; the order of the group in use is kept."""

    def __init__(self, groups: list[Run], seed: int, number: int) -> None:
        super().__init__([groups[i] for i in shuffled(len(groups), seed, number, 0)])
        self._key = (seed, number, 1)
        self._latest: tuple[int, NDArray[np.int64]] | None = None

    def group(self, number: int) -> NDArray[np.int64]:
        if self._latest is None or self._latest[0] != number:
            pieces = super().group(number)
            order = shuffled(len(pieces), *self._key, self._groups[number][0])
            self._latest = number, pieces[order]
        return self._latest[1]


class _Passes:
    """Pass after pass over the groups of one part, as one endless row of pieces."""

    def __init__(self, groups: list[Run], seed: int) -> None:
        self._groups = groups
        self._seed = seed
        self._size = sum(last - first for first, last in groups)
        self._open: dict[int, _Pass] = {}

    def pieces(self, begin: int, end: int) -> NDArray[np.int64]:
        found = [np.empty(0, dtype=np.int64)]
        while begin < end:
            number, offset = divmod(begin, self._size)
            found.append(self._within(number, offset, min(end - begin + offset, self._size)))
            begin += len(found[-1])
        return np.concatenate(found)

    def _within(self, number: int, begin: int, end: int) -> NDArray[np.int64]:
        """Of one pass, up to the end of the group that `begin` lies in at most."""
        if number not in self._open:
            self._open = {n: kept for n, kept in self._open.items() if abs(n - number) == 1}
            self._open[number] = _Pass(self._groups, self._seed, number)
        one_pass = self._open[number]
        starts = np.cumsum([0, *one_pass.sizes])
        group = int(np.searchsorted(starts, begin, side="right")) - 1
        first = int(starts[group])
        return one_pass.group(group)[begin - first : end - first]


def shuffled(count: int, *key: int) -> NDArray[np.int64]:
    """A permutation of range(count) that depends on `key` alone, not on a library's generator:
    positions sorted by a hash of key and position (SplitMix64, Steele et al. 2014)."""
    state = np.uint64(0)
    with np.errstate(over="ignore"):
        for part in key:
            state = _mix(state + np.uint64(part) + _GOLDEN)
        hashes = _mix(state + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)
    return np.argsort(hashes, kind="stable").astype(np.int64)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(value: Any) -> Any:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
