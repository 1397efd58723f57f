"""Finds the newest checkpoint that is whole, and loads fragments from it whatever cut them."""

import logging
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from pliant.checkpoints.fragments import Fragment
from pliant.checkpoints.manifest import MANIFEST, Chunk, LedgerFile, Manifest, RankFile, file_digest
from pliant.checkpoints.writer import age
from pliant.errors import CheckpointDamaged, CheckpointMismatch

log = logging.getLogger(__name__)

_ADVICE = "Give the job another name, or restore the model."


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    directory: Path
    manifest: Manifest


def committed(root: Path) -> list[Path]:
    """Directories of ours with a manifest, the newest first."""
    if not root.is_dir():
        return []
    ages = {path.parent: age(path.parent) for path in root.glob(f"*/{MANIFEST}")}
    found = [(when, path) for path, when in ages.items() if when is not None]
    return [path for _, path in sorted(found, reverse=True)]


def newest(root: Path, ledger_root: Path) -> Checkpoint | None:
    """The newest checkpoint whose every file is what was written; damaged ones are passed over and
    named in the log. Raises `CheckpointDamaged` where there are checkpoints, but none is whole."""
    directories = committed(root)
    for directory in directories:
        try:
            checkpoint = Checkpoint(directory, Manifest.read(directory))
            verify(checkpoint, ledger_root)
        except CheckpointDamaged as error:
            log.warning("Falling back to an older checkpoint: %s", error)
            continue
        return checkpoint
    if directories:
        raise CheckpointDamaged(
            f"None of the {len(directories)} checkpoints in {root} is whole; the log names the "
            "damage. Restore one, or give the job another name to start afresh.",
            path=str(root),
        )
    return None


def verify(checkpoint: Checkpoint, ledger_root: Path) -> None:
    """Raises `CheckpointDamaged` and names the first file that is missing, short or altered."""
    for file in checkpoint.manifest.files:
        _verify_file(checkpoint.directory / file.file, file)
    for entry in checkpoint.manifest.ledger:
        _verify_file(ledger_root / entry.file, entry)


def load(checkpoint: Checkpoint, fragments: list[Fragment]) -> None:
    """Fills the fragments' tensors, in place.

    Raises `CheckpointMismatch` where one of them was not saved with that size.
    """
    for fragment in fragments:
        _check_size(checkpoint, fragment.key, fragment.numel)
    places = _places(checkpoint)
    for path, parts in _by_file(fragments, places).items():
        with safe_open(checkpoint.directory / path, framework="pt") as file:
            for fragment, chunk in parts:
                _copy_overlap(file.get_slice(chunk.entry), fragment, chunk)


def check_tensors(checkpoint: Checkpoint, wanted: dict[str, int]) -> None:
    """Raises `CheckpointMismatch` unless exactly the tensors of `wanted` were saved."""
    for key, numel in wanted.items():
        _check_size(checkpoint, key, numel)
    for key in sorted(checkpoint.manifest.tensors.keys() - wanted.keys()):
        raise CheckpointMismatch(
            f"{checkpoint.directory} is of another model: it has {key}, which this model has not. "
            f"{_ADVICE}",
            key=key,
        )


def _check_size(checkpoint: Checkpoint, key: str, numel: int) -> None:
    saved = checkpoint.manifest.tensors.get(key)
    if saved != numel:
        found = "nowhere" if saved is None else f"with {saved:,} elements"
        raise CheckpointMismatch(
            f"{checkpoint.directory} is of another model: it has {key} {found}, and this model has "
            f"it with {numel:,}. {_ADVICE}",
            key=key,
        )


def _places(checkpoint: Checkpoint) -> dict[str, list[tuple[str, Chunk]]]:
    """For each tensor the files and chunks that hold it, in the order of its elements."""
    places: dict[str, list[tuple[str, Chunk]]] = defaultdict(list)
    for file in checkpoint.manifest.files:
        for chunk in file.chunks:
            places[chunk.key].append((file.file, chunk))
    for found in places.values():
        found.sort(key=lambda place: place[1].start)
    return places


def _by_file(
    fragments: list[Fragment], places: dict[str, list[tuple[str, Chunk]]]
) -> dict[str, list[tuple[Fragment, Chunk]]]:
    """The chunks that overlap each fragment, sorted by the file they lie in."""
    files: dict[str, list[tuple[Fragment, Chunk]]] = defaultdict(list)
    for fragment in fragments:
        covered, end = 0, 0
        for path, chunk in places[fragment.key]:
            low, high = _overlap(fragment, chunk)
            if low < high:
                files[path].append((fragment, chunk))
                covered += max(high - max(low, end), 0)
                end = max(high, end)
        if covered != fragment.tensor.numel():
            raise CheckpointDamaged(
                f"The files hold {covered:,} of the {fragment.tensor.numel():,} elements needed of "
                f"{fragment.key}.",
                key=fragment.key,
            )
    return files


def _overlap(fragment: Fragment, chunk: Chunk) -> tuple[int, int]:
    low = max(fragment.start, chunk.start)
    high = min(fragment.start + fragment.tensor.numel(), chunk.start + chunk.length)
    return low, high


def _copy_overlap(saved: "torch.Tensor", fragment: Fragment, chunk: Chunk) -> None:
    low, high = _overlap(fragment, chunk)
    part = saved[low - chunk.start : high - chunk.start]
    fragment.tensor[low - fragment.start : high - fragment.start].copy_(part)


def _verify_file(path: Path, stated: RankFile | LedgerFile) -> None:
    if not path.is_file():
        raise CheckpointDamaged(f"{path} is missing.", path=str(path))
    size = path.stat().st_size
    if size != stated.size_bytes:
        raise CheckpointDamaged(
            f"{path} has {size:,} bytes instead of {stated.size_bytes:,}.", path=str(path)
        )
    if file_digest(path) != stated.sha256:
        raise CheckpointDamaged(f"{path} was altered since it was written.", path=str(path))
