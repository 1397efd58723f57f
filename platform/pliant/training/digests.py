"""Digests of tensors, to tell whether ranks hold the same values."""

from collections import Counter
from collections.abc import Iterable

import torch
import torch.distributed as dist

from pliant.errors import RanksDisagree

_CHUNK = 1 << 22
_WORD_FACTOR, _PLACE_FACTOR, _MIX = -0x61C8864680B583EB, 0x632BE59BD9B4E019, -0x40A7B892E31B1A47
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """A 64-bit digest of the bits of the tensors, in order; computed where they lie.

    Each word is mixed with its position and the results are added, in integer arithmetic that
    wraps around, so that the digest does not depend on the order in which the hardware adds. The
    mixing is that of splitmix64: weights alone would let two small differences cancel out.
    """
    total = 0
    for number, tensor in enumerate(tensors):
        total = (total * 1_000_003 + number + _digest_of(tensor)) % 2**64
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


def _digest_of(tensor: torch.Tensor) -> int:
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(_WORDS[flat.element_size()])
    total = 0
    for begin in range(0, words.numel(), _CHUNK):
        part = words[begin : begin + _CHUNK].to(torch.int64)
        places = torch.arange(begin, begin + part.numel(), device=part.device)
        mixed = part * _WORD_FACTOR + places * _PLACE_FACTOR
        mixed = (mixed ^ (mixed >> 30)) * _MIX
        total += int((mixed ^ (mixed >> 31)).sum())
    return total % 2**64
