"""Digests of tensors that do not depend on how these are cut: each part's is added up.

They catch what no digest of a file can: that a fragment was put together wrongly when state was
loaded on another number of ranks.
"""

import random
from collections.abc import Collection, Iterable, Mapping

import torch

from pliant.checkpoints.fragments import Fragment
from pliant.checkpoints.manifest import Manifest
from pliant.errors import FilesDamaged

SMALL = 4096
"""Elements; every tensor that has no more is compared."""
NUM_LARGE = 8
"""Larger ones that are compared besides, chosen anew for every checkpoint."""

_CHUNK = 1 << 16
"""Elements at a time: what fits a CPU's cache is several times as fast."""
_CHUNK_ON_DEVICE = 1 << 22
_WORD_FACTOR, _PLACE_FACTOR, _MIX = -0x61C8864680B583EB, 0x632BE59BD9B4E019, -0x40A7B892E31B1A47
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def partial_digest(tensor: torch.Tensor, start: int = 0) -> int:
    """A 64-bit digest of the bits of elements [start, start + len(tensor)) of a whole tensor,
    computed where they lie. Modulo 2^64, the digests of all parts add up to that of the whole.

    Each word is mixed with its position and the results are added, in integer arithmetic that wraps
    around, so that the digest does not depend on the order in which the hardware adds. The mixing
    is that of splitmix64: weights alone would let two small differences cancel out.
    """
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(_WORDS[flat.element_size()])
    chunk = _CHUNK if words.device.type == "cpu" else _CHUNK_ON_DEVICE
    total = 0
    for begin in range(0, words.numel(), chunk):
        mixed = words[begin : begin + chunk].to(torch.int64, copy=True)
        first = start + begin
        places = torch.arange(first, first + mixed.numel(), device=mixed.device)
        mixed.mul_(_WORD_FACTOR).add_(places.mul_(_PLACE_FACTOR))
        mixed.bitwise_xor_(mixed >> 30).mul_(_MIX)
        total += int(mixed.bitwise_xor_(mixed >> 31).sum())
    return total % 2**64


def chosen(tensors: Mapping[str, int], seed: int) -> frozenset[str]:
    """The keys to compare, of tensors with so many elements: all small ones and a few others. With
    the same seed (the step) every rank chooses the same."""
    small = {key for key, numel in tensors.items() if numel <= SMALL}
    large = sorted(tensors.keys() - small)
    few = random.Random(seed).sample(large, min(NUM_LARGE, len(large)))
    return frozenset(small | set(few))


def partial_digests(fragments: Iterable[Fragment], keys: Collection[str]) -> dict[str, int]:
    """What this rank adds to the digest of each tensor of `keys`: only what it owns counts."""
    parts: dict[str, int] = {}
    for fragment in fragments:
        if fragment.is_owner and fragment.key in keys:
            part = partial_digest(fragment.tensor, fragment.start)
            parts[fragment.key] = (parts.get(fragment.key, 0) + part) % 2**64
    return parts


def added(ranks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The digests of whole tensors, from every rank's parts."""
    whole: dict[str, int] = {}
    for parts in ranks:
        for key, part in parts.items():
            whole[key] = (whole.get(key, 0) + part) % 2**64
    return whole


def stated(whole: Mapping[str, int]) -> dict[str, str]:
    """As a manifest keeps them: JSON has no integers of 64 bits that every reader understands."""
    return {key: f"{value:016x}" for key, value in sorted(whole.items())}


def expected(manifest: Manifest, key: str) -> int | None:
    """The digest of a tensor when it was saved; None where none was kept."""
    text = manifest.digests.get(key)
    return None if text is None else int(text, 16)


def check(manifest: Manifest, whole: Mapping[str, int]) -> None:
    """Raises `FilesDamaged` and names the first tensor that is not what was saved."""
    for key, found in sorted(whole.items()):
        saved = expected(manifest, key)
        if saved is not None and saved != found:
            raise FilesDamaged(
                f"{key} was loaded with the digest {found:016x}, and step {manifest.step} was "
                f"saved with {saved:016x}. The state in memory is not that of the checkpoint; "
                "start the job again, and report this if it comes again.",
                key=key,
            )
