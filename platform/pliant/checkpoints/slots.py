"""Memory that a rank copies its state into, a safetensors file each; what lies where is told in
`snapshot`."""

import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pliant.checkpoints import safetensors_format
from pliant.checkpoints.digests import chosen, partial_digests
from pliant.checkpoints.fragments import Fragment
from pliant.checkpoints.manifest import Chunk
from pliant.checkpoints.snapshot import (
    Description,
    Entries,
    Moment,
    attempt_directory,
    attempt_of,
    directories_of,
    record_of,
    write_description,
    write_record,
)

MOST_SLOTS = 5
"""Two take turns; others are pinned: what is being written to disk, what is being sent to another
node, and what was sent last. They are made when they are first needed."""


@dataclass(frozen=True)
class Layout:
    """Where the fragments of one rank lie in its file."""

    chunks: tuple[Chunk, ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    """Of each chunk's first byte in the file."""
    header: bytes
    size_bytes: int
    """Of the whole file."""


def owned(fragments: Iterable[Fragment]) -> list[Fragment]:
    """What this rank saves, in the order of its file: wide elements first, which keeps every
    chunk aligned."""
    mine = [f for f in fragments if f.is_owner and f.tensor.numel()]
    return sorted(mine, key=lambda f: -f.tensor.element_size())


def lay_out(fragments: Sequence[Fragment]) -> Layout:
    """A safetensors file of these fragments, which `owned` has put in order."""
    chunks = tuple(Chunk(f.key, f.start, f.tensor.numel()) for f in fragments)
    entries: dict[str, Any] = {}
    ends = [0]
    for chunk, fragment in zip(chunks, fragments, strict=True):
        ends.append(ends[-1] + fragment.tensor.nbytes)
        dtype = fragment.tensor.dtype
        entries[chunk.entry] = safetensors_format.entry(dtype, [chunk.length], *ends[-2:])
    if not entries:
        entries["nothing"] = safetensors_format.entry(torch.float32, [0], 0, 0)
    header = safetensors_format.head(entries)
    return Layout(
        chunks=chunks,
        dtypes=tuple(f.tensor.dtype for f in fragments),
        offsets=tuple(len(header) + end for end in ends[:-1]),
        header=header,
        size_bytes=len(header) + ends[-1],
    )


class Slot:
    """A file of this layout, mapped into memory."""

    def __init__(self, path: Path, layout: Layout) -> None:
        """Raises `OSError` where the memory or disk has no room for it."""
        self.path = path
        self.step = -1
        """Of the snapshot in it; -1 where there is none."""
        self.pins = 0
        """How many still read from it."""
        self.digests: dict[str, int] | None = None
        """Once they were computed."""
        self.record.unlink(missing_ok=True)
        self._memory = _mapped(path, layout.size_bytes)
        self._memory[: len(layout.header)] = layout.header
        self.views = [
            torch.frombuffer(self._memory, dtype=dtype, count=chunk.length, offset=offset)
            for chunk, dtype, offset in zip(
                layout.chunks, layout.dtypes, layout.offsets, strict=True
            )
        ]

    @property
    def record(self) -> Path:
        return record_of(self.path)

    def fill(self, fragments: Sequence[Fragment], step: int) -> None:
        self.step, self.digests = -1, None
        self.record.unlink(missing_ok=True)
        for view, fragment in zip(self.views, fragments, strict=True):
            view.copy_(fragment.tensor)
        self.step = step

    def close(self) -> None:
        """Unmaps the file and leaves it where it is."""
        self.views.clear()
        with suppress(BufferError):  # somebody still holds a view; the memory goes with it
            self._memory.close()


def _mapped(path: Path, size_bytes: int) -> mmap.mmap:
    """The file's pages are taken now: a store into a page that memory has no room for would kill
    the process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        os.truncate(descriptor, size_bytes)
        return mmap.mmap(descriptor, size_bytes)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


class LedgerLog:
    """The entries since the last checkpoint on disk, in files that only grow.

    A record names a file and its length at that time. After a checkpoint a new file begins; the
    one before stays, since an older record may name it.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._number = 0
        self.size_bytes = 0
        self._file = self.path.open("wb", buffering=0)

    @property
    def path(self) -> Path:
        return self._directory / f"rank-{self._rank:05d}.ledger-{self._number}"

    def append(self, entries: Entries) -> None:
        content = b"".join(
            np.array([step, len(ids), *ids], dtype="<i8").tobytes() for step, ids in entries
        )
        view = memoryview(content)
        while view:  # where room runs out, a part may be written
            view = view[self._file.write(view) :]
        self.size_bytes += len(content)

    def restart(self, entries: Entries) -> None:
        """A new file that begins with `entries`."""
        before = self._number - 1
        self._file.close()
        if before >= 0:
            self.path.with_name(f"rank-{self._rank:05d}.ledger-{before}").unlink(missing_ok=True)
        self._number += 1
        self._file = self.path.open("wb", buffering=0)
        self.size_bytes = 0
        self.append(entries)

    def close(self) -> None:
        self._file.close()


class Slots:
    """The snapshots of one rank in one attempt."""

    def __init__(
        self,
        root: Path,
        node: str,
        attempt: int,
        rank: int,
        world_size: int,
        layout: Layout,
        keeps_latest: bool = True,
    ) -> None:
        """Unless `keeps_latest`, snapshots are only on their way to the disk: one slot will do."""
        self.directory = attempt_directory(root / node, attempt, world_size)
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.layout = layout
        self.waits = 0
        """How often no slot was free."""
        self._rank = rank
        self._keeps_latest = keeps_latest
        self._slots: list[Slot] = []
        self._latest: Slot | None = None
        self._tensors: dict[str, int] = {}
        self._changed = threading.Condition()
        self.replaces_earlier = False
        """Whether a snapshot of this attempt is safe: those of earlier ones may be written over."""
        self._recyclable = _recyclable(root, attempt, rank, layout.size_bytes)
        self.ledger = LedgerLog(self.directory, rank)

    def describe(self, description: Description) -> None:
        """Once, before the first record."""
        self._tensors = description.tensors
        size_bytes, chunks = self.layout.size_bytes, self.layout.chunks
        write_description(self.directory, self._rank, description, size_bytes, chunks)

    def take(self, fragments: Sequence[Fragment], step: int) -> Slot:
        """Copies the fragments; waits where every slot is pinned. Raises `OSError` where a slot is
        still to be made and there is no room."""
        with self._changed:
            slot = self._free()
            slot.pins = 1
        slot.fill(fragments, step)
        with self._changed:
            slot.pins -= 1
            self._latest = slot
        return slot

    def record(self, slot: Slot, moment: Moment) -> None:
        """From now on the slot counts. The record has digests of some tensors, by which state that
        was put together from it is checked."""
        ledger = self.ledger
        write_record(slot.record, moment, ledger.path.name, ledger.size_bytes, self.digests(slot))

    def digests(self, slot: Slot) -> dict[str, int]:
        """What this rank adds to the digests of the tensors that are chosen for the slot's step."""
        if slot.digests is None:
            parts = [
                Fragment(*_kind_and_name(chunk.key), chunk.start, 0, view)
                for chunk, view in zip(self.layout.chunks, list(slot.views), strict=False)
            ]
            slot.digests = partial_digests(parts, chosen(self._tensors, slot.step))
        return slot.digests

    @property
    def latest(self) -> Slot | None:
        """The newest snapshot."""
        return self._latest

    @property
    def num_made(self) -> int:
        return len(self._slots)

    def pin(self, slot: Slot) -> None:
        with self._changed:
            slot.pins += 1

    def release(self, slot: Slot) -> None:
        with self._changed:
            slot.pins -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Unmaps; the files stay for whoever comes next, if they may be restored from."""
        self.ledger.close()
        for slot in self._slots:
            slot.close()
        self._slots.clear()
        if not self._keeps_latest:
            for path in self.directory.glob(f"rank-{self._rank:05d}.*"):
                path.unlink(missing_ok=True)
            for directory in (self.directory, *self.directory.parents[:2]):
                with suppress(OSError):  # another rank's files are in it
                    directory.rmdir()

    def _free(self) -> Slot:
        """Not the latest: it may be the only one that is complete over all ranks."""
        while True:
            for slot in self._slots:
                if not slot.pins and not (self._keeps_latest and slot is self._latest):
                    return slot
            if len(self._slots) < MOST_SLOTS:
                return self._make()
            self.waits += 1
            self._changed.wait()

    def _make(self) -> Slot:
        path = self.directory / f"rank-{self._rank:05d}.slot-{len(self._slots)}.safetensors"
        # Fresh pages cost far more than a copy; those of an attempt that is over are here. One
        # with a record may be all that there is to go back to.
        if self._recyclable and (self.replaces_earlier or not self._recyclable[0][0]):
            _, before = self._recyclable.pop(0)
            before.with_suffix(".json").unlink(missing_ok=True)
            with suppress(OSError):
                before.replace(path)
        slot = Slot(path, self.layout)
        self._slots.append(slot)
        return slot


def _recyclable(root: Path, attempt: int, rank: int, size_bytes: int) -> list[tuple[bool, Path]]:
    """Files of earlier attempts that fit, and whether each has a record; those come last."""
    return sorted(
        (path.with_suffix(".json").exists(), path)
        for directory in directories_of(root)
        if attempt_of(directory) < attempt
        for path in directory.glob(f"rank-{rank:05d}.slot-*.safetensors")
        if path.stat().st_size == size_bytes
    )


def _kind_and_name(key: str) -> tuple[Any, str]:
    kind, _, name = key.partition("/")
    return kind, name
