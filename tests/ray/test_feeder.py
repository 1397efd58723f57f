"""Blocks that Ray Data reads ahead are those a rank would assemble, whatever befalls the feeder."""

import shutil
import tempfile
import time
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group

from fakes.splits import some_pieces, write_split
from pliant.data import feeder as feeding
from pliant.data import stream as streaming
from pliant.data.blocks import assemble_steps
from pliant.data.feeder import NAMESPACE, BlockGrid, feeder_name, start_feeder, stop_feeder
from pliant.data.plan import PlanSettings
from pliant.data.store import SplitPlace
from pliant.data.stream import FeederBlocks, NoBlocks, StepStream
from pliant.storage.local import LocalStorage
from pliant.topology import BatchShape, Place

SHAPE = BatchShape(global_batch_size=4, micro_batch_size=1, seq_len=32)
STEPS = 201
BLOCK_STEPS = 2
LOOP_S = 0.02


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    """As in training, the workers hold every CPU: the feeder has to do without one."""
    directory = tempfile.mkdtemp(prefix="pf", dir="/tmp")  # sockets need a short path
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            _temp_dir=directory,
            logging_level="ERROR",
            log_to_driver=False,
        )
        ray.get(placement_group([{"CPU": 2}]).ready(), timeout=60)
        yield
        ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    lengths = np.random.default_rng(0).integers(2, 33, 900)
    pieces = some_pieces(lengths)
    split = write_split(tmp_path_factory.mktemp("feeder") / "store", pieces, shard_pieces=200)
    settings = PlanSettings(SHAPE.seq_len, SHAPE.global_batch_size, 100, True, True, 0)
    return BlockGrid(split.place, settings, 0, num_steps=STEPS, block_steps=BLOCK_STEPS)


@pytest.fixture(scope="module")
def feeder(grid):
    """Starting one takes seconds, most of them for imports: the tests share it."""
    start_feeder("job", replace(grid, pad_id=9))  # of an earlier driver, which is gone
    feeder = start_feeder("job", grid)
    ask(feeder, 0)
    return feeder


def local(grid, block):
    return assemble_steps(grid.open(), *grid.steps_of(block), grid.pad_id)


def ask(feeder, block, timeout_s=60):
    (ref,) = ray.get(feeder.get.remote(block), timeout=timeout_s)
    return ray.get(ref, timeout=timeout_s)


def as_values(batch):
    parts = [
        (m.index, m.tokens_BT.numpy().tobytes(), m.labels_BT.numpy().tobytes(), m.packed.segments)
        for m in batch.micro_batches
    ]
    return parts, batch.num_targets, batch.num_packs, batch.epoch, batch.end_pack


def alone(grid, place, first, last):
    batches = islice(StepStream(grid, SHAPE, place, NoBlocks(), first), last - first)
    return [as_values(batch) for batch in batches]


class Recorded(FeederBlocks):
    """Knows which blocks the feeder served."""

    def __init__(self, feeder):
        super().__init__(feeder)
        self.served = []

    def take(self, block, timeout_s):
        table = super().take(block, timeout_s)
        if table is not None:
            self.served.append(block)
        return table


def fed(grid, feeder, place, first, last, after=lambda step: None):
    """Steps as a loop sees them that takes a moment for each, and the blocks that were served;
    `after` is told each step done."""
    source = Recorded(feeder)
    found = []
    stream = islice(StepStream(grid, SHAPE, place, source, first), last - first)
    for step, batch in enumerate(stream, start=first):
        found.append(as_values(batch))
        after(step)
        time.sleep(LOOP_S)
    return found, source.served


def test_training_that_holds_every_cpu_does_not_starve_the_feeder(grid, feeder):
    assert ray.available_resources().get("CPU", 0) == 0
    assert ask(feeder, 50).equals(local(grid, 50))


def test_blocks_from_the_feeder_are_those_assembled_here_bit_for_bit(grid, feeder):
    for block in (0, 1, 2, 17, 40, grid.num_blocks - 1):
        assert ask(feeder, block).equals(local(grid, block))
    assert grid.steps_of(grid.num_blocks - 1) == (STEPS - 1, STEPS)  # the last block is short


def test_ray_data_never_splits_a_block(grid):
    """It would by default beyond 128 MiB, and every later block would be taken for another."""
    ray.data.DataContext.get_current().target_max_block_size = 200
    bundles = list(feeding._execute(grid, 0, 3).iter_internal_ref_bundles())
    tables = ray.get([entry.ref for bundle in bundles for entry in bundle.blocks])
    assert [table.num_rows for table in tables] == [local(grid, n).num_rows for n in range(3)]


