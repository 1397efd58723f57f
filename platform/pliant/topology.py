"""Which rank does what: pure arithmetic over steps, micro-batches and ranks.

A step is always `num_micro_batches` micro-batches, however many ranks there are. Rank r of n takes
the micro-batches r, r + n, r + 2n, ...; every rank runs the same number of rounds, and a rank that
has nothing left in the last round runs a micro-batch of weight zero.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchShape:
    """The shape of an optimizer step; constant through every resize."""

    global_batch_size: int
    """Packs per step, over all ranks."""
    micro_batch_size: int
    """Packs per forward pass."""
    seq_len: int
    """Tokens per pack."""

    @property
    def num_micro_batches(self) -> int:
        return -(-self.global_batch_size // self.micro_batch_size)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_len


@dataclass(frozen=True)
class Place:
    """One data-parallel rank among `world_size`."""

    rank: int
    world_size: int

    def micro_batches(self, num_micro_batches: int) -> range:
        """The indices of the micro-batches of a step that this rank runs, in its order."""
        return range(self.rank, num_micro_batches, self.world_size)

    def num_rounds(self, num_micro_batches: int) -> int:
        """Forward passes per step: the same on every rank."""
        return -(-num_micro_batches // self.world_size)
