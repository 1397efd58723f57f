"""Writes a checkpoint: every rank its file, then one rank the manifest."""

import re
from collections.abc import Iterable
from pathlib import Path

from pliant.checkpoints.manifest import Chunk, RankFile
from pliant.storage.local import Storage
from pliant.storage.opening import need_space

_NAME = re.compile(r"step-(\d+)\.attempt-(\d+)\.ranks-\d+")


def directory_name(step: int, attempt: int, world_size: int) -> str:
    """Each attempt at a step has a directory of its own, so that no two mix their files."""
    return f"step-{step:08d}.attempt-{attempt}.ranks-{world_size}"


def age(name: str) -> tuple[int, int] | None:
    """(attempt, step) of a directory that `directory_name` named; None for any other.

    A later attempt comes after an earlier one whatever their steps: it started from a checkpoint of
    that one, and passed over those ahead of it because they were damaged.
    """
    match = _NAME.fullmatch(name)
    return (int(match[2]), int(match[1])) if match else None


def rank_file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def store_rank_file(
    storage: Storage, directory: str, rank: int, local_file: Path, chunks: Iterable[Chunk]
) -> RankFile:
    """Copies a rank's safetensors file into the checkpoint in `directory`; it lasts once this
    returns. Raises `NoSpace` before writing anything, and where the disk fills up meanwhile."""
    need_space(storage, local_file.stat().st_size)
    file = rank_file_name(rank)
    stored = storage.put_file(local_file, f"{directory}/{file}")
    return RankFile(file, stored.size_bytes, stored.sha256, tuple(chunks))
