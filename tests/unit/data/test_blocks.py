"""What reaches the model, token by token."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.splits import InMemorySplit, some_pieces, write_split
from pliant.batch import IGNORED, MicroBatch, PackedMetadata
from pliant.data.blocks import Rows, assemble, assemble_steps
from pliant.data.packing import Packing
from pliant.data.plan import DataPlan, PlanSettings
from pliant.data.tokens import Piece
from pliant.topology import BatchShape, Place

PAD = 7
T = 6
PIECES = [
    Piece(np.array([10, 11], np.int32), np.array([0, 1], np.uint8)),
    Piece(np.array([20, 21, 22], np.int32), np.array([0, 0, 1], np.uint8)),
    Piece(np.array([30, 31, 32, 33], np.int32), np.array([0, 1, 1, 0], np.uint8)),
    Piece(np.array([40, 41, 42, 43, 44, 45], np.int32), np.array([0, 1, 1, 1, 1, 1], np.uint8)),
    Piece(np.array([50], np.int32), np.array([0], np.uint8)),
]
PACKS = [[1, 0], [2, 0], [3], [4]]
"""With a tail of padding, exactly full, one full segment, one segment and its tail."""


def packing_of(packs):
    items = np.array([piece for pack in packs for piece in pack], dtype=np.int64)
    return Packing(items=items, starts=np.cumsum([0, *map(len, packs)]).astype(np.int64))


def table_of(packs, pieces=PIECES, seq_len=T):
    return assemble(InMemorySplit(None, pieces), packing_of(packs), seq_len, PAD)


def step(packs, place=Place(0, 1), batch=4, micro=1):
    shape = BatchShape(global_batch_size=batch, micro_batch_size=micro, seq_len=T)
    rows = Rows.of(table_of(packs), T)
    return rows.step_batch(0, len(packs), shape, place, epoch=2, end_pack=9)


def test_a_table_has_a_row_for_every_pack():
    table = table_of(PACKS)
    assert table.column("tokens").to_pylist() == [
        [20, 21, 22, 10, 11, PAD],
        [30, 31, 32, 33, 10, 11],
        [40, 41, 42, 43, 44, 45],
        [50, PAD, PAD, PAD, PAD, PAD],
    ]
    assert table.column("trained").to_pylist() == [
        [0, 0, 1, 0, 1, 0],
        [0, 1, 1, 0, 0, 1],
        [0, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0],
    ]
    assert table.column("lengths").to_pylist() == [[3, 2], [4, 2], [6], [1]]
    assert table.column("pieces").to_pylist() == PACKS


@pytest.mark.parametrize(
    ("pack", "segments", "labels", "positions"),
    [
        (PACKS[0], (3, 2, 1), [-100, -100, 22, -100, 11, -100], [0, 1, 2, 0, 1, 0]),
        (PACKS[1], (4, 2), [-100, 31, 32, -100, -100, 11], [0, 1, 2, 3, 0, 1]),
        (PACKS[2], (6,), [-100, 41, 42, 43, 44, 45], [0, 1, 2, 3, 4, 5]),
        (PACKS[3], (1, 5), [-100] * 6, [0, 0, 1, 2, 3, 4]),
    ],
    ids=["with a tail", "exactly full", "one segment", "one segment and a tail"],
)
def test_a_pack_becomes_tensors(pack, segments, labels, positions):
    batch = step([pack], batch=1)
    (micro,) = batch.micro_batches
    assert micro.labels_BT.tolist() == [labels]
    assert micro.positions_BT.tolist() == [positions]
    assert micro.packed == PackedMetadata((segments,))
    assert micro.packed.lengths == list(segments)
    assert sum(segments) == T
    assert micro.piece_ids.tolist() == pack
    assert {t.dtype for t in (micro.tokens_BT, micro.labels_BT, micro.positions_BT)} == {
        torch.int64
    }


def test_a_step_knows_the_whole_global_batch_on_every_rank():
    for rank in range(3):
        batch = step(PACKS, Place(rank, 3))
        assert batch.num_targets == 2 + 3 + 5 + 0
        assert (batch.num_packs, batch.num_samples, batch.num_tokens) == (4, 6, 5 + 6 + 6 + 1)
        assert (batch.epoch, batch.end_pack) == (2, 9)
        assert len(batch.micro_batches) == 2


def test_labels_are_the_targets_and_no_segment_begins_with_one():
    batch = step(PACKS)
    labels = torch.cat([micro.labels_BT for micro in batch.micro_batches])
    positions = torch.cat([micro.positions_BT for micro in batch.micro_batches])
    assert int((labels != IGNORED).sum()) == batch.num_targets
    assert bool((labels[positions == 0] == IGNORED).all())


def test_rows_of_a_micro_batch_lie_in_the_order_of_the_packs():
    batch = step(PACKS, micro=2)
    first, second = batch.micro_batches
    assert (first.index, second.index) == (0, 1)
    assert first.tokens_BT.tolist() == [[20, 21, 22, 10, 11, PAD], [30, 31, 32, 33, 10, 11]]
    assert first.packed == PackedMetadata(((3, 2, 1), (4, 2)))
    assert first.piece_ids.tolist() == [1, 0, 2, 0]
    assert second.packed == PackedMetadata(((6,), (1, 5)))
    assert second.piece_ids.tolist() == [3, 4]


def test_a_short_last_batch_is_filled_up_with_rows_and_micro_batches_of_padding():
    batch = step(PACKS[:3], batch=8, micro=2)
    full, half, empty, last = batch.micro_batches
    assert full.tokens_BT.shape == half.tokens_BT.shape == empty.tokens_BT.shape == (2, T)
    assert half.tokens_BT[0].tolist() == [40, 41, 42, 43, 44, 45]
    assert half.labels_BT[1].tolist() == [IGNORED] * T
    assert half.packed == PackedMetadata(((6,), (6,)))
    assert half.piece_ids.tolist() == [3]
    for micro, index in ((empty, 2), (last, 3)):
        assert micro.index == index
        assert bool((micro.labels_BT == IGNORED).all())
        assert len(micro.piece_ids) == 0
    assert (batch.num_packs, batch.num_targets) == (3, 10)


def test_a_rank_without_a_micro_batch_runs_a_dummy():
    batch = step(PACKS, Place(6, 7))
    (dummy,) = batch.micro_batches
    assert bool((dummy.labels_BT == IGNORED).all())
    assert len(dummy.piece_ids) == 0
    assert batch.num_targets == 10


def test_a_dummy_is_padding_of_the_usual_shape():
    dummy = MicroBatch.dummy(5, batch_size=3, seq_len=4)
    assert dummy.index == 5
    assert dummy.tokens_BT.shape == dummy.labels_BT.shape == dummy.positions_BT.shape == (3, 4)
    assert dummy.packed == PackedMetadata(((4,),) * 3)
    assert dummy.positions_BT.tolist() == [[0, 1, 2, 3]] * 3
    assert dummy.tokens_BT.dtype == dummy.labels_BT.dtype == torch.int64


def test_tensors_are_copies_that_may_be_written_to():
    table = table_of(PACKS)
    shape = BatchShape(global_batch_size=4, micro_batch_size=4, seq_len=T)
    (micro,) = Rows.of(table, T).step_batch(0, 4, shape, Place(0, 1), 0, 4).micro_batches
    for tensor in (micro.tokens_BT, micro.labels_BT, micro.positions_BT):
        tensor.fill_(0)
    micro.piece_ids.fill(0)
    assert table.equals(table_of(PACKS))


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_rows_can_be_read_from_a_slice_and_from_several_chunks(cut):
    def contents(rows, first):
        shape = BatchShape(global_batch_size=4, micro_batch_size=1, seq_len=T)
        return rows.step_batch(first, 4 - cut + first, shape, Place(0, 1), 0, 4)

    whole = Rows.of(table_of(PACKS), T)
    expected = whole.step_batch(cut, 4, BatchShape(4, 1, T), Place(0, 1), 0, 4)
    chunks = [table_of(PACKS[:2]), table_of(PACKS[2:])]
    for table in (table_of(PACKS).slice(cut), pa.concat_tables(chunks).slice(cut)):
        assert_same_step(contents(Rows.of(table, T), 0), expected)


def test_metadata_is_equal_when_its_segments_are():
    assert PackedMetadata(((3, 1),)) == PackedMetadata(((3, 1),))
    assert PackedMetadata(((3, 1),)) != PackedMetadata(((1, 3),))
    assert len({PackedMetadata(((3, 1),)), PackedMetadata(((3, 1),))}) == 1


def assert_same_step(found, expected):
    facts = ("num_targets", "num_packs", "num_samples", "num_tokens", "epoch", "end_pack")
    assert [getattr(found, f) for f in facts] == [getattr(expected, f) for f in facts]
    assert len(found.micro_batches) == len(expected.micro_batches)
    for one, other in zip(found.micro_batches, expected.micro_batches, strict=True):
        assert one.index == other.index
        assert one.packed == other.packed
        assert torch.equal(one.tokens_BT, other.tokens_BT)
        assert torch.equal(one.labels_BT, other.labels_BT)
        assert torch.equal(one.positions_BT, other.positions_BT)
        assert np.array_equal(one.piece_ids, other.piece_ids)


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=40),
    packs=st.lists(st.integers(1, 4), min_size=1, max_size=10),
    batch=st.integers(1, 12),
    micro=st.sampled_from([1, 2, 3]),
)
@settings(max_examples=100, deadline=None)
def test_over_any_world_size_the_ranks_run_what_one_rank_runs(lengths, packs, batch, micro):
    pieces = some_pieces(lengths)
    ids = iter(np.random.default_rng(0).integers(0, len(lengths), 100).tolist())
    chosen = [[next(ids) for _ in range(count)] for count in packs][:batch]
    rows = Rows.of(table_of(chosen, pieces, seq_len=48), 48)
    shape = BatchShape(global_batch_size=batch, micro_batch_size=micro, seq_len=48)
    (alone,) = steps_of_all(rows, len(chosen), shape, 1)
    by_index = {each.index: each for each in alone.micro_batches}
    assert sorted(by_index) == list(range(shape.num_micro_batches))
    for world_size in (1, 2, 3, 4, 5, 7):
        steps = steps_of_all(rows, len(chosen), shape, world_size)
        assert len({len(each.micro_batches) for each in steps}) == 1
        assert len({(each.num_targets, each.num_packs, each.num_tokens) for each in steps}) == 1
        run = [each for one in steps for each in one.micro_batches]
        real = sorted((e for e in run if e.index in by_index), key=lambda each: each.index)
        assert_same_step(
            SimpleNamespace(**(vars(alone) | {"micro_batches": real})),
            SimpleNamespace(**(vars(alone) | {"micro_batches": list(alone.micro_batches)})),
        )
        for dummy in (each for each in run if each.index not in by_index):
            assert bool((dummy.labels_BT == IGNORED).all())
            assert not len(dummy.piece_ids)


def steps_of_all(rows, num_packs, shape, world_size):
    places = [Place(rank, world_size) for rank in range(world_size)]
    return [rows.step_batch(0, num_packs, shape, place, 0, num_packs) for place in places]


def test_a_block_holds_the_packs_of_its_steps_in_order(tmp_path):
    split = write_split(tmp_path / "store", some_pieces([3, 5, 2, 6, 4, 4, 1] * 5), shard_pieces=6)
    plan = DataPlan(split, PlanSettings(6, 4, 10, True, True, 0))
    steps = plan.steps_in(1) + 2  # past the short last batch of the epoch
    block = assemble_steps(plan, 0, steps, PAD)
    assert all(column.num_chunks == 1 for column in block.columns)
    singles = [assemble_steps(plan, step, step + 1, PAD) for step in range(steps)]
    assert block.equals(pa.concat_tables(singles).combine_chunks())
    assert block.num_rows == sum(plan.packs_of(step).num_packs for step in range(steps))
    targets = split.targets[plan.packs_of(0).items].sum()
    assert np.count_nonzero(Rows.of(singles[0], 6).trained_RT) == targets
