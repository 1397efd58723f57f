"""What travels to the model: packed token rows and the metadata of their segments.

Shapes: B packs per micro-batch, T tokens per pack.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

IGNORED = -100
"""The label of a token that is not trained on."""


@dataclass(frozen=True)
class PackedMetadata:
    """Where the segments of a micro-batch lie; shared by all layers of one forward pass.

    Every row's lengths add up to T: the padding tail is a segment of its own. Two values are equal
    when their segments are.
    """

    segments: tuple[tuple[int, ...], ...]
    """For each of the B rows, the lengths of its segments in order."""

    @cached_property
    def lengths(self) -> list[int]:
        """All segment lengths of the rows laid end to end."""
        return [length for row in self.segments for length in row]

    def positions_BT(self) -> torch.Tensor:
        """int64 [B, T]: the position of each token within its segment."""
        rows = [np.concatenate([np.arange(length) for length in row]) for row in self.segments]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


@dataclass(frozen=True)
class MicroBatch:
    """B packs, as tensors on the CPU, and the pieces that they are made of."""

    index: int
    """Which of the step's micro-batches this is; seeds its dropout."""
    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor
    """Unshifted; IGNORED where nothing is trained, and at the first token of every segment."""
    positions_BT: torch.Tensor
    packed: PackedMetadata
    piece_ids: NDArray[np.int64]
    """The pieces in the order in which they lie in the rows: what the ledger records."""

    @staticmethod
    def dummy(index: int, batch_size: int, seq_len: int) -> MicroBatch:
        """A micro-batch of weight zero: padding only."""
        packed = PackedMetadata(segments=((seq_len,),) * batch_size)
        return MicroBatch(
            index=index,
            tokens_BT=torch.zeros(batch_size, seq_len, dtype=torch.int64),
            labels_BT=torch.full((batch_size, seq_len), IGNORED, dtype=torch.int64),
            positions_BT=packed.positions_BT(),
            packed=packed,
            piece_ids=np.empty(0, dtype=np.int64),
        )


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of one optimizer step."""

    micro_batches: tuple[MicroBatch, ...]
    """As many on every rank; where there is nothing left to run, a dummy."""
    num_targets: int
    """Target tokens of the whole global batch, over all ranks."""
    num_packs: int
    """Packs of the whole global batch; fewer than usual in the last step of an epoch."""
    num_samples: int
    """Pieces of the whole global batch."""
    num_tokens: int
    """Tokens of the whole global batch that are not padding."""
    epoch: int
    end_pack: int
    """The epoch's packs consumed once this step is done."""
    data_wait_s: float = 0.0
    """How long the loop waited for this batch."""
