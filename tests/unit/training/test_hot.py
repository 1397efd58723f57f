"""What an attempt before left is kept until it is not needed any more."""

import queue
import time

import pytest
import torch
import torch.distributed as dist

from fakes.checkpoints import NUMELS, cut, whole_tensors
from pliant.checkpoints import snapshot
from pliant.checkpoints.slots import Slots, lay_out, owned
from pliant.checkpoints.snapshot import Description, Moment, Roots
from pliant.training.holders import NO_NODE, Pusher
from pliant.training.hot import Snapshots

FRAGMENTS = owned(cut(whole_tensors(), 1)[0])
BEFORE, NOW = 1, 2


class SlowNeighbour(Pusher):
    """A copy arrives, or fails to, when the test says so."""

    def __init__(self, slots: Slots) -> None:
        self.outcomes: queue.Queue[OSError | None] = queue.Queue()
        super().__init__("job", "neighbour", slots)

    def _send(self, part):
        if (error := self.outcomes.get()) is not None:
            raise error

    def answer(self, outcome: OSError | None) -> None:
        self.outcomes.put(outcome)
        end = time.monotonic() + 10.0
        while self.is_busy:
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def roots(tmp_path):
    roots = Roots.of(tmp_path, "key")
    yield roots
    roots.remove()


def slots_of(roots, attempt):
    slots = Slots(roots.paths[0], NO_NODE, attempt, 0, 1, lay_out(FRAGMENTS))
    slots.describe(Description(1, NUMELS, "", {}, origin=""))
    return slots


def take(snapshots, step):
    moment = Moment(step, {"epoch": 0, "pack": 0}, {})
    snapshots.take(FRAGMENTS, moment, is_hot=True, write_ledger=lambda: None)


@pytest.fixture
def left(roots):
    """An attempt that ended after steps 1 and 2, and was gone back to the latter."""
    slots = slots_of(roots, BEFORE)
    before = Snapshots(slots, roots, BEFORE, 0, None, torch.device("cpu"))
    for step in (1, 2):
        take(before, step)
    before.close(0.0)
    snapshot.forget(roots.paths, (BEFORE, 2))


def steps_left(roots):
    return {(part.attempt, part.moment.step) for part in snapshot.find(roots.paths)}


def test_on_one_node_the_second_snapshot_replaces_those_of_earlier_attempts(roots, left):
    snapshots = Snapshots(slots_of(roots, NOW), roots, NOW, 0, None, torch.device("cpu"))
    take(snapshots, 3)
    assert steps_left(roots) == {(BEFORE, 2), (NOW, 3)}
    take(snapshots, 4)
    assert steps_left(roots) == {(NOW, 3), (NOW, 4)}
    (directory,) = snapshot.directories_of(roots.paths[0])
    assert snapshot.attempt_of(directory) == NOW
    snapshots.close(0.0)


def test_with_another_node_they_are_kept_until_its_copies_are_whole(roots, left):
    slots = slots_of(roots, NOW)
    neighbour = SlowNeighbour(slots)
    snapshots = Snapshots(slots, roots, NOW, 0, neighbour, torch.device("cpu"))
    for step in (3, 4, 5, 6):  # the copy of step 3 is on its way all the time
        take(snapshots, step)
        assert (BEFORE, 2) in steps_left(roots)
    neighbour.answer(OSError("the network is down"))
    take(snapshots, 7)
    assert (BEFORE, 2) in steps_left(roots)
    neighbour.answer(None)
    take(snapshots, 8)
    assert {attempt for attempt, _ in steps_left(roots)} == {NOW}
    neighbour.outcomes.put(None)
    snapshots.close(10.0)
