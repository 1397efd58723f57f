"""Whoever assembles the blocks, and however often that changes, the loop sees the same batches."""

import gc
import threading
import time

import numpy as np
import pytest
import torch

from fakes.splits import some_pieces, write_split
from pliant.data import stream as streaming
from pliant.data.blocks import assemble_steps
from pliant.data.feeder import BlockGrid
from pliant.data.plan import DataPlan, PlanSettings
from pliant.data.stream import NoBlocks, StepStream, evaluation_batches
from pliant.errors import DataError
from pliant.topology import BatchShape, Place

PAD = 3
SHAPE = BatchShape(global_batch_size=5, micro_batch_size=1, seq_len=16)
STEPS = 23
"""Into the third epoch, and no multiple of a block's steps."""


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    lengths = np.random.default_rng(0).integers(2, 17, 70)
    split = write_split(tmp_path_factory.mktemp("stream") / "store", some_pieces(lengths))
    settings = PlanSettings(SHAPE.seq_len, SHAPE.global_batch_size, 20, True, True, 0)
    grid = BlockGrid(split.place, settings, PAD, num_steps=STEPS, block_steps=4)
    assert DataPlan(split, settings).steps_in(2) < STEPS
    return grid


@pytest.fixture(scope="module")
def expected(grid):
    """What one rank that assembles every step by itself runs."""
    return [contents(batch) for batch in StepStream(grid, SHAPE, Place(0, 1), NoBlocks(), 0)]


class Blocks:
    """A source that `gives(block, number of the take)` a block or does not."""

    def __init__(self, grid, gives=lambda block, take: True):
        self.plan = grid.open()
        self.grid = grid
        self.gives = gives
        self.requested = []
        self.given = []
        self.takes = 0

    def request(self, block):
        self.requested.append(block)

    def take(self, block, timeout_s):
        self.takes += 1
        if not self.gives(block, self.takes):
            return None
        self.given.append(block)
        return assemble_steps(self.plan, *self.grid.steps_of(block), self.grid.pad_id)


def contents(batch):
    """A step as a value: its numbers, and its micro-batches by index."""
    micro_batches = [
        (
            micro.index,
            micro.tokens_BT.tolist(),
            micro.labels_BT.tolist(),
            micro.positions_BT.tolist(),
            micro.packed.segments,
            micro.piece_ids.tolist(),
        )
        for micro in batch.micro_batches
    ]
    return micro_batches, numbers(batch)


def numbers(batch):
    facts = ("num_targets", "num_packs", "num_samples", "num_tokens", "epoch", "end_pack")
    return tuple(getattr(batch, fact) for fact in facts)


def steps_from(stream):
    return [contents(batch) for batch in stream]


def stream_threads():
    return [thread for thread in threading.enumerate() if thread.name == "step-stream"]


def test_a_run_without_a_feeder_follows_the_plan(grid, expected):
    plan = grid.open()
    assert len(expected) == STEPS
    for step, (micro_batches, (num_targets, num_packs, *_, epoch, end_pack)) in enumerate(expected):
        packing, place = plan.packs_of(step), plan.locate(step)
        pieces = [piece for *_, ids in micro_batches for piece in ids]
        assert pieces == packing.items.tolist()
        assert num_targets == plan.split.targets[packing.items].sum()
        assert num_packs == packing.num_packs
        assert (epoch, end_pack) == (place.epoch, place.last)


def test_every_epoch_trains_every_piece_once(grid, expected):
    steps = grid.open().steps_in(2)
    pieces = [piece for step, _ in expected[:steps] for *_, ids in step for piece in ids]
    assert sorted(pieces) == sorted([*range(70)] * 2)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7])
def test_ranks_of_any_world_size_run_together_what_one_runs(grid, expected, world_size):
    places = [Place(rank, world_size) for rank in range(world_size)]
    ranks = [steps_from(StepStream(grid, SHAPE, place, NoBlocks(), 0)) for place in places]
    for step, (alone, facts) in enumerate(expected):
        shares, seen = zip(*(rank[step] for rank in ranks), strict=True)
        assert set(seen) == {facts}
        assert len({len(share) for share in shares}) == 1
        real = [micro for share in shares for micro in share if micro[0] < SHAPE.num_micro_batches]
        assert sorted(real, key=lambda micro: micro[0]) == alone


@pytest.mark.parametrize("first", [0, 1, 3, 4, 6, 11, STEPS - 1, STEPS])
@pytest.mark.parametrize("source", [None, Blocks], ids=["alone", "with blocks"])
def test_a_stream_may_begin_at_any_step(grid, expected, first, source):
    source = source(grid) if source else NoBlocks()
    assert steps_from(StepStream(grid, SHAPE, Place(0, 1), source, first)) == expected[first:]


