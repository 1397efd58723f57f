"""What a journal that is still being written tells of a job, and how files are damaged."""

import os
import random
from pathlib import Path

import psutil
import pytest

from chaos.job import Follower
from chaos.strikes import damage
from pliant.tracking import Journal


def attempt(number: int, world_size: int, step: int, **facts: object) -> dict[str, object]:
    settings = {"attempt": number, "world_size": world_size, "step": step, "cause": "failure"}
    return {"kind": "attempt", **settings, **facts}


def test_a_follower_counts_steps_and_what_each_attempt_does_again(tmp_path: Path) -> None:
    journal, follower = Journal(tmp_path / "events.jsonl"), Follower(tmp_path / "events.jsonl")
    follower.read()
    assert (follower.step, follower.attempts) == (0, [])
    for event in (
        attempt(1, 2, 0),
        *({"kind": "step", "step": step, "time": 10.0 + step} for step in (1, 2, 3)),
        attempt(2, 1, 1),
        {"kind": "step", "step": 2, "time": 20.0},
    ):
        journal.append(event)
    follower.read()
    first, second = follower.attempts
    assert (first.lost, first.first_step_at) == (0, 11.0)
    assert (second.lost, second.first_step_at, second.world_size) == (2, 20.0, 1)
    assert (follower.step, follower.steps_done) == (2, 4)


def test_a_follower_knows_the_living_processes_of_the_last_group(tmp_path: Path) -> None:
    journal, follower = Journal(tmp_path / "events.jsonl"), Follower(tmp_path / "events.jsonl")
    own, nobody, before_us = os.getpid(), 2**22 + 1, psutil.Process().create_time() - 1
    for rank, pid, when in ((0, own, None), (1, nobody, None), (2, own, before_us), (3, own, None)):
        event = {"kind": "timeline", "what": "worker begins", "rank": rank, "pid": pid}
        journal.append(event | ({"time": when} if when else {}))
    journal.append(attempt(1, 3, 0))
    follower.read()
    # Rank 1 is dead, the number of rank 2 is ours by now, and rank 3 is of a group before.
    assert follower.ranks() == [own]


def test_events_are_found_by_what_they_say_and_when_they_came_about(tmp_path: Path) -> None:
    journal, follower = Journal(tmp_path / "events.jsonl"), Follower(tmp_path / "events.jsonl")
    for time_s, what in ((100.0, "hang"), (101.0, "checkpoint"), (99.0, "checkpoint")):
        journal.append({"kind": "alarm", "what": what, "time": time_s})
    follower.read()
    assert [e["time"] for e in follower.since(100.0, "alarm")] == [100.0, 101.0]
    assert [e["time"] for e in follower.since(99.0, "alarm", what="checkpoint")] == [101.0, 99.0]


@pytest.mark.parametrize(
    ("how", "size", "same_first_half"),
    [("short", 50, True), ("torn", 100, True), ("altered", 100, None)],
)
def test_damage_changes_a_file_as_it_says(
    tmp_path: Path, how: str, size: int, same_first_half: bool | None
) -> None:
    path, content = tmp_path / "file", bytes(range(1, 101))
    path.write_bytes(content)
    damage(path, how, random.Random(1))
    damaged = path.read_bytes()
    assert len(damaged) == size
    assert damaged != content
    if same_first_half:
        assert damaged[:50] == content[:50]
    else:
        differing = [a ^ b for a, b in zip(content, damaged, strict=True) if a != b]
        assert [bin(bits).count("1") for bits in differing] == [1]


def test_a_missing_file_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    damage(path, "missing", random.Random(1))
    assert not path.exists()
