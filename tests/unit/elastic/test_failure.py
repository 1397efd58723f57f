"""Which failures are tried again, after how long, and which nodes are distrusted."""

import pytest

from pliant.elastic.failure import (
    Exclusions,
    Failure,
    GiveUp,
    Restart,
    backoff_s,
    decide,
    exclude_nodes,
    is_final,
    is_hardware,
    without_numbers,
)
from pliant.errors import DataError, RanksDisagree, TrainingDiverged
from pliant.spec.elastic import ElasticSpec

DAY_S = 24 * 3600.0


def crash(step=1, saved=0, error=None, **facts):
    """A crash whose error differs from step to step, unless it is given."""
    text = error or f"rank 0 failed: {'x' * step}"
    return Failure(time_s=0.0, step=step, saved_step=saved, error=text, **facts)


def decisions(settings, failures):
    return [decide(settings, failures[:i], failures[i]) for i in range(len(failures))]


def delays(settings, failures):
    return [
        decision.delay_s if isinstance(decision, Restart) else "given up"
        for decision in decisions(settings, failures)
    ]


def test_the_first_restart_is_immediate_and_the_next_ones_wait_ever_longer():
    settings = ElasticSpec(max_restarts=5, max_backoff_s=3.0)
    failures = [crash(step) for step in range(1, 8)]
    assert delays(settings, failures) == [0, 1, 2, 3, 3, "given up", "given up"]
    assert [backoff_s(n, 60.0) for n in (1, 2, 3, 7, 8, 10_000)] == [0, 1, 2, 32, 60, 60]


def test_the_reasons_say_what_happened_and_how_many_restarts_there_are():
    settings = ElasticSpec(max_restarts=2)
    first, second, third = decisions(settings, [crash(step) for step in (1, 2, 3)])
    assert first.reason == "rank 0 failed: x; restart 1 of 2"
    assert second.reason == "rank 0 failed: xx; restart 2 of 2, in 1 s"
    assert "after 2 restarts without 10 new safe steps" in third.reason
    assert "elastic.max_restarts" in third.reason


def test_new_safe_steps_give_the_restarts_back_and_fewer_do_not():
    settings = ElasticSpec(max_restarts=2, progress_steps=10)
    on_and_on = [crash(10 * i + 5, saved=10 * i) for i in range(1, 40)]
    assert delays(settings, on_and_on) == [0] * 39
    slowly = [crash(12, saved=11), crash(15, saved=14), crash(21, saved=20), crash(22, saved=21)]
    # Nine new steps since the budget was last full are not enough; the tenth is.
    assert delays(settings, slowly) == [0, 1, "given up", 0]
    assert delays(settings, [crash(30, saved=20), crash(5, saved=4)]) == [0, 1]


def test_no_restarts_means_none():
    decision = decide(ElasticSpec(max_restarts=0), [], crash())
    assert decision == GiveUp("rank 0 failed: x, and elastic.max_restarts is 0.")


def test_preemptions_and_resizes_are_not_counted():
    settings = ElasticSpec(max_restarts=1)
    asked = [crash(3, error="node gone", kind=kind) for kind in ("preemption", "resize")] * 3
    assert delays(settings, [*asked, crash(3), *asked]) == [0] * 13
    assert isinstance(decide(settings, [*asked, crash(3), *asked], crash(4)), GiveUp)


def test_the_same_error_in_the_same_step_three_times_ends_the_job():
    settings = ElasticSpec(max_restarts=100)
    alike = [
        crash(7, saved=5, error=f"rank {i} failed: IndexError: index {i} in 0x7f{i}a of pid {i}")
        for i in range(3)
    ]
    first, second, third = decisions(settings, alike)
    assert isinstance(first, Restart)
    assert isinstance(second, Restart)
    assert isinstance(third, GiveUp)
    assert "Step 7 failed 3 times in a row" in third.reason
    assert "IndexError" in third.reason
    # A preemption in between changes nothing; another error, or another step, does.
    between = [alike[0], crash(7, kind="preemption"), alike[1]]
    assert isinstance(decide(settings, between, alike[2]), GiveUp)
    for other in (crash(7, saved=5, error="other"), crash(8, saved=5, error=alike[0].error)):
        assert isinstance(decide(settings, [alike[0], other], alike[2]), Restart)


