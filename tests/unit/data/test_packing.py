"""The compiled packing against best fit decreasing in plain Python."""

import bisect
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.data.packing import (
    MAX_AGE,
    WELL_FILLED,
    Packing,
    best_fit_decreasing,
    one_a_pack,
    select,
    well_filled,
)


def reference(lengths, capacity):
    """How full each pack is, by the definition: each piece, longest first, goes into the fullest
    pack that has room for it. Which of several equally full packs it takes makes no difference."""
    rooms = []  # sorted
    for length in sorted(lengths, reverse=True):
        at = bisect.bisect_left(rooms, length)
        room = rooms.pop(at) if at < len(rooms) else capacity
        bisect.insort(rooms, room - length)
    return sorted(capacity - room for room in rooms)


def contents(packing, lengths):
    return [lengths[items].tolist() for items in np.split(packing.items, packing.starts[1:-1])]


def as_lengths(values):
    return np.array(values, dtype=np.int32)


@st.composite
def problems(draw):
    """Capacities on both sides of the bitmap's words and of its summary's, and mixed lengths."""
    edges = st.sampled_from([1, 2, 63, 64, 65, 127, 128, 4095, 4096, 4097, 8191, 8192, 8193])
    capacity = draw(edges | st.integers(1, 9000))
    long = st.integers(1, capacity)
    short = st.integers(1, max(capacity // 20, 1))
    lengths = draw(st.lists(long | short, max_size=120))
    repeats = draw(st.integers(1, 4))
    return as_lengths(lengths * repeats), capacity


@given(problems())
@settings(max_examples=300, deadline=None)
def test_packs_hold_what_best_fit_decreasing_gives_them(problem):
    lengths, capacity = problem
    packing = best_fit_decreasing(lengths, capacity)
    assert sorted(packing.items.tolist()) == list(range(len(lengths)))
    if not len(lengths):
        assert (packing.num_packs, packing.starts.tolist()) == (0, [0])
        return
    packs = contents(packing, lengths)
    assert all(sum(pack) <= capacity for pack in packs)
    assert all(pack == sorted(pack, reverse=True) for pack in packs)
    assert sorted(map(sum, packs)) == reference(lengths.tolist(), capacity)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", [512, 4096, 8192, 8193, 9000])
def test_a_whole_window_is_packed_as_the_definition_packs_it(capacity, seed):
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(5.5, 1.0, 2000), 1, capacity).astype(np.int32)
    packs = contents(best_fit_decreasing(lengths, capacity), lengths)
    assert sorted(map(sum, packs)) == reference(lengths.tolist(), capacity)


def test_short_rows_fill_a_capacity_beyond_8192_as_well():
    """8193 is where the summary of the bitmap needs a third word."""
    lengths = np.random.default_rng(0).integers(1, 100, 3000).astype(np.int32)
    least = -(-int(lengths.sum()) // 8193)
    for capacity in (8191, 8192, 8193, 8256):
        assert best_fit_decreasing(lengths, capacity).num_packs - least in (0, 1)
        found = contents(best_fit_decreasing(lengths, capacity), lengths)
        assert len(found) == len(reference(lengths.tolist(), capacity))


def test_packing_does_not_change_its_input():
    lengths = as_lengths([3, 1, 2])
    lengths.flags.writeable = False
    best_fit_decreasing(lengths, 4)
    assert lengths.tolist() == [3, 1, 2]


def test_pieces_of_equal_length_keep_their_order_and_packing_repeats_itself():
    lengths = as_lengths([2] * 6)
    first, again = best_fit_decreasing(lengths, 4), best_fit_decreasing(lengths, 4)
    assert first.items.tolist() == [0, 1, 2, 3, 4, 5]
    assert first.items.tolist() == again.items.tolist()
    assert first.starts.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("lengths", [[5], [0], [-1], [3, 3, 7]])
def test_a_piece_that_fits_no_pack_is_never_placed(lengths):
    with pytest.raises(AssertionError):
        best_fit_decreasing(as_lengths(lengths), 4)


def test_with_packing_off_every_piece_has_a_pack():
    packing = one_a_pack(3)
    assert (packing.items.tolist(), packing.starts.tolist()) == ([0, 1, 2], [0, 1, 2, 3])
    assert one_a_pack(0).num_packs == 0


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.data())
@settings(deadline=None)
def test_select_takes_packs_in_the_order_given(sizes, data):
    starts = np.cumsum([0, *sizes])
    packing = Packing(items=np.arange(100, 100 + starts[-1]), starts=starts)
    packs = [packing.items[a:b].tolist() for a, b in pairwise(starts)]
    wanted = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=8))
    chosen = select(packing, np.array(wanted, dtype=np.int64))
    assert chosen.num_packs == len(wanted)
    assert np.diff(chosen.starts).tolist() == [len(packs[p]) for p in wanted]
    assert chosen.items.tolist() == [item for p in wanted for item in packs[p]]


def test_a_pack_is_kept_when_it_is_full_enough_or_holds_an_old_piece():
    lengths = as_lengths([97, 96, 50, 47, 10, 10])
    packing = Packing(items=np.arange(6), starts=np.array([0, 1, 2, 4, 5, 6]))
    ages = np.array([0, MAX_AGE - 1, 0, 0, MAX_AGE, MAX_AGE - 1], dtype=np.uint8)
    assert WELL_FILLED == 0.97
    kept = well_filled(packing, lengths, ages, 100)
    assert kept.tolist() == [True, False, True, True, False]


def test_the_oldest_piece_of_a_pack_decides():
    packing = Packing(items=np.array([1, 0]), starts=np.array([0, 2]))
    ages = np.array([MAX_AGE, 0], dtype=np.uint8)
    assert well_filled(packing, as_lengths([1, 2]), ages, 100).tolist() == [True]


def test_of_no_packs_none_is_kept():
    nothing = best_fit_decreasing(as_lengths([]), 8)
    assert well_filled(nothing, as_lengths([]), np.empty(0, dtype=np.uint8), 8).tolist() == []
