"""Intervals follow from what is measured, by arithmetic."""

import math
from dataclasses import replace

import pytest

from pliant.training import cadence
from pliant.training.cadence import (
    PRIOR_S,
    Cadence,
    Costs,
    checkpoint_interval,
    hot_interval,
    looks,
)
from pliant.training.commit import Answer

COSTS = Costs(stall_s=0.5, saving_s=4.0, step_s=2.0, failures=0, elapsed_s=0.0, world_size=1)


@pytest.mark.parametrize(
    ("stall_s", "step_s", "expected"),
    [(0.001, 1.0, 1), (0.02, 1.0, 1), (0.021, 1.0, 2), (0.5, 1.0, 25), (3.0, 0.1, 1500)],
)
def test_snapshots_stay_within_two_percent_of_the_time(stall_s, step_s, expected):
    found = hot_interval(stall_s, step_s)
    assert found == expected
    assert stall_s / (found * step_s) <= cadence.HOT_SHARE


def test_checkpoints_follow_young_and_daly():
    assert checkpoint_interval(COSTS) == round(math.sqrt(2 * 0.5 * PRIOR_S) / 2.0)


def test_every_failure_brings_checkpoints_closer_together():
    found = [checkpoint_interval(replace(COSTS, failures=n, elapsed_s=3600)) for n in (0, 3, 15)]
    assert found[0] / found[1] == pytest.approx(2, rel=0.05)
    assert found[1] / found[2] == pytest.approx(2, rel=0.05)


def test_more_workers_are_taken_to_fail_more_often():
    assert replace(COSTS, world_size=4).mtbf_s == PRIOR_S / 4


def test_a_slow_disk_is_not_kept_busy_all_the_time():
    assert checkpoint_interval(replace(COSTS, stall_s=0.0, saving_s=60.0)) == 60 / 0.25 / 2


def test_what_was_asked_for_is_kept():
    fixed = Cadence(every=7, hot_every=3, world_size=1)
    for _ in range(100):
        fixed.stepped(0.001)
        fixed.stalled(10.0)
        fixed.look(lambda text: pytest.fail("nothing is decided here"))
    assert [step for step in range(1, 15) if fixed.save_is_due(step)] == [7, 14]
    assert [step for step in range(1, 8) if fixed.hot_is_due(step)] == [3, 6]


def test_no_snapshots_are_due_where_none_are_wanted():
    assert not any(Cadence(7, 0, 1).hot_is_due(step) for step in range(1, 20))


def test_intervals_are_looked_at_often_at_first_and_then_rarely():
    found = [step for step in range(1, 300) if looks(step)]
    assert found == [4, 8, 16, 32, 64, 128, 192, 256]


def test_rank_0_decides_from_medians_and_gives_its_reasons(monkeypatch):
    monkeypatch.setattr(cadence.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(cadence.dist, "broadcast_object_list", lambda values, src: None)
    told = []
    auto = Cadence("auto", "auto", world_size=2)
    assert (auto.every, auto.hot_every) == (cadence.FIRST_INTERVAL, 1)
    auto.begin(10)
    for seconds in (1.0, 1.0, 1.0, 9.0):  # the last one evaluated
        auto.stepped(seconds)
        auto.stalled(0.05)
    auto.stored(0.5, 4.0, Answer("committed", 0, None, 0, 0.0))
    auto.look(told.append)
    assert auto.hot_every == 3
    assert auto.every == checkpoint_interval(replace(COSTS, step_s=1.0, world_size=2))
    assert any("every 3 steps" in text and "50.0 ms" in text for text in told)
    assert any("fail every 12.0 h (0 failures" in text for text in told)
    assert not auto.save_is_due(10 + auto.every - 1)
    assert auto.save_is_due(10 + auto.every)
    auto.saved(10 + auto.every)
    assert not auto.save_is_due(10 + auto.every + 1)