def test_processes_that_die_are_alike_only_where_the_ranks_are():
    settings = ElasticSpec(max_restarts=100)
    deaths = [crash(7, error=f"the worker of rank {r} died", died=(r,)) for r in (1, 2, 1, 1, 1)]
    assert isinstance(decide(settings, deaths[:3], deaths[3]), Restart)
    assert isinstance(decide(settings, deaths[:4], deaths[4]), GiveUp)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("died with pid 17 at 0x7fff12", "died with pid 4 at 0xabc"),
        ("actor 8f3a77be0011 lost after 3.5 s", "actor 00ff9911aabb lost  after 12 s"),
    ],
)
def test_texts_are_compared_without_numbers_addresses_and_ids(one, other):
    assert without_numbers(one) == without_numbers(other)
    assert without_numbers(one) != without_numbers("died of hunger")


def test_what_pliant_raises_on_purpose_is_final_but_for_damaged_state():
    assert is_final(DataError("no data"))
    assert is_final(TrainingDiverged("nan"))
    assert not is_final(RanksDisagree("differ"))
    assert not is_final(RuntimeError("boom"))
    decision = decide(ElasticSpec(), [], crash(error="no data", is_final=True))
    assert decision == GiveUp("no data")


def test_errors_of_the_machine_are_told_from_errors_of_the_code():
    assert is_hardware("CUDA error: uncorrectable ECC error encountered")
    assert is_hardware("Xid 79: GPU has fallen off the bus")
    assert not is_hardware("CUDA error: device-side assert triggered")
    assert not is_hardware("KeyError: 'specc error'")


ROOM = {"a": 1, "b": 1, "c": 1}


def test_a_node_on_which_workers_die_repeatedly_is_left_out_and_comes_back_after_a_day():
    settings = ElasticSpec(max_node_failures=2)
    history = [
        Failure(t, 5, 5, "died", nodes=nodes)
        for t, nodes in [(0.0, ("a", "a")), (100.0, ("a", "b")), (200.0, ())]
    ]
    asked = Failure(150.0, 5, 5, "drained", kind="preemption", nodes=("b",))
    found = exclude_nodes(settings, [*history, asked], {}, ROOM, now_s=300.0)
    assert found == Exclusions({"a": "worker deaths there within a day: 2"}, {})
    later = exclude_nodes(settings, history, {}, ROOM, now_s=DAY_S + 50.0)
    assert later == Exclusions({}, {})


def test_a_node_with_broken_hardware_is_left_out_at_once_and_before_others():
    settings = ElasticSpec(max_node_failures=1)
    history = [Failure(0.0, 5, 5, "died", nodes=("a",))] * 3
    broken = {"b": "H200 number 0: 2 new uncorrectable memory errors", "gone": "not alive"}
    both = exclude_nodes(settings, history, broken, ROOM, now_s=1.0)
    assert set(both.left_out) == {"a", "b"}
    assert both.left_out["b"] == broken["b"]
    one = exclude_nodes(settings, history, broken, ROOM, now_s=1.0, num_needed=2)
    assert (set(one.left_out), set(one.kept)) == ({"b"}, {"a"})


@pytest.mark.parametrize(
    ("room", "num_needed", "left_out"),
    [
        ({"a": 4, "b": 4}, 4, {"a"}),
        ({"a": 4, "b": 4}, 5, set()),  # the job would wait for ever
        ({"a": 4, "b": 2, "c": 2}, 4, {"a"}),
        ({"a": 8, "c": 1}, 1, {"a"}),
    ],
)
def test_a_node_stays_where_the_others_have_no_room_for_the_fewest_workers(
    room, num_needed, left_out
):
    settings = ElasticSpec(max_node_failures=1)
    history = [Failure(0.0, 5, 5, "died", nodes=("a",))]
    found = exclude_nodes(settings, history, {}, room, now_s=1.0, num_needed=num_needed)
    assert set(found.left_out) == left_out
    assert set(found.kept) == {"a"} - left_out


def test_the_only_node_is_kept_and_named():
    settings = ElasticSpec(max_node_failures=1)
    history = [Failure(0.0, 5, 5, "died", nodes=("a",))]
    found = exclude_nodes(settings, history, {}, {"a": 1}, now_s=1.0)
    assert found == Exclusions({}, {"a": "worker deaths there within a day: 1"})
