"""Who hangs and who is only waited with, what is done about it, and who straggles."""

import statistics

import pytest

from fakes.beating import FakeGroup
from pliant.elastic.stragglers import compare
from pliant.elastic.watchdog import Alarm, Dump, Kill, Slow


def trained(world_size=3, **settings):
    """A group that has done a few steps and is in the data phase of the next."""
    group = FakeGroup(world_size, **settings)
    group.wait(5.0)
    group.steps(5)
    return group


def test_a_group_that_trains_is_left_alone():
    group = trained()
    group.steps(200)
    assert group.actions == []


def test_a_rank_that_does_not_get_on_is_dumped_with_all_others_and_then_killed():
    group = trained()
    group.enter("collective", 0, 2)
    group.enter("compute", 1)
    assert group.wait(60.0) == []
    dump, kill = group.wait(5.0)
    assert isinstance(dump, Dump)
    assert "rank 1 is in phase compute of step 6 for 61 s, which usually takes 0.5 s" in dump.reason
    assert isinstance(kill, Kill)
    assert kill.ranks == (1,)
    assert [(beat.rank, beat.pid, beat.node) for beat in kill.workers] == [
        (1, 101, "node-1-of-many")
    ]
    assert [fake.dumps for fake in group.ranks] == [1, 1, 1]
    assert group.wait(500.0) == [], "the group is not killed twice"


def test_who_has_entered_fewer_collectives_is_the_one_that_is_waited_for():
    group = trained()
    group.enter("collective", 0, 1)  # rank 2 is still at its data
    assert [kill.ranks for kill in group.wait(90.0) if isinstance(kill, Kill)] == [(2,)]
    group = trained()
    group.enter("collective")
    group.enter("compute", 0, 1)
    group.enter("collective", 0, 1)  # they are one further than rank 2, which also waits
    assert [kill.ranks for kill in group.wait(90.0) if isinstance(kill, Kill)] == [(2,)]


def test_where_all_wait_in_one_collective_all_are_killed():
    group = trained()
    group.enter("collective")
    kills = [kill for kill in group.wait(90.0) if isinstance(kill, Kill)]
    assert [kill.ranks for kill in kills] == [(0, 1, 2)]


def test_a_rank_that_takes_its_usual_time_is_not_hung_however_long_the_others_wait():
    group = trained()
    group.steps(3, checkpoint=70.0)
    group.enter("collective", 1, 2)
    group.enter("checkpoint", 0)
    assert group.wait(699.0) == []  # ten times the usual 70 s
    kills = [kill for kill in group.wait(10.0) if isinstance(kill, Kill)]
    assert [kill.ranks for kill in kills] == [(0,)]


@pytest.mark.parametrize("phase", ["evaluation", "checkpoint"])
def test_what_comes_seldom_may_take_long_though_it_is_over_at_once_in_most_steps(phase):
    group = trained()
    group.steps(20, **{phase: 0.000002})
    group.enter(phase)
    assert group.wait(599.0) == []  # elastic.hang_start_s
    kills = [kill for kill in group.wait(10.0) if isinstance(kill, Kill)]
    assert [kill.ranks for kill in kills] == [(0, 1, 2)]


def test_the_floor_and_the_factor_are_settings():
    group = trained(hang_floor_s=5, hang_factor=20)
    group.enter("compute")
    assert group.wait(10.0) == []  # 20 x 0.5 s
    assert isinstance(group.wait(1.0)[0], Dump)


def test_a_start_the_first_step_and_a_first_checkpoint_may_take_longer():
    group = FakeGroup(2, alarm_after_s=1e6)
    assert group.wait(600.0) == []
    group.enter("compute")
    assert group.wait(600.0) == []
    group.steps(2)
    group.enter("checkpoint")
    assert group.wait(600.0) == []
    group.enter("data")
    group.steps(1)
    group.start(2)
    assert group.wait(600.0) == [], "an attempt starts anew"
    assert isinstance(group.wait(2.0)[0], Dump)


def test_a_silent_rank_is_named_although_it_was_last_seen_waiting_like_the_others():
    group = trained()
    group.enter("collective")
    group.wait(1.0)
    group.ranks[1].is_silent = True
    dump, kill = group.wait(63.0)
    assert "rank 1 gives no sign of life for 60 s, last in phase collective" in dump.reason
    assert kill.ranks == (1,)
    assert [fake.dumps for fake in group.ranks] == [1, 0, 1]


def test_silence_alone_is_enough():
    group = trained(hang_floor_s=20)
    group.ranks[2].is_silent = True
    group.steps(19)
    assert group.actions == []
    kills = [kill for kill in group.wait(5.0) if isinstance(kill, Kill)]
    assert [kill.ranks for kill in kills] == [(2,)]


