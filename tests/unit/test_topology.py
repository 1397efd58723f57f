"""Ranks share the micro-batches of a step, whatever their number."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.topology import BatchShape, Place


@given(st.integers(1, 40), st.integers(1, 300))
@settings(deadline=None)
def test_every_micro_batch_runs_on_one_rank_and_all_ranks_run_as_many_rounds(world_size, number):
    places = [Place(rank, world_size) for rank in range(world_size)]
    shares = [list(place.micro_batches(number)) for place in places]
    assert sorted(index for share in shares for index in share) == list(range(number))
    rounds = {place.num_rounds(number) for place in places}
    assert rounds == {max(map(len, shares))}
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_ranks_take_micro_batches_in_turn():
    assert list(Place(1, 3).micro_batches(8)) == [1, 4, 7]
    assert list(Place(2, 3).micro_batches(8)) == [2, 5]
    assert list(Place(4, 5).micro_batches(3)) == []


@pytest.mark.parametrize(
    ("batch", "micro", "expected"), [(8, 1, 8), (8, 4, 2), (9, 4, 3), (1, 1, 1), (3, 8, 1)]
)
def test_a_step_is_so_many_micro_batches(batch, micro, expected):
    shape = BatchShape(global_batch_size=batch, micro_batch_size=micro, seq_len=16)
    assert shape.num_micro_batches == expected
    assert shape.tokens_per_step == batch * 16
