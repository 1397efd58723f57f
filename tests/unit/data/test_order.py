"""The order of an epoch, and the shares of a mixture in it."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.data import order as ordering
from pliant.data.order import MixedOrder, Mixture, counts_of, groups_of, shuffled


def test_a_permutation_is_fixed_for_all_time():
    """Changing it would change the order of every run that is started again."""
    assert shuffled(8, 0, 0, 1, 0).tolist() == [4, 3, 6, 5, 1, 7, 2, 0]
    assert shuffled(8, 2**63 - 1, 5).tolist() == [5, 1, 4, 7, 2, 3, 0, 6]
    assert shuffled(0, 1).tolist() == []
    assert sorted(shuffled(1000, 5, 6).tolist()) == list(range(1000))
    assert shuffled(1000, 5, 6).tolist() != shuffled(1000, 6, 5).tolist()


def runs_of(*sizes):
    """Parts of one shard each."""
    ends = np.cumsum([0, *sizes]).tolist()
    return [[(first, last)] for first, last in pairwise(ends)]


def pieces_of(order):
    return np.concatenate([order.window(number) for number in range(order.num_windows)])


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.05, 20), min_size=4, max_size=4),
    window=st.integers(1, 50),
    group=st.sampled_from([1, 10, 1000]),
    epochs=st.integers(1, 5),
)
@settings(max_examples=150, deadline=None)
def test_a_part_of_a_mixture_comes_round_before_any_of_it_comes_again(
    sizes, weights, window, group, epochs
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordering, "GROUP_PIECES", group)
        parts = runs_of(*sizes)
        mixture = Mixture("samples", tuple(weights[: len(sizes)]))
        counts = counts_of(mixture, parts, np.ones(sum(sizes), dtype=np.int32))
        orders = [MixedOrder(parts, counts, window, 3, epoch) for epoch in range(epochs)]
        taken = [pieces_of(order) for order in orders]
        assert [len(pieces) for pieces in taken] == [sum(counts)] * epochs
        seen = np.bincount(np.concatenate(taken), minlength=sum(sizes))
        for ((first, last),), count in zip(parts, counts, strict=True):
            times = seen[first:last]
            assert times.sum() == count * epochs
            assert times.max() - times.min() <= 1


def test_shares_are_of_samples_or_of_tokens():
    parts = runs_of(100, 300)
    lengths = np.array([30] * 100 + [10] * 300, dtype=np.int32)
    assert counts_of(Mixture("samples", (1.0, 1.0)), parts, lengths) == [200, 200]
    assert counts_of(Mixture("tokens", (1.0, 1.0)), parts, lengths) == [100, 300]
    assert counts_of(Mixture("tokens", (3.0, 1.0)), parts, lengths) == [150, 150]
    assert counts_of(Mixture("samples", (1.0, 1e9)), parts, lengths) == [1, 400]


def test_every_window_has_the_shares_of_the_mixture():
    order = MixedOrder(runs_of(500, 100), [300, 100], window=40, seed=0, epoch=2)
    assert order.num_windows == 10
    for number in range(10):
        window = order.window(number)
        assert [(window < 500).sum(), (window >= 500).sum()] == [30, 10]


def test_epochs_and_seeds_of_a_mixture_differ():
    taken = {
        tuple(pieces_of(MixedOrder(runs_of(60, 60), [60, 60], 20, seed, epoch)))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(taken) == 4


def test_any_window_of_a_mixture_can_be_had_by_itself():
    parts = runs_of(50, 7)
    in_order = MixedOrder(parts, [20, 30], window=8, seed=1, epoch=3)
    windows = [in_order.window(number).tolist() for number in range(in_order.num_windows)]
    for number in (6, 0, 3, 5, 1):
        fresh = MixedOrder(parts, [20, 30], window=8, seed=1, epoch=3)
        assert fresh.window(number).tolist() == windows[number]


@pytest.mark.parametrize(
    ("shards", "groups"),
    [
        ([(0, 5), (5, 5), (5, 9)], [(0, 9)]),
        ([(0, 10), (10, 12), (12, 20), (20, 21)], [(0, 10), (10, 20), (20, 21)]),
        ([(3, 3), (3, 4)], [(3, 4)]),
        ([(0, 2), (8, 9)], [(0, 2), (8, 9)]),
        ([(0, 0)], []),
    ],
)
def test_neighbouring_shards_make_a_group(monkeypatch, shards, groups):
    monkeypatch.setattr(ordering, "GROUP_PIECES", 10)
    assert groups_of(shards) == groups