def test_a_rank_that_is_never_heard_of_is_named_without_a_worker_to_kill():
    group = FakeGroup(2, hang_start_s=100)
    group.ranks[1].is_silent = True
    kill = group.wait(105.0)[-1]
    assert (kill.ranks, kill.workers) == ((1,), ())
    assert "rank 1 was not heard of in" in kill.reason


def test_a_watchdog_that_was_held_up_itself_blames_nobody():
    group = trained()
    group.now_s += 500.0  # the recorder's machine was suspended
    assert group.watchdog.look(group.now_s) == []
    group.enter("data")
    assert group.wait(5.0) == []


def test_a_hang_that_ends_before_the_kill_is_only_dumped():
    group = trained()
    for fake in group.ranks:
        fake.answers = False
    group.enter("compute")
    group.wait(61.0)
    assert [type(action) for action in group.actions] == [Dump]
    group.enter("data")
    group.steps(3)
    for fake in group.ranks:
        fake.answers = True
    group.enter("compute")
    group.wait(70.0)
    assert [type(action) for action in group.actions] == [Dump, Dump, Kill]


def test_stacks_that_do_not_come_are_awaited_for_two_seconds():
    group = trained()
    group.ranks[0].answers = False
    group.enter("compute")
    group.wait(61.0)
    assert [type(action) for action in group.actions] == [Dump]
    group.wait(1.0)
    assert len(group.actions) == 1
    assert isinstance(group.wait(1.0)[0], Kill)


def test_nothing_is_expected_of_an_attempt_that_is_over():
    group = trained(alarm_after_s=1e6)
    group.watchdog.end()
    assert group.wait(500.0) == [], "survivors still beat while the group is torn down"
    group.start(2)
    group.wait(5.0)
    group.steps(3)
    group.enter("end")
    assert group.wait(500.0) == [], "ranks that have finished may be silent"
    assert group.actions == []


def test_an_alarm_is_raised_once_until_there_is_progress():
    group = trained(alarm_after_s=50, hang_floor_s=10_000)
    group.enter("compute")
    assert group.wait(50.0) == []
    assert group.wait(200.0) == [Alarm("There has been no new step after step 5 for 51 s.")]
    group.start(3)  # an attempt that does steps 1 to 5 again makes no progress
    group.steps(5)
    group.wait(60.0)
    assert len(group.actions) == 1
    group.steps(1)
    group.wait(60.0)
    assert group.actions[1:] == [Alarm("There has been no new step after step 6 for 51 s.")]


def test_a_job_that_never_gets_workers_is_alarmed_about_too():
    group = FakeGroup(1, alarm_after_s=50)
    group.ranks[0].is_silent = True
    alarms = group.wait(60.0)
    assert alarms == [Alarm("There has been no new step since the start for 51 s.")]


def test_a_rank_that_is_persistently_slow_is_named_once():
    group = FakeGroup(4, straggler_steps=10)
    group.steps(11, slow={2: 1.5})
    (slow,) = group.actions
    assert isinstance(slow, Slow)
    assert slow.worker.rank == 2
    assert slow.factor == pytest.approx(0.76 / 0.51)
    assert "Rank 2 on node node-2-o is a straggler" in slow.sentence
    assert "1.49 times" in slow.sentence
    group.steps(50, slow={2: 1.5})
    assert len(group.actions) == 1
    group.steps(20)
    group.steps(20, slow={2: 1.5})
    assert len(group.actions) == 2, "one that was fast in between is named again"


def test_passing_slowness_time_in_collectives_and_the_first_step_are_no_straggling():
    group = FakeGroup(3, straggler_steps=10)
    group.steps(1, slow={1: 50.0})
    for _ in range(6):
        group.steps(8, slow={1: 2.0})
        group.steps(2)
    group.steps(30, slow={0: 1.2})  # below the factor
    group.steps(30, collective=5.0)
    assert group.actions == []
    alone = FakeGroup(1, straggler_steps=10)
    alone.steps(50, slow={0: 3.0})
    assert alone.actions == []


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_a_rank_is_compared_with_the_median_of_the_others(count):
    seconds = {rank: float((5 * rank + 3) % 4 + 1) for rank in range(count)}  # some are equal
    expected = {
        rank: own / statistics.median(s for other, s in seconds.items() if other != rank)
        for rank, own in seconds.items()
    }
    assert compare(seconds) == pytest.approx(expected)


def test_a_straggler_is_replaced_where_that_is_wanted():
    group = FakeGroup(2, straggler_steps=10, replace_stragglers=True)
    group.steps(12, slow={1: 2.0})
    slow, kill = group.actions
    assert isinstance(slow, Slow)
    assert isinstance(kill, Kill)
    assert (kill.ranks, kill.workers[0].pid) == ((1,), 101)
    assert kill.reason == slow.sentence
