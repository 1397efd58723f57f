"""What a storage can do, and the one that is a directory.

A storage is a directory that all nodes share, or a bucket of an object store (`remote`). Both do
the same things under names such as `step-00000005.attempt-1.ranks-2/manifest.json`. A storage is a
value: it can be pickled, and a worker opens it for itself (`opening`).
"""

import errno
import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pliant.errors import FilesDamaged, NoSpace
from pliant.files import replacing, sync_to_disk, write_atomically

SPARE_SHARE = 1.05
CHUNK_BYTES = 4 * 2**20

FULL = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a disk, or a quota, that has no room left."""


@dataclass(frozen=True)
class StoredFile:
    """A file as it was written."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class FileInfo:
    """What can be said of a file without reading it."""

    size_bytes: int
    modified: float | None
    """Seconds since 1970; None where the file system does not say."""


@runtime_checkable
class Storage(Protocol):
    """Files under names with slashes, below one place. A full disk raises `NoSpace`, everything
    else that goes wrong an `OSError`."""

    def place(self, name: str = "") -> str:
        """A path or URI for messages."""

    def below(self, name: str) -> "Storage":
        """The storage of what lies in the directory `name`."""

    def names(self, directory: str = "") -> list[str]:
        """Of the files and directories in `directory`, sorted; none where it does not exist."""

    def info(self, name: str) -> FileInfo | None:
        """None where there is no file of that name."""

    def read(self, name: str) -> bytes:
        """The whole of a small file."""

    def write(self, name: str, content: bytes) -> None:
        """Replaces a small file: whole and lasting once this returns, unchanged otherwise."""

    def put_file(self, local: Path, name: str) -> StoredFile:
        """Copies a file of this machine there, chunk by chunk; its digest is taken on the way."""

    def fetch(self, name: str, size_bytes: int, sha256: str) -> Path:
        """A path on this machine with the file's content. Raises `FilesDamaged` where what
        was downloaded is not what was stated; what lies here already is not read again."""

    def workspace(self, name: str) -> Path:
        """A directory of this machine for what belongs to the directory `name` and can be had
        again; a storage that is a directory has it right there."""

    def check(self, name: str, size_bytes: int, sha256: str) -> None:
        """Reads the file where it is stored. Raises `FilesDamaged` where it is missing, short
        or altered. An empty `sha256` is not compared."""

    def delete(self, name: str) -> None:
        """Removes a file, if it is there."""

    def delete_tree(self, name: str) -> None:
        """Removes a directory and what is in it, if it is there."""

    def free_bytes(self) -> int | None:
        """None where there is no limit to be known."""


def no_space(storage: Storage, size_bytes: int) -> NoSpace:
    free = storage.free_bytes() or 0
    return NoSpace(
        f"{storage.place()} has {free / 2**20:,.1f} MiB free and needs "
        f"{size_bytes * SPARE_SHARE / 2**20:,.1f} MiB. Free some space, or keep "
        "it elsewhere (--runs-dir, checkpoint.storage, data.store).",
        free_bytes=free,
        needed_bytes=size_bytes,
    )


@dataclass(frozen=True)
class LocalStorage:
    """A directory of this machine, or one that several machines share."""

    root: Path

    def place(self, name: str = "") -> str:
        return str(self.root / name)

    def below(self, name: str) -> Storage:
        return LocalStorage(self.root / name)

    def names(self, directory: str = "") -> list[str]:
        folder = self.root / directory
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def info(self, name: str) -> FileInfo | None:
        path = self.root / name
        if not path.is_file():
            return None
        status = path.stat()
        return FileInfo(status.st_size, status.st_mtime)

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        path = self.root / name
        with full_disk_told(self, len(content)):
            write_atomically(path, content)
            sync_to_disk(path.parent.parent)  # where the directory itself is entered

    def put_file(self, local: Path, name: str) -> StoredFile:
        needed = local.stat().st_size
        with (
            full_disk_told(self, needed),
            local.open("rb") as source,
            replacing(self.root / name) as target,
        ):
            return copy_and_digest(source, target)

    def fetch(self, name: str, size_bytes: int, sha256: str) -> Path:
        return self.root / name

    def workspace(self, name: str) -> Path:
        return self.root / name

    def check(self, name: str, size_bytes: int, sha256: str) -> None:
        check_size(self, name, size_bytes)
        if sha256 and file_digest(self.root / name) != sha256:
            raise altered(self, name)

    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def delete_tree(self, name: str) -> None:
        if (self.root / name).is_dir():
            shutil.rmtree(self.root / name)

    def free_bytes(self) -> int | None:
        there = next(path for path in (self.root, *self.root.parents) if path.exists())
        return shutil.disk_usage(there).free


def copy_and_digest(source: Any, target: Any) -> StoredFile:
    """Chunk by chunk, through one buffer; reading, hashing and writing let other threads run."""
    digest, size_bytes = hashlib.sha256(), 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while count := source.readinto(buffer):
        digest.update(buffer[:count])
        target.write(buffer[:count])
        size_bytes += count
    return StoredFile(size_bytes, digest.hexdigest())


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def full_disk_told(storage: Storage, size_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise no_space(storage, size_bytes) from None
        raise


def check_size(storage: Storage, name: str, size_bytes: int) -> None:
    found = storage.info(name)
    if found is None:
        raise missing(storage, name)
    if found.size_bytes != size_bytes:
        place = storage.place(name)
        raise FilesDamaged(
            f"{place} has {found.size_bytes:,} bytes instead of {size_bytes:,}.", path=place
        )


def missing(storage: Storage, name: str) -> FilesDamaged:
    place = storage.place(name)
    return FilesDamaged(f"{place} is missing.", path=place)


def altered(storage: Storage, name: str) -> FilesDamaged:
    place = storage.place(name)
    return FilesDamaged(f"{place} was altered since it was written.", path=place)
