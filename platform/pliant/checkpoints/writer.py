"""Writes a checkpoint: every rank its file, then one rank the manifest."""

import errno
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from pliant.checkpoints.fragments import Fragment
from pliant.checkpoints.manifest import Chunk, RankFile, file_digest
from pliant.errors import NoSpace
from pliant.files import sync_to_disk

SPARE_SHARE = 1.05
_NAME = re.compile(r"step-(\d+)\.attempt-(\d+)\.ranks-\d+")


def attempt_directory(root: Path, step: int, attempt: int, world_size: int) -> Path:
    """Each attempt at a step has a directory of its own, so that no two mix their files."""
    return root / f"step-{step:08d}.attempt-{attempt}.ranks-{world_size}"


def age(directory: Path) -> tuple[int, int] | None:
    """(attempt, step) of a directory that `attempt_directory` named; None for any other.

    A later attempt comes after an earlier one whatever their steps: it started from a checkpoint of
    that one, and passed over those ahead of it because they were damaged.
    """
    match = _NAME.fullmatch(directory.name)
    return (int(match[2]), int(match[1])) if match else None


def write_rank_file(directory: Path, rank: int, fragments: list[Fragment]) -> RankFile:
    """Saves what this rank owns, synced to disk. Raises `NoSpace` before writing
    anything, and where the disk fills up meanwhile."""
    directory.mkdir(parents=True, exist_ok=True)
    owned = [f for f in fragments if f.is_owner and f.tensor.numel()]
    need_space(directory, sum(f.tensor.numel() * f.tensor.element_size() for f in owned))
    chunks = tuple(Chunk(f.key, f.start, f.tensor.numel()) for f in owned)
    path = directory / f"rank-{rank:05d}.safetensors"
    tensors = {
        chunk.entry: fragment.tensor.detach().to("cpu", copy=True).contiguous()
        for chunk, fragment in zip(chunks, owned, strict=True)
    }
    _save(tensors or {"nothing": torch.empty(0)}, path)
    sync_to_disk(path)
    sync_to_disk(directory)
    return RankFile(path.name, path.stat().st_size, file_digest(path), chunks)


def need_space(directory: Path, size_bytes: int) -> None:
    """Raises `NoSpace` where `size_bytes` do not fit."""
    free = shutil.disk_usage(directory).free
    if free < size_bytes * SPARE_SHARE:
        raise _no_space(directory, free, size_bytes)


def _no_space(directory: Path, free: int, size_bytes: int) -> NoSpace:
    return NoSpace(
        f"{directory} has {free / 2**20:,.1f} MiB free and a checkpoint needs "
        f"{size_bytes * SPARE_SHARE / 2**20:,.1f} MiB. Free some space or move --runs-dir.",
        free_bytes=free,
        needed_bytes=size_bytes,
    )


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """safetensors has an error of its own for what goes wrong on the disk."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        if f"(os error {errno.ENOSPC})" in str(error):
            size_bytes = sum(tensor.nbytes for tensor in tensors.values())
            raise _no_space(path.parent, shutil.disk_usage(path.parent).free, size_bytes) from None
        raise OSError(f"{path} could not be written: {error}") from None
