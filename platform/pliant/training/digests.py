"""Digests of tensors, to tell whether ranks hold the same values."""

from collections import Counter
from collections.abc import Iterable

import torch
import torch.distributed as dist

from pliant.checkpoints.digests import partial_digest
from pliant.errors import RanksDisagree


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """A 64-bit digest of the bits of the tensors, in order; computed where they lie."""
    total = 0
    for number, tensor in enumerate(tensors):
        total = (total * 1_000_003 + number + partial_digest(tensor)) % 2**64
    return total


def agree(what: str, value: int) -> None:
    """Raises `RanksDisagree` on every rank where some rank's value is not that of the majority."""
    values: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    common, _ = Counter(values).most_common(1)[0]
    others = [rank for rank, found in enumerate(values) if found != common]
    if others:
        ranks = ", ".join(map(str, others))
        raise RanksDisagree(
            f"The {what} of rank {ranks} differ from those of the others. Look for other library "
            "versions or faulty memory there; the last checkpoint before this step is good.",
            ranks=others,
        )
