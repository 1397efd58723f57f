"""Schedules of faults: the same for the same seed, and never more than the cluster can lose."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.schedule import (
    KINDS,
    MAX_WORKERS,
    MOST_STEPS,
    NEED_OWN_DISKS,
    AddNode,
    DrainNode,
    KillDriver,
    LoseNode,
    draw,
    told,
)

seeds = st.integers(0, 2**32)
rooms = st.sampled_from([(1,), (1, 1), (2, 1, 1), (4,), (1, 1, 1, 1)])


@settings(deadline=None)
@given(seed=seeds, count=st.integers(0, 60), nodes=rooms)
def test_a_seed_always_gives_the_same_faults_and_more_faults_only_go_on(seed, count, nodes):
    drawn = draw(seed, count, nodes)
    assert draw(seed, count, nodes) == drawn
    assert draw(seed, count + 7, nodes)[:count] == drawn
    assert len(drawn) == count


@settings(deadline=None)
@given(seed=seeds, nodes=rooms)
def test_a_node_is_left_at_any_time_and_the_room_never_exceeds_the_limit(seed, nodes):
    left = list(nodes)
    for strike in draw(seed, 80, nodes):
        match strike.fault:
            case LoseNode(node) | DrainNode(node, _):
                left.pop(node)  # raises IndexError for a node that is not there
            case AddNode(workers):
                assert workers >= 1
                left.append(workers)
        assert left
        assert sum(left) <= MAX_WORKERS
        assert 0 < strike.after_steps <= MOST_STEPS


@settings(deadline=None)
@given(seed=seeds, nodes=st.sampled_from([(1, 1), (2, 1, 1), (4,)]))
def test_a_resize_among_resizes_always_changes_the_number_of_workers(seed, nodes):
    size = sum(nodes)
    for strike in draw(seed, 20, nodes, ["Resize"]):
        before, size = size, min(strike.fault.workers or MAX_WORKERS, sum(nodes))
        assert size != before


@settings(deadline=None)
@given(seed=seeds)
def test_every_kind_strikes_within_three_rounds(seed):
    struck = {type(strike.fault).__name__ for strike in draw(seed, 60)}
    assert struck == KINDS.keys()


@settings(deadline=None)
@given(seed=seeds)
def test_kinds_that_are_left_out_do_not_strike(seed):
    kinds = KINDS.keys() - set(NEED_OWN_DISKS)
    struck = {type(strike.fault).__name__ for strike in draw(seed, 60, kinds=kinds)}
    assert not struck & set(NEED_OWN_DISKS)


def test_other_seeds_give_other_faults():
    assert len({str(draw(seed, 20)) for seed in range(50)}) == 50


def test_a_schedule_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="None of LoseNode can strike 1 nodes"):
        draw(0, 3, nodes=(1, 1), kinds=["LoseNode"])


def test_a_fault_is_told_with_its_facts():
    assert told(LoseNode(1)) == "LoseNode node=1"
    assert told(KillDriver()) == "KillDriver"
