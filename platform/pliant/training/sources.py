"""What a run can go on from: checkpoints in the storage and snapshots in memory."""

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pliant.checkpoints import reader, snapshot
from pliant.checkpoints.fragments import Fragment
from pliant.checkpoints.manifest import Manifest
from pliant.checkpoints.places import Places
from pliant.checkpoints.reader import Checkpoint
from pliant.checkpoints.snapshot import Hot, Part, Roots
from pliant.checkpoints.writer import age
from pliant.data.ledger import Entries
from pliant.errors import FilesDamaged
from pliant.storage.local import LocalStorage
from pliant.training import holders
from pliant.training.commit import Base

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """A checkpoint, or else a snapshot with the checkpoint that its ledger continues."""

    base: Base
    checkpoint: Checkpoint | None = None
    hot: Hot | None = None

    def __str__(self) -> str:
        return str(self.hot or (self.checkpoint and self.checkpoint.directory))


def snapshots(job: str, roots: Roots) -> list[Hot]:
    """The complete ones that this node and the job's holders know of, the newest first."""
    here = [replace(part, node=holders.own_node()) for part in snapshot.find(roots.paths)]
    return snapshot.complete(here + holders.parts_elsewhere(job))


def candidates(places: Places, hots: Sequence[Hot], damage: list[str]) -> Iterator[Source]:
    """Whatever is whole, the newest first; what is not is told in the log and added to `damage`.

    Raises `FilesDamaged` at the end where there are checkpoints, but none is whole.
    """
    names = reader.committed(places.checkpoints)
    # Of equal age, the snapshot comes first: it need not be read to be verified.
    ages = [(*hot.age, 1) for hot in hots] + [(*_age(name), 0) for name in names]
    found_by_age: list[str | Hot] = [*hots, *names]
    ordered = sorted(range(len(ages)), key=lambda place: ages[place], reverse=True)
    any_whole = False
    for place in ordered:
        found = found_by_age[place]
        try:
            yield _source(places, names, found)
            any_whole |= isinstance(found, str)
        except FilesDamaged as error:
            damage.append(error.message)
            log.warning("Falling back to an older state: %s", error)
    if names and not any_whole:
        root = places.checkpoints.place()
        raise FilesDamaged(
            f"None of the {len(names)} checkpoints in {root} is whole; the log names the damage. "
            "Restore one, or give the job another name to start afresh.",
            path=root,
        )


def _source(places: Places, names: list[str], found: str | Hot) -> Source:
    if isinstance(found, Hot):
        return Source(_base(places, names, found), hot=found)
    checkpoint = Checkpoint(places.checkpoints, found, Manifest.read(places.checkpoints, found))
    reader.verify(checkpoint, places.ledger)
    manifest = checkpoint.manifest
    return Source(Base(manifest.step, found, manifest.ledger), checkpoint=checkpoint)


def _base(places: Places, names: list[str], hot: Hot) -> Base:
    """The newest checkpoint of the snapshot's past whose ledger is whole: one of its own attempt,
    else the one that attempt went on from."""
    attempt, step = hot.age
    own = [name for name in names if _age(name)[0] == attempt and _age(name)[1] <= step]
    for name in [*own, hot.origin]:
        if not name:
            return Base()
        with suppress(FilesDamaged):
            manifest = Manifest.read(places.checkpoints, name)
            for entry in manifest.ledger:
                places.ledger.check(entry.file, entry.size_bytes, entry.sha256)
            return Base(manifest.step, name, manifest.ledger)
    raise FilesDamaged(f"{hot} cannot be used: the ledger before it is not whole.", path=hot.origin)


def _age(name: str) -> tuple[int, int]:
    when = age(name)
    assert when is not None  # `committed` names no others
    return when


class HotFiles:
    """The files of a snapshot, as one rank gets at them: here, or fetched from another node."""

    def __init__(self, job: str, roots: Roots, hot: Hot) -> None:
        self._job = job
        self._roots = roots
        self._hot = hot
        self._folder = roots.paths[0] / holders.own_node() / "fetched"
        world_size = len(hot.parts)
        self._here = {
            part.rank: part
            for part in snapshot.find(roots.paths)
            if part.age == hot.age and part.world_size == world_size
        }

    def checkpoint(self, fragments: list[Fragment], base: Base) -> Checkpoint:
        """The snapshot as far as these fragments need it. Raises `OSError` where a node that has
        some of it does not answer."""
        files = {
            part.rank: self._here[part.rank].file
            if part.rank in self._here
            else self._fetched(part.node, part.file, part.size_bytes)
            for part in self._hot.parts
            if _overlaps(part, fragments)
        }
        # The names of its files are absolute, so that they may lie in several places.
        storage = LocalStorage(self._roots.paths[0])
        return Checkpoint(storage, "", self._hot.manifest(files, base.ledger))

    def entries(self, rank: int, world_size: int, base: Base) -> Entries:
        """What the snapshot's ranks had trained since the base, for this one of the new ranks."""
        entries: Entries = []
        for part in self._hot.parts[rank::world_size]:
            path = (
                self._here[part.rank].ledger
                if part.rank in self._here
                else self._fetched(part.node, part.ledger, part.ledger_bytes)
            )
            entries += snapshot.parse_ledger(Path(path).read_bytes()[: part.ledger_bytes])
        step = self._hot.age[1]
        return sorted(
            (entry for entry in entries if base.step <= entry[0] < step), key=lambda e: e[0]
        )

    def close(self) -> None:
        """Once every rank has read what it needs."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _fetched(self, node: str, path: str, size_bytes: int) -> str:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return str(holders.fetch(self._job, node, path, size_bytes, self._folder))


def _overlaps(part: Part, fragments: list[Fragment]) -> bool:
    wanted: dict[str, list[Fragment]] = {}
    for fragment in fragments:
        wanted.setdefault(fragment.key, []).append(fragment)
    return any(
        max(chunk.start, fragment.start)
        < min(chunk.start + chunk.length, fragment.start + fragment.tensor.numel())
        for chunk in part.chunks
        for fragment in wanted.get(chunk.key, [])
    )
