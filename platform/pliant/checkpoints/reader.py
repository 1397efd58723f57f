"""Finds the newest checkpoint that is whole, and loads fragments from it whatever cut them."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pliant.checkpoints.fragments import Fragment
from pliant.checkpoints.manifest import MANIFEST, Chunk, LedgerFile, Manifest, RankFile
from pliant.checkpoints.writer import age
from pliant.errors import CheckpointMismatch, FilesDamaged
from pliant.storage.local import Storage
from pliant.storage.opening import is_outage, open_storage

log = logging.getLogger(__name__)

_ADVICE = "Give the job another name, or restore the model."
_THREADS = 4
"""Reading and hashing let other threads run, so that files are read side by side."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    storage: Storage
    name: str
    """Its directory in the storage."""
    manifest: Manifest
    passed_over: tuple[str, ...] = ()
    """What is wrong with the newer ones, a sentence each."""

    @property
    def directory(self) -> str:
        """Where it lies, for messages."""
        return self.storage.place(self.name)


def committed(storage: Storage | Path) -> list[str]:
    """Names of our directories with a manifest, the newest first."""
    storage = open_storage(storage)
    ages = {name: age(name) for name in storage.names()}
    ours = [(when, name) for name, when in ages.items() if when is not None]
    return [name for _, name in sorted(ours, reverse=True) if MANIFEST in storage.names(name)]


def newest(
    storage: Storage | Path, ledger: Storage | Path, digests: bool = True
) -> Checkpoint | None:
    """The newest checkpoint whose every file is what was written; damaged ones are passed over and
    named in the log. Raises `FilesDamaged` where there are checkpoints, but none is whole.

    Without `digests` only sizes are compared, which is enough to read a manifest.
    """
    storage = open_storage(storage)
    names = committed(storage)
    damage: list[str] = []
    for name in names:
        try:
            checkpoint = Checkpoint(storage, name, Manifest.read(storage, name), tuple(damage))
            verify(checkpoint, ledger, digests)
        except FilesDamaged as error:
            log.warning("Falling back to an older checkpoint: %s", error)
            damage.append(error.message)
            continue
        return checkpoint
    if names:
        raise FilesDamaged(
            f"None of the {len(names)} checkpoints in {storage.place()} is whole; the log names "
            "the damage. Restore one, or give the job another name to start afresh.",
            path=storage.place(),
        )
    return None


def verify(checkpoint: Checkpoint, ledger: Storage | Path, digests: bool = True) -> None:
    """Raises `FilesDamaged` and names the first file that is missing, short or altered."""
    for damage in _damages(checkpoint, open_storage(ledger), digests):
        raise damage


def damages(checkpoint: Checkpoint, ledger: Storage | Path) -> list[FilesDamaged]:
    """Everything that is missing, short or altered."""
    return list(_damages(checkpoint, open_storage(ledger), True))


def _damages(checkpoint: Checkpoint, ledger: Storage, digests: bool) -> Iterator[FilesDamaged]:
    files = checkpoint.storage.below(checkpoint.name)
    parts: list[tuple[Storage, RankFile | LedgerFile]] = [
        *((files, file) for file in checkpoint.manifest.files),
        *((ledger, entry) for entry in checkpoint.manifest.ledger),
    ]
    with _threads(len(parts)) as pool:
        checked = pool.map(lambda part: _damage(part[0], part[1], digests), parts)
        yield from (damage for damage in checked if damage is not None)


def _damage(storage: Storage, stated: RankFile | LedgerFile, digests: bool) -> FilesDamaged | None:
    try:
        storage.check(stated.file, stated.size_bytes, stated.sha256 if digests else "")
    except FilesDamaged as error:
        return error
    except OSError as error:
        if is_outage(storage, error):
            raise
        place = storage.place(stated.file)
        return FilesDamaged(f"{place} cannot be read: {error.strerror or error}.", path=place)
    return None


def load(checkpoint: Checkpoint, fragments: list[Fragment]) -> None:
    """Fills the fragments' tensors, in place.

    Raises `CheckpointMismatch` where one of them was not saved with that size.
    """
    for fragment in fragments:
        _check_size(checkpoint, fragment.key, fragment.numel)
    wanted = _by_file(fragments, _places(checkpoint))
    paths = _fetched(checkpoint, wanted)
    for file, parts in wanted.items():
        with safe_open(paths[file], framework="pt") as opened:
            for fragment, chunk in parts:
                _copy_overlap(opened.get_slice(chunk.entry), fragment, chunk)


@contextmanager
def whole_tensors(checkpoint: Checkpoint) -> Iterator[Callable[[str], torch.Tensor]]:
    """A function from kind/name to that tensor, 1-D, put together from its fragments; one tensor
    is read at a time. Raises `CheckpointMismatch` for one that was not saved."""
    places = _places(checkpoint)
    with ExitStack() as opened:
        handles: dict[str, Any] = {}

        def handle(file: str) -> Any:
            if file not in handles:
                path = _fetched(checkpoint, [file])[file]
                handles[file] = opened.enter_context(safe_open(path, framework="pt"))
            return handles[file]

        yield partial(_whole, checkpoint, places, handle)


def _whole(
    checkpoint: Checkpoint,
    places: dict[str, list[tuple[str, Chunk]]],
    handle: Callable[[str], Any],
    key: str,
) -> torch.Tensor:
    numel = checkpoint.manifest.tensors.get(key, 0)
    _check_size(checkpoint, key, numel)
    kind, _, name = key.partition("/")
    first = [handle(file).get_slice(chunk.entry)[:1] for file, chunk in places[key][:1]]
    tensor = torch.empty(numel, dtype=first[0].dtype if first else torch.float32)
    fragment = Fragment(kind, name, 0, numel, tensor)  # type: ignore[arg-type]
    for file, found in _by_file([fragment], places).items():
        for _, chunk in found:
            _copy_overlap(handle(file).get_slice(chunk.entry), fragment, chunk)
    return tensor


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
            raise FilesDamaged(
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


def _fetched(checkpoint: Checkpoint, files: Iterable[str]) -> dict[str, Path]:
    """Where on this machine these of its files lie."""
    stated = {file.file: file for file in checkpoint.manifest.files}
    storage, names = checkpoint.storage.below(checkpoint.name), list(files)
    with _threads(len(names)) as pool:
        paths = pool.map(
            lambda name: storage.fetch(name, stated[name].size_bytes, stated[name].sha256), names
        )
        return dict(zip(names, paths, strict=True))


def _threads(num_files: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=min(max(num_files, 1), _THREADS))
