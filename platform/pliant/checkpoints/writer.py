"""Writes a checkpoint: every rank its file, then one rank the manifest."""

import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from pliant.checkpoints.fragments import Fragment
from pliant.checkpoints.manifest import Chunk, RankFile, file_digest, sync_directory
from pliant.errors import NoSpace

SPARE_SHARE = 1.05


def attempt_directory(root: Path, step: int, attempt: int, world_size: int) -> Path:
    """Each attempt at a step has a directory of its own, so that no two mix their files."""
    return root / f"step-{step:08d}.attempt-{attempt}.ranks-{world_size}"


def write_rank_file(directory: Path, rank: int, fragments: list[Fragment]) -> RankFile:
    """Saves what this rank owns, synced to disk. Raises `NoSpace` before writing anything."""
    directory.mkdir(parents=True, exist_ok=True)
    owned = [f for f in fragments if f.is_owner and f.tensor.numel()]
    need_space(directory, sum(f.tensor.numel() * f.tensor.element_size() for f in owned))
    chunks = tuple(Chunk(f.key, f.start, f.tensor.numel()) for f in owned)
    path = directory / f"rank-{rank:05d}.safetensors"
    tensors = {
        chunk.entry: fragment.tensor.detach().to("cpu", copy=True).contiguous()
        for chunk, fragment in zip(chunks, owned, strict=True)
    }
    save_file(tensors or {"nothing": torch.empty(0)}, path)
    _sync(path)
    return RankFile(path.name, path.stat().st_size, file_digest(path), chunks)


def need_space(directory: Path, size_bytes: int) -> None:
    """Raises `NoSpace` where `size_bytes` do not fit."""
    free = shutil.disk_usage(directory).free
    if free < size_bytes * SPARE_SHARE:
        raise NoSpace(
            f"{directory} has {free / 2**20:,.0f} MiB free and a checkpoint needs "
            f"{size_bytes * SPARE_SHARE / 2**20:,.0f} MiB. Free some space or move --runs-dir.",
            free_bytes=free,
            needed_bytes=size_bytes,
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_directory(path.parent)
