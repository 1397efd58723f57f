"""Puts pieces of different lengths into packs of equal capacity: exact best-fit decreasing.

The longest piece is placed first, each one into the fullest pack that still has room for it
(Johnson 1974). Lengths are small integers, so the pieces are sorted by counting, pieces of equal
length are placed together, and a bitmap over the packs' free room finds the best fit in a few
word operations: O(n + capacity) in all.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

WELL_FILLED = 0.97
"""Packs filled less than this hand their pieces on to the next window."""
MAX_AGE = 8
"""A piece that was handed on so many times is packed as it is."""

_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)


def _bit_positions() -> NDArray[np.uint8]:
    """De Bruijn's table: which bit is set in an isolated power of two."""
    table = np.zeros(64, dtype=np.uint8)
    for bit in range(64):
        table[((int(_DE_BRUIJN) << bit) % 2**64) >> 58] = bit
    return table


_BIT_POSITIONS = _bit_positions()


@dataclass(frozen=True)
class Packing:
    """Packs as runs of `items`: pack p holds items[starts[p] : starts[p + 1]]."""

    items: NDArray[np.int64]
    """Positions in the lengths that were packed, longest first within a pack."""
    starts: NDArray[np.int64]

    @property
    def num_packs(self) -> int:
        return len(self.starts) - 1


def best_fit_decreasing(lengths: NDArray[np.int32], capacity: int) -> Packing:
    """Packs all `lengths` [n], each in 1..capacity."""
    # The compiled code does not check its indices: another length would write beyond its arrays.
    assert not len(lengths) or (lengths.min() > 0 and lengths.max() <= capacity)
    bins, order, num_bins = _place(lengths, capacity)
    counts = np.bincount(bins, minlength=num_bins)
    starts = np.zeros(num_bins + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return Packing(items=order[np.argsort(bins[order], kind="stable")], starts=starts)


def one_a_pack(count: int) -> Packing:
    """Packing turned off: every piece has a pack to itself."""
    return Packing(
        items=np.arange(count, dtype=np.int64), starts=np.arange(count + 1, dtype=np.int64)
    )


def select(packing: Packing, packs: NDArray[np.int64]) -> Packing:
    """The given packs in the given order."""
    counts = np.diff(packing.starts)[packs]
    starts = np.zeros(len(packs) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    offsets = np.repeat(packing.starts[:-1][packs] - starts[:-1], counts)
    return Packing(items=packing.items[np.arange(starts[-1]) + offsets], starts=starts)


def well_filled(
    packing: Packing, lengths: NDArray[np.int32], ages: NDArray[np.uint8], capacity: int
) -> NDArray[np.bool_]:
    """Which packs to keep now; the pieces of the others may find a better place later."""
    if packing.num_packs == 0:
        return np.zeros(0, dtype=np.bool_)
    fill = np.add.reduceat(lengths[packing.items].astype(np.int64), packing.starts[:-1])
    oldest = np.maximum.reduceat(ages[packing.items], packing.starts[:-1])
    return (fill >= WELL_FILLED * capacity) | (oldest >= MAX_AGE)


@njit(cache=True)  # type: ignore[misc, unused-ignore]
def _place(
    lengths: NDArray[np.int32], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:  # pragma: no cover - compiled
    """The pack of every piece, the order in which pieces were placed, and the number of packs."""
    count = lengths.shape[0]
    order, first = _sort_decreasing(lengths, capacity)
    pack_of = np.empty(count, dtype=np.int64)
    head = np.full(capacity + 1, -1, dtype=np.int64)  # a pack with that much room
    below = np.empty(count, dtype=np.int64)  # the next pack with the same room
    num_words = (capacity >> 6) + 1
    words = np.zeros(num_words, dtype=np.uint64)  # bit r: some pack has room r
    summary = np.zeros((num_words >> 6) + 1, dtype=np.uint64)  # bit w: words[w] is not zero
    num_packs = 0
    for length in range(capacity, 0, -1):
        at = first[length]
        end = first[length - 1]
        while at < end:
            room = _smallest_room(words, summary, length)
            if room < 0:
                room = capacity
                pack = num_packs
                num_packs += 1
            else:
                pack = head[room]
                head[room] = below[pack]
                if head[room] < 0:
                    _clear(words, summary, room)
            copies = min(end - at, room // length)
            for i in range(at, at + copies):
                pack_of[order[i]] = pack
            at += copies
            room -= copies * length
            if room > 0:
                below[pack] = head[room]
                head[room] = pack
                _set(words, summary, room)
    return pack_of, order, num_packs


@njit(cache=True)  # type: ignore[misc, unused-ignore]
def _sort_decreasing(
    lengths: NDArray[np.int32], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:  # pragma: no cover - compiled
    """A stable counting sort; first[L] is where the pieces of length L begin."""
    first = np.zeros(capacity + 2, dtype=np.int64)
    for length in lengths:
        first[length - 1] += 1
    for length in range(capacity - 1, -1, -1):
        first[length] += first[length + 1]
    slots = first[1:].copy()
    order = np.empty(lengths.shape[0], dtype=np.int64)
    for i in range(lengths.shape[0]):
        slot = slots[lengths[i] - 1]
        order[slot] = i
        slots[lengths[i] - 1] = slot + 1
    return order, first


@njit(cache=True)  # type: ignore[misc, unused-ignore]
def _lowest_bit(word: np.uint64) -> int:  # pragma: no cover - compiled
    lowest = word & (~word + np.uint64(1))
    return int(_BIT_POSITIONS[(lowest * _DE_BRUIJN) >> np.uint64(58)])


@njit(cache=True)  # type: ignore[misc, unused-ignore]
def _smallest_room(
    words: NDArray[np.uint64], summary: NDArray[np.uint64], least: int
) -> int:  # pragma: no cover - compiled
    """The smallest room >= `least` that some pack has, or -1."""
    word = least >> 6
    bits = words[word] >> np.uint64(least & 63) << np.uint64(least & 63)
    if bits:
        return (word << 6) + _lowest_bit(bits)
    block = (word + 1) >> 6
    if block >= summary.shape[0]:
        return -1
    shift = np.uint64((word + 1) & 63)
    bits = summary[block] >> shift << shift
    while not bits:
        block += 1
        if block == summary.shape[0]:
            return -1
        bits = summary[block]
    word = (block << 6) + _lowest_bit(bits)
    return (word << 6) + _lowest_bit(words[word])


@njit(cache=True)  # type: ignore[misc, unused-ignore]
def _set(
    words: NDArray[np.uint64], summary: NDArray[np.uint64], room: int
) -> None:  # pragma: no cover - compiled
    word = room >> 6
    words[word] |= np.uint64(1) << np.uint64(room & 63)
    summary[word >> 6] |= np.uint64(1) << np.uint64(word & 63)


@njit(cache=True)  # type: ignore[misc, unused-ignore]
def _clear(
    words: NDArray[np.uint64], summary: NDArray[np.uint64], room: int
) -> None:  # pragma: no cover - compiled
    word = room >> 6
    words[word] &= ~(np.uint64(1) << np.uint64(room & 63))
    if not words[word]:
        summary[word >> 6] &= ~(np.uint64(1) << np.uint64(word & 63))
