"""Assembles packs into Arrow tables: the blocks in which packed samples travel.

A block holds the packs of whole steps, one row a pack, in order. Whoever assembles it, Ray Data or
a rank itself, the bytes are the same.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from pliant.batch import IGNORED, MicroBatch, PackedMetadata, StepBatch
from pliant.data.packing import Packing
from pliant.data.plan import DataPlan
from pliant.data.store import Split
from pliant.topology import BatchShape, Place


def assemble(split: Split, packing: Packing, seq_len: int, pad_id: int) -> pa.Table:
    """One row a pack: `tokens` and `trained` [seq_len], `lengths` and `pieces` [pieces of it]."""
    piece_lengths = split.lengths[packing.items]
    starts = packing.starts
    used = np.add.reduceat(piece_lengths, starts[:-1]) if packing.num_packs else np.empty(0)
    flat_tokens, flat_trained = split.gather(packing.items)
    filled_RT = np.arange(seq_len) < used[:, None]
    tokens_RT = np.full(filled_RT.shape, pad_id, dtype=np.int32)
    trained_RT = np.zeros(filled_RT.shape, dtype=np.uint8)
    tokens_RT[filled_RT] = flat_tokens
    trained_RT[filled_RT] = flat_trained
    return pa.table(
        {
            "tokens": _rows(tokens_RT),
            "trained": _rows(trained_RT),
            "lengths": pa.LargeListArray.from_arrays(starts, piece_lengths),
            "pieces": pa.LargeListArray.from_arrays(starts, packing.items),
        }
    )


def assemble_steps(plan: DataPlan, first: int, last: int, pad_id: int) -> pa.Table:
    """The packs of steps `first` up to `last`, in order."""
    tables = [
        assemble(plan.split, packing, plan.settings.seq_len, pad_id)
        for _, packing in plan.steps(first, last)
    ]
    return pa.concat_tables(tables).combine_chunks()


def _rows(array_RT: NDArray[np.generic]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(array_RT.reshape(-1)), array_RT.shape[1])


@dataclass(frozen=True)
class Rows:
    """An assembled table as numpy views; R packs of T tokens."""

    tokens_RT: NDArray[np.int32]
    trained_RT: NDArray[np.uint8]
    lengths: NDArray[np.int32]
    pieces: NDArray[np.int64]
    starts: NDArray[np.int64]

    @staticmethod
    def of(table: pa.Table, seq_len: int) -> "Rows":
        def fixed(name: str) -> NDArray[np.generic]:
            column = _one_chunk(table, name)
            flat = column.flatten().to_numpy(zero_copy_only=True)
            return flat.reshape(-1, seq_len)

        lists = _one_chunk(table, "pieces")
        return Rows(
            tokens_RT=fixed("tokens"),  # type: ignore[arg-type]
            trained_RT=fixed("trained"),  # type: ignore[arg-type]
            lengths=_one_chunk(table, "lengths").flatten().to_numpy(),
            pieces=lists.flatten().to_numpy(),
            starts=lists.offsets.to_numpy() - lists.offsets[0].as_py(),
        )

    def step_batch(
        self, first: int, last: int, shape: BatchShape, place: Place, epoch: int, end_pack: int
    ) -> StepBatch:
        """One rank's share of the step whose packs are the rows `first` up to `last`."""
        micro_batches = [
            self._micro_batch(index, first, last, shape)
            for index in place.micro_batches(shape.num_micro_batches)
        ]
        missing = place.num_rounds(shape.num_micro_batches) - len(micro_batches)
        micro_batches += [
            MicroBatch.dummy(shape.num_micro_batches, shape.micro_batch_size, shape.seq_len)
            for _ in range(missing)
        ]
        span = slice(self.starts[first], self.starts[last])
        return StepBatch(
            micro_batches=tuple(micro_batches),
            num_targets=int(np.count_nonzero(self.trained_RT[first:last])),
            num_packs=last - first,
            num_samples=int(self.starts[last] - self.starts[first]),
            num_tokens=int(self.lengths[span].sum()),
            epoch=epoch,
            end_pack=end_pack,
        )

    def _micro_batch(self, index: int, first: int, last: int, shape: BatchShape) -> MicroBatch:
        """Rows beyond the step's last pack are padding, so that the shape stays the same."""
        size = shape.micro_batch_size
        low = min(first + index * size, last)
        high = min(low + size, last)
        if low == high:
            return MicroBatch.dummy(index, size, shape.seq_len)
        padding = size - (high - low)
        tokens_BT = _padded(self.tokens_RT[low:high], padding).astype(np.int64)
        trained_BT = _padded(self.trained_RT[low:high], padding)
        segments = [self._segments(row, shape.seq_len) for row in range(low, high)]
        packed = PackedMetadata(tuple(segments) + ((shape.seq_len,),) * padding)
        return MicroBatch(
            index=index,
            tokens_BT=torch.from_numpy(tokens_BT),
            labels_BT=torch.from_numpy(np.where(trained_BT, tokens_BT, IGNORED)),
            positions_BT=packed.positions_BT(),
            packed=packed,
            piece_ids=self.pieces[self.starts[low] : self.starts[high]].copy(),
        )

    def _segments(self, row: int, seq_len: int) -> tuple[int, ...]:
        lengths = self.lengths[self.starts[row] : self.starts[row + 1]].tolist()
        tail = seq_len - sum(lengths)
        return (*lengths, tail) if tail else tuple(lengths)


def _padded(rows: NDArray[np.generic], padding: int) -> NDArray[np.generic]:
    return np.pad(rows, ((0, padding), (0, 0))) if padding else rows


def _one_chunk(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
