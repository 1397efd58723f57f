"""How many workers a job should have."""

import pytest

from pliant.elastic.scaling import (
    FIRST_LOOK_S,
    Bounds,
    Resize,
    Situation,
    Start,
    Wait,
    count_possible,
    decide_running,
    decide_start,
)

BOUNDS = Bounds(min_workers=2, max_workers=8)


def situation(**changes: object) -> Situation:
    usual = {
        "current": 4,
        "possible": 4,
        "on_leaving_nodes": 0,
        "wanted": None,
        "settled_s": 60.0,
        "running_s": 60.0,
    }
    return Situation(**(usual | changes))  # type: ignore[arg-type]


def running(**changes: object) -> Resize | None:
    return decide_running(BOUNDS, situation(**changes), settle_s=2.0, pause_s=10.0)


@pytest.mark.parametrize(
    ("possible", "allowed", "size"),
    [
        (1, (), None),
        (2, (), 2),
        (5, (), 5),
        (99, (), 8),
        (7, (2, 4, 8), 4),
        (3, (4, 8), None),
        (8, (1, 8, 16), 8),
    ],
)
def test_the_largest_allowed_size_that_fits_is_taken(
    possible: int, allowed: tuple[int, ...], size: int | None
) -> None:
    assert Bounds(2, 8, allowed).fit(possible) == size


def test_a_job_starts_at_once_where_there_is_room_for_all_it_wants() -> None:
    decision = decide_start(BOUNDS, None, 9, is_first=True, waited_s=0.0)
    assert decision == Start(8, "there is room for the 8 wanted")


def test_a_first_start_looks_a_while_for_more_workers_and_then_takes_what_is_there() -> None:
    assert isinstance(decide_start(BOUNDS, None, 5, True, FIRST_LOOK_S / 2), Wait)
    assert decide_start(BOUNDS, None, 5, True, FIRST_LOOK_S) == Start(5, "there is room for 5")


def test_a_restart_takes_what_is_there_at_once() -> None:
    assert decide_start(BOUNDS, None, 3, is_first=False, waited_s=0.0) == Start(
        3, "there is room for 3"
    )


def test_a_job_waits_below_its_minimum_however_long_it_takes() -> None:
    decision = decide_start(BOUNDS, None, 1, is_first=False, waited_s=1e6)
    assert decision == Wait("there is room for 1 of the 2 workers that are needed")


def test_a_wish_for_fewer_workers_limits_the_start() -> None:
    assert decide_start(BOUNDS, 3, 8, is_first=True, waited_s=0.0) == Start(
        3, "there is room for the 3 wanted"
    )


def test_a_healthy_group_grows_into_room_that_has_settled() -> None:
    assert running(possible=6) == Resize(6, "there is room for 6 workers")
    assert running(possible=6, settled_s=1.0) is None
    assert running(possible=6, running_s=5.0) is None


def test_a_group_stays_as_it_is_where_nothing_changes() -> None:
    assert running() is None
    assert running(possible=1) is None
    assert decide_running(Bounds(2, 8, (4, 8)), situation(possible=7), 2.0, 10.0) is None


def test_a_wish_is_followed_at_once_in_both_directions() -> None:
    assert running(wanted=2, possible=8, running_s=0.0) == Resize(2, "2 workers were asked for")
    assert running(wanted=6, possible=8, settled_s=0.0, running_s=0.0) == Resize(
        6, "6 workers were asked for"
    )


def test_a_wish_that_there_is_no_room_for_is_followed_as_far_as_it_goes() -> None:
    assert running(wanted=6, possible=5) == Resize(5, "6 workers were asked for")
    assert running(wanted=6, possible=4) is None


def test_workers_on_a_node_that_leaves_make_the_group_give_way_even_below_its_minimum() -> None:
    assert running(possible=3, on_leaving_nodes=1) == Resize(
        3, "1 worker is on a node that is being drained", leaves_node=True
    )
    assert running(possible=1, on_leaving_nodes=3) == Resize(
        0, "3 workers are on a node that is being drained", leaves_node=True
    )


def test_room_is_counted_by_the_scarcest_resource_of_each_node_and_places_held_count() -> None:
    free = {
        "a": {"CPU": 7.5, "GPU": 2.0},
        "b": {"CPU": 3.0, "GPU": 8.0},
        "c": {"CPU": 64.0},
    }
    per_worker = {"CPU": 2.0, "GPU": 1.0}
    assert count_possible(free, {}, per_worker) == 2 + 1 + 0
    assert count_possible(free, {"a": 2, "c": 1}, per_worker) == 2 + 2 + 1 + 0 + 1


def test_fractions_of_a_cpu_do_not_lose_a_worker_to_rounding() -> None:
    assert count_possible({"a": {"CPU": 0.3}}, {}, {"CPU": 0.1}) == 3