def test_a_new_driver_replaces_the_feeder_of_an_earlier_one(grid, feeder):
    named = ray.get_actor(feeder_name("job"), namespace=NAMESPACE)
    assert named == feeder
    assert ask(named, 0).equals(local(grid, 0))


def test_two_ranks_fed_by_one_feeder_run_what_they_run_alone(grid, feeder):
    for block in range(0, 50, 4):
        ask(feeder, block)
    sources = [Recorded(feeder) for _ in range(2)]
    streams = [StepStream(grid, SHAPE, Place(rank, 2), sources[rank], 0) for rank in range(2)]
    found = [[], []]
    for both in islice(zip(*streams, strict=True), 100):
        for rank, batch in enumerate(both):
            found[rank].append(as_values(batch))
        time.sleep(LOOP_S)
    for rank in range(2):
        assert found[rank] == alone(grid, Place(rank, 2), 0, 100)
        assert sources[rank].served


def test_a_group_that_starts_again_at_an_earlier_step_is_served_from_what_is_here(grid, feeder):
    place = Place(0, 1)
    before = [ray.get(feeder.get.remote(block), timeout=60) for block in range(30)]
    assert [ray.get(feeder.get.remote(block)) for block in range(10, 30)] == before[10:]
    found, served = fed(grid, feeder, place, 21, 60)
    assert found == alone(grid, place, 21, 60)
    assert served


def test_a_far_seek_and_the_way_back_are_served(grid, feeder):
    for block in (0, 95, 1):
        assert ask(feeder, block).equals(local(grid, block))
    found, _ = fed(grid, feeder, Place(0, 1), 181, STEPS)
    assert found == alone(grid, Place(0, 1), 181, STEPS)


def test_every_block_that_was_asked_for_comes_whatever_the_order(grid, feeder):
    asked = {block: feeder.get.remote(block) for block in (60, 61, 3, 4, 90, 20, 2, 99, 0)}
    for block, answer in asked.items():
        (ref,) = ray.get(answer, timeout=60)
        assert ray.get(ref).equals(local(grid, block))


def test_a_feeder_that_starts_again_is_used_again(grid, feeder, monkeypatch):
    monkeypatch.setattr(streaming, "RETRY_FEEDER_S", 0.1)

    def kill(step):
        if step == 40:
            ray.kill(feeder, no_restart=False)
        if step == 60:
            wait_until_it_answers(feeder)

    found, served = fed(grid, feeder, Place(0, 1), 0, 140, kill)
    assert found == alone(grid, Place(0, 1), 0, 140)
    assert max(served) > 60 // BLOCK_STEPS


def wait_until_it_answers(feeder):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            return [ask(feeder, block) for block in range(30, 70)]
        except RayError:
            time.sleep(0.1)
    raise TimeoutError("the feeder did not start again")


def test_the_stream_goes_on_without_a_feeder_that_is_gone_for_good(grid, feeder, monkeypatch):
    monkeypatch.setattr(streaming, "RETRY_FEEDER_S", 0.1)

    def kill(step):
        if step == 40:
            ray.kill(feeder, no_restart=True)

    found, served = fed(grid, feeder, Place(0, 1), 0, 120, kill)
    assert found == alone(grid, Place(0, 1), 0, 120)
    assert max(served, default=0) < 80 // BLOCK_STEPS


def test_a_store_that_cannot_be_read_is_told_to_the_ranks_and_tried_again(grid, tmp_path):
    moved = tmp_path / "store"
    feeder = start_feeder("lost", replace(grid, split=SplitPlace(LocalStorage(moved), "train")))
    source = FeederBlocks(feeder)
    deadline = time.monotonic() + 60
    while not source._silent_until:
        assert source.take(0, timeout_s=0.1) is None
        assert time.monotonic() < deadline
    shutil.copytree(grid.split.store.root, moved)
    assert ask(feeder, 0).equals(local(grid, 0))


def test_stopping_a_feeder_twice_leaves_none(grid):
    start_feeder("brief", grid)
    stop_feeder("brief")
    stop_feeder("brief")
    with pytest.raises(ValueError, match="brief"):
        ray.get_actor(feeder_name("brief"), namespace=NAMESPACE)
