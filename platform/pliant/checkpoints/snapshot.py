"""Snapshots: one rank's state as a safetensors file in memory, which outlives the process.

Taking one is a copy into memory that is already there. The files lie in shared memory, so the next
process on the node reads what a killed one left, with the reader of any other checkpoint:

    ROOT/NODE/attempt-A.ranks-W/rank-00000.json                what does not change in an attempt
                                rank-00000.slot-0.safetensors  the tensors
                                rank-00000.slot-0.json         the record: this slot is whole
                                rank-00000.ledger-0            what was trained, step by step

ROOT is the run's own, and ends with a key that is kept in the run directory: what an earlier run of
that name left is not mistaken for this one's.

A record is removed before its slot is written over and renamed into place afterwards, so a kill at
any moment leaves a slot whole or without a record. Ranks are never more than one snapshot apart,
because every step has a collective: whoever takes snapshot n knows that all have taken n - 1. With
that one kept, some snapshot is always complete over all ranks.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pliant.checkpoints.digests import added, stated
from pliant.checkpoints.manifest import Chunk, LedgerFile, Manifest, RankFile
from pliant.storage.local import SPARE_SHARE, no_space
from pliant.storage.opening import open_storage

log = logging.getLogger(__name__)

Entries = list[tuple[int, NDArray[np.int64]]]
"""(step, the pieces that a rank ran in it), as in `data.ledger`."""

_DIRECTORY = re.compile(r"attempt-(\d+)\.ranks-(\d+)")
_SLOT = re.compile(r"rank-(\d+)\.slot-\d+\.json")


@dataclass(frozen=True)
class Description:
    """What all snapshots of one rank in one attempt have in common."""

    zero_stage: int
    tensors: dict[str, int]
    frozen_digest: str
    identity: dict[str, Any]
    origin: str
    """Directory name of the checkpoint on disk that the attempt's ledger goes on from; "" where it
    goes on from nothing."""


@dataclass(frozen=True)
class Moment:
    """What a record says beside the place: the state that is no tensor."""

    step: int
    progress: dict[str, Any]
    optimizer: dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One rank's snapshot of one step, and where it lies."""

    attempt: int
    world_size: int
    rank: int
    description: Description
    moment: Moment
    file: str
    """Absolute, on the node where it lies; so is `ledger`."""
    size_bytes: int
    chunks: tuple[Chunk, ...]
    ledger: str
    ledger_bytes: int
    digests: dict[str, int]
    """What this rank's fragments add to the digests of some tensors."""
    node: str = ""
    """Whose holder serves it; "" for this node."""

    @property
    def age(self) -> tuple[int, int]:
        """As `writer.age`."""
        return self.attempt, self.moment.step


def parse_ledger(content: bytes) -> Entries:
    """The entries that a `LedgerLog` wrote."""
    words = np.frombuffer(content, dtype="<i8").astype(np.int64)
    entries: Entries = []
    place = 0
    while place < len(words):
        step, count = int(words[place]), int(words[place + 1])
        entries.append((step, words[place + 2 : place + 2 + count]))
        place += 2 + count
    return entries


def attempt_directory(node: Path, attempt: int, world_size: int) -> Path:
    return node / f"attempt-{attempt}.ranks-{world_size}"