SOURCES = {
    "always there": lambda block, take: True,
    "slow": lambda block, take: take % 5 == 4,
    "dies after two blocks": lambda block, take: block < 2,
    "comes after two blocks": lambda block, take: block >= 2,
    "comes in the middle of a block": lambda block, take: take > 2,
    "comes and goes": lambda block, take: (take // 3) % 2 == 0,
    "never has the last block": lambda block, take: block != (STEPS - 1) // 4,
}


@pytest.mark.parametrize("gives", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("loop_s", [0.0, 0.01], ids=["hungry", "busy"])
@pytest.mark.parametrize("place", [Place(0, 1), Place(1, 3)], ids=["alone", "one of three"])
def test_the_hand_over_between_feeder_and_rank_is_exact(grid, gives, loop_s, place):
    alone = steps_from(StepStream(grid, SHAPE, place, NoBlocks(), 2))
    source = Blocks(grid, gives)
    found = []
    for batch in StepStream(grid, SHAPE, place, source, 2):
        found.append(contents(batch))
        time.sleep(loop_s)
    assert found == alone


def test_a_source_that_has_everything_serves_everything(grid):
    source = Blocks(grid)
    stream = StepStream(grid, SHAPE, Place(0, 1), source, 0)
    assert len(steps_from(stream)) == STEPS
    assert stream.num_assembled_here == 0
    assert source.given == list(range(grid.num_blocks))
    assert set(source.requested) == set(range(grid.num_blocks))


def test_a_rank_counts_what_it_assembled_itself(grid):
    stream = StepStream(grid, SHAPE, Place(0, 1), Blocks(grid, lambda block, _: block > 0), 0)
    assert len(steps_from(stream)) == STEPS
    assert stream.num_assembled_here == 4


def test_a_stream_waits_for_a_slow_source_while_the_loop_has_batches(grid):
    """Once there are batches in hand, a block that is a little late is waited for."""
    ready_at = {}

    def a_moment_later(block, take):
        return time.monotonic() > ready_at.setdefault(block, time.monotonic() + 0.03)

    source = Blocks(grid, a_moment_later)
    stream = StepStream(grid, SHAPE, Place(0, 1), source, 0)
    for _ in stream:
        time.sleep(0.03)
    assert source.given
    assert stream.num_assembled_here < STEPS


def test_a_block_of_the_wrong_size_is_an_error_and_no_other_batch(grid):
    class Halves(Blocks):
        def take(self, block, timeout_s):
            table = super().take(block, timeout_s)
            return table.slice(0, table.num_rows - 1)

    with pytest.raises(AssertionError):
        steps_from(StepStream(grid, SHAPE, Place(0, 1), Halves(grid), 0))


def test_closing_early_stops_the_thread(grid):
    for taken in (1, 10):
        batches = iter(StepStream(grid, SHAPE, Place(0, 1), NoBlocks(), 0))
        for _ in range(taken):
            next(batches)
        assert stream_threads()
        batches.close()
        assert not stream_threads()


def test_closing_while_the_source_is_silent_stops_the_thread(grid):
    silent = Blocks(grid, lambda block, take: block == 0)
    batches = iter(StepStream(grid, SHAPE, Place(0, 1), silent, 0))
    next(batches)
    time.sleep(0.1)
    batches.close()
    assert not stream_threads()


def test_leaving_a_loop_by_an_error_stops_the_thread(grid):
    def fail():
        for _ in StepStream(grid, SHAPE, Place(0, 1), NoBlocks(), 0):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    gc.collect()
    assert not stream_threads()


def test_a_stream_that_nobody_iterates_has_no_thread(grid):
    StepStream(grid, SHAPE, Place(0, 1), NoBlocks(), 0)
    assert not stream_threads()


def test_a_stream_can_be_iterated_again(grid, expected):
    stream = StepStream(grid, SHAPE, Place(0, 1), NoBlocks(), 20)
    next(iter(stream))
    gc.collect()
    assert steps_from(stream) == expected[20:]
    assert steps_from(stream) == expected[20:]


def test_an_error_in_assembling_reaches_the_loop_after_the_batches_before_it(grid, monkeypatch):
    def assemble_until(plan, first, last, pad_id):
        if first == 6:
            raise DataError("shard-00000.arrow is damaged", path="x")
        return assemble_steps(plan, first, last, pad_id)

    monkeypatch.setattr(streaming, "assemble_steps", assemble_until)
    batches = iter(StepStream(grid, SHAPE, Place(0, 1), NoBlocks(), 0))
    assert len([next(batches) for _ in range(6)]) == 6
    with pytest.raises(DataError, match="damaged"):
        next(batches)
    assert not stream_threads()


def test_an_error_of_the_source_reaches_the_loop(grid):
    def broken(block, take):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        steps_from(StepStream(grid, SHAPE, Place(0, 1), Blocks(grid, broken), 0))


def test_a_missing_store_reaches_the_loop(grid, tmp_path):
    lost = BlockGrid(tmp_path / "train", grid.settings, PAD, STEPS, 4)
    with pytest.raises(FileNotFoundError):
        steps_from(StepStream(lost, SHAPE, Place(0, 1), NoBlocks(), 0))


def test_no_more_steps_than_allowed_are_prepared_ahead(grid):
    source = Blocks(grid)
    batches = iter(StepStream(grid, SHAPE, Place(0, 1), source, 0))
    next(batches)
    time.sleep(0.2)
    assert len(source.given) <= -(-streaming.READY_STEPS // 4) + 1
    batches.close()


def test_the_wait_for_a_batch_is_measured(grid):
    waits = [batch.data_wait_s for batch in StepStream(grid, SHAPE, Place(0, 1), NoBlocks(), 0)]
    assert all(wait > 0 for wait in waits)
    assert sum(waits) < 30


@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_evaluation_passes_once_over_everything_on_as_many_batches_on_every_rank(grid, world_size):
    settings = PlanSettings(SHAPE.seq_len, SHAPE.global_batch_size, 20, True, False, 0)
    ranks = [
        list(evaluation_batches(DataPlan(grid.open().split, settings), PAD, SHAPE, place))
        for place in (Place(rank, world_size) for rank in range(world_size))
    ]
    assert len({len(rank) for rank in ranks}) == 1
    for step in zip(*ranks, strict=True):
        assert len({numbers(batch) for batch in step}) == 1
    run = [micro for rank in ranks for batch in rank for micro in batch.micro_batches]
    assert sorted(np.concatenate([micro.piece_ids for micro in run])) == list(range(70))
    targets = sum(batch.num_targets for batch in ranks[0])
    assert targets == sum(int(torch.sum(micro.labels_BT != -100)) for micro in run)