def find(roots: Iterable[Path]) -> list[Part]:
    """Every snapshot with a record under these roots; what cannot be read is passed over."""
    parts = []
    for root in roots:
        for record in root.glob("*/attempt-*/rank-*.slot-*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                parts.append(read_part(record))
    return parts


def read_part(record: Path) -> Part:
    directory, slot = _DIRECTORY.fullmatch(record.parent.name), _SLOT.fullmatch(record.name)
    if directory is None or slot is None:
        raise ValueError(f"{record} is not the record of a snapshot")
    rank = int(slot[1])
    common = json.loads((record.parent / f"rank-{rank:05d}.json").read_bytes())
    body = json.loads(record.read_bytes())
    size_bytes, chunks = common.pop("size_bytes"), common.pop("chunks")
    ledger, ledger_bytes = record.parent / body.pop("ledger"), body.pop("ledger_bytes")
    digests = body.pop("digests")
    file = record.with_suffix(".safetensors")
    if file.stat().st_size != size_bytes or ledger.stat().st_size < ledger_bytes:
        raise ValueError(f"{file} or {ledger} is short")
    return Part(
        attempt=int(directory[1]),
        world_size=int(directory[2]),
        rank=rank,
        description=Description(**common),
        moment=Moment(**body),
        file=str(file),
        size_bytes=size_bytes,
        chunks=tuple(Chunk(**chunk) for chunk in chunks),
        ledger=str(ledger),
        ledger_bytes=ledger_bytes,
        digests=digests,
    )


class Copies:
    """What a node keeps of the snapshots of another one's ranks: the newest whole one of each, and
    the one that is coming in."""

    def __init__(self, node: Path) -> None:
        self._node = node

    def write(self, part: Part, offset: int, block: "NDArray[np.uint8]") -> None:
        """Some bytes of a part's file. Raises `OSError` where memory has no room for it."""
        path = self._path(part)
        if offset == 0:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            record_of(path).unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if offset == 0:
                os.posix_fallocate(descriptor, 0, part.size_bytes)
            os.pwrite(descriptor, block.data, offset)
        finally:
            os.close(descriptor)

    def finish(self, part: Part, ledger: bytes) -> None:
        """All bytes are here: the copy counts, and the one before gives up its place."""
        path = self._path(part)
        log_path = path.with_suffix(".ledger")
        log_path.write_bytes(ledger)
        write_description(path.parent, part.rank, part.description, part.size_bytes, part.chunks)
        write_record(record_of(path), part.moment, log_path.name, len(ledger), part.digests)

    def remove_before(self, attempt: int) -> None:
        remove_before(self._node.parent, attempt, self._node.name)

    def _path(self, part: Part) -> Path:
        """The older of two places; its record went when this copy was begun."""
        directory = attempt_directory(self._node, part.attempt, part.world_size)
        places = [
            directory / f"rank-{part.rank:05d}.slot-{number}.safetensors" for number in range(2)
        ]
        return min(places, key=_step_in)


def _step_in(file: Path) -> int:
    """Of the snapshot in the file; -1 where it is not whole."""
    record = record_of(file)
    return int(json.loads(record.read_bytes())["step"]) if record.exists() else -1


@dataclass(frozen=True)
class Hot:
    """A snapshot that is complete over all ranks of its group."""

    parts: tuple[Part, ...]
    """By rank."""

    @property
    def age(self) -> tuple[int, int]:
        return self.parts[0].age

    @property
    def origin(self) -> str:
        return self.parts[0].description.origin

    def __str__(self) -> str:
        attempt, step = self.age
        return f"the snapshot of step {step} by {len(self.parts)} ranks in attempt {attempt}"

    def manifest(self, files: dict[int, str], ledger: tuple[LedgerFile, ...]) -> Manifest:
        """Where the parts lie in `files`; ranks that are not in it are not to be read from."""
        first = self.parts[0]
        common, moment = first.description, first.moment
        return Manifest(
            step=moment.step,
            attempt=first.attempt,
            world_size=first.world_size,
            zero_stage=common.zero_stage,
            epoch=moment.progress["epoch"],
            pack=moment.progress["pack"],
            tensors=common.tensors,
            frozen_digest=common.frozen_digest,
            identity=common.identity,
            optimizer=moment.optimizer,
            progress=moment.progress,
            digests=stated(added(part.digests for part in self.parts)),
            files=tuple(
                RankFile(files[part.rank], part.size_bytes, "", part.chunks)
                for part in self.parts
                if part.rank in files
            ),
            ledger=ledger,
        )


def complete(parts: Iterable[Part]) -> list[Hot]:
    """Snapshots of which every rank's part is there, the newest first."""
    groups: dict[tuple[int, int, int], dict[int, Part]] = defaultdict(dict)
    for part in parts:
        ranks = groups[(*part.age, part.world_size)]
        ranks.setdefault(part.rank, part)
    return [
        Hot(tuple(ranks[rank] for rank in range(world_size)))
        for (_, _, world_size), ranks in sorted(groups.items(), reverse=True)
        if len(ranks) == world_size
    ]


def forget(roots: Iterable[Path], kept: tuple[int, int] | None, before: int | None = None) -> None:
    """Takes the records from all snapshots here but those of one (attempt, step): they belong to a
    past that did not last. Every rank may call it, once all have restored; who may come late says
    `before` which attempt."""
    for part in find(roots):
        if part.age != kept and (before is None or part.attempt < before):
            record_of(part.file).unlink(missing_ok=True)


def remove_before(root: Path, attempt: int, node: str = "*") -> None:
    """Removes what earlier attempts left on this machine, or for one node."""
    for directory in directories_of(root, node):
        if attempt_of(directory) < attempt:
            shutil.rmtree(directory, ignore_errors=True)


def record_of(file: str | Path) -> Path:
    return Path(file).with_suffix(".json")


def directories_of(root: Path, node: str = "*") -> list[Path]:
    return [path for path in root.glob(f"{node}/attempt-*") if _DIRECTORY.fullmatch(path.name)]


def attempt_of(directory: Path) -> int:
    match = _DIRECTORY.fullmatch(directory.name)
    assert match is not None
    return int(match[1])


def write_description(
    directory: Path, rank: int, description: Description, size_bytes: int, chunks: tuple[Chunk, ...]
) -> None:
    body = asdict(description)
    body["size_bytes"], body["chunks"] = size_bytes, [asdict(chunk) for chunk in chunks]
    _write(directory / f"rank-{rank:05d}.json", body)


def write_record(
    path: Path, moment: Moment, ledger: str, ledger_bytes: int, digests: Mapping[str, int]
) -> None:
    facts = {"ledger": ledger, "ledger_bytes": ledger_bytes, "digests": dict(digests)}
    _write(path, asdict(moment) | facts)


def _write(path: Path, body: dict[str, Any]) -> None:
    """Atomic, but not synced: what lies in memory does not outlive the machine anyway."""
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(json.dumps(body, separators=(",", ":")))
    unfinished.replace(path)


@dataclass(frozen=True)
class Roots:
    """Where the snapshots of a run lie on every machine: in shared memory, or in the temporary
    directory where that has no room."""

    name: str

    @staticmethod
    def of(run_dir: Path, key: str) -> "Roots":
        return Roots(f"{_prefix(run_dir)}{key}")

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(base / self.name for base in _bases())

    def remove(self) -> None:
        """All snapshots of the run on this machine."""
        for path in self.paths:
            shutil.rmtree(path, ignore_errors=True)

    def choose(self, needed_bytes: int) -> Path:
        """The first with room for so much. Raises `NoSpace` where there is none."""
        for path in self.paths:
            if shutil.disk_usage(path.parent).free > needed_bytes * SPARE_SHARE:
                if path != self.paths[0]:
                    log.warning(
                        "Snapshots are kept in %s, which is slower: %s has no room for %.1f MiB.",
                        path.parent,
                        self.paths[0].parent,
                        needed_bytes / 2**20,
                    )
                return path
        raise no_space(open_storage(self.paths[-1].parent), needed_bytes)


def remove(run_dir: Path, but: Roots | None = None) -> None:
    """Removes from this machine whatever snapshots runs of that directory left, but for one's."""
    for base in _bases():
        for path in base.glob(f"{_prefix(run_dir)}*"):
            if but is None or path.name != but.name:
                shutil.rmtree(path, ignore_errors=True)


def _prefix(run_dir: Path) -> str:
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()
    return f"pliant-{os.getuid()}-{digest[:16]}-"


def _bases() -> list[Path]:
    shared, temporary = Path("/dev/shm"), Path(tempfile.gettempdir())
    return [shared, temporary] if shared.is_dir() else [temporary]
