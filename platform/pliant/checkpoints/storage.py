"""Where checkpoints lie: a directory that all nodes share, or a bucket of an object store.

Both forms do the same things under names such as `step-00000005.attempt-1.ranks-2/manifest.json`.
A storage is a value: it can be pickled, and a worker opens it for itself. Credentials come from the
environment, as the file system's own library reads them.
"""

import errno
import functools
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable
from urllib.parse import urlsplit
from urllib.request import url2pathname

from pliant.errors import CheckpointDamaged, NoSpace, UserError
from pliant.files import file_lock, replacing, sync_to_disk, write_atomically

log = logging.getLogger(__name__)

T = TypeVar("T")

SPARE_SHARE = 1.05
CHUNK_BYTES = 4 * 2**20
CACHE_BYTES = 64 * 2**30
IN_USE_S = 600.0
"""A cached file that was asked for within this time is not removed to make room."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


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
        """A path on this machine with the file's content. Raises `CheckpointDamaged` where what
        was downloaded is not what was stated; what lies here already is not read again."""

    def check(self, name: str, size_bytes: int, sha256: str) -> None:
        """Reads the file where it is stored. Raises `CheckpointDamaged` where it is missing, short
        or altered. An empty `sha256` is not compared."""

    def delete(self, name: str) -> None:
        """Removes a file, if it is there."""

    def delete_tree(self, name: str) -> None:
        """Removes a directory and what is in it, if it is there."""

    def free_bytes(self) -> int | None:
        """None where there is no limit to be known."""


def open_storage(place: "str | Path | Storage") -> Storage:
    """The storage at a path or URI: `s3://bucket/prefix`, `gs://...`, `file:///...`, or another
    name of pyarrow's or fsspec's. Nothing is read yet."""
    if isinstance(place, Storage):
        return place
    if isinstance(place, Path) or "://" not in place:
        return LocalStorage(Path(place))
    if place.startswith("file://"):
        return LocalStorage(Path(url2pathname(urlsplit(place).path)))
    return RemoteStorage(place)


@dataclass(frozen=True)
class Places:
    """Where one job's checkpoints and ledger files lie."""

    checkpoints: Storage
    ledger: Storage


def places_of(run_dir: Path, storage: str | None) -> Places:
    """In the run directory, or below `storage` (the spec's `checkpoint.storage`) in a directory
    that is named for the run."""
    root = open_storage(run_dir) if storage is None else open_storage(storage).below(run_dir.name)
    return Places(root.below("checkpoints"), root.below("ledger"))


def check_usable(storage: Storage) -> None:
    """Raises `UserError` where nothing can be written, before a job is started that would find out
    at its first checkpoint."""
    try:
        storage.write(".probe", b"pliant")
        storage.delete(".probe")
    except OSError as error:
        raise UserError(
            f"{storage.place()} cannot be written: {error}. Checkpoints are kept there; check "
            "checkpoint.storage, or --runs-dir, and the credentials in the environment.",
            place=storage.place(),
        ) from None


def need_space(place: Storage | Path, size_bytes: int) -> None:
    """Raises `NoSpace` where `size_bytes` do not fit."""
    storage = open_storage(place)
    free = storage.free_bytes()
    if free is not None and free < size_bytes * SPARE_SHARE:
        raise no_space(storage, size_bytes)


def no_space(storage: Storage, size_bytes: int) -> NoSpace:
    free = storage.free_bytes() or 0
    return NoSpace(
        f"{storage.place()} has {free / 2**20:,.1f} MiB free and a checkpoint needs "
        f"{size_bytes * SPARE_SHARE / 2**20:,.1f} MiB. Free some space or move --runs-dir.",
        free_bytes=free,
        needed_bytes=size_bytes,
    )


def backoff(attempts: int = 4, first_s: float = 0.5, factor: float = 3.0) -> tuple[float, ...]:
    """Seconds to wait between so many attempts; each wait is `factor` times the one before."""
    return tuple(first_s * factor**number for number in range(attempts - 1))


def retried(
    action: Callable[[], T], waits: tuple[float, ...], sleep: Callable[[float], None] = time.sleep
) -> T:
    """What `action` returns; after an `OSError` that may pass it is tried again."""
    for wait_s in waits:
        try:
            return action()
        except OSError as error:
            if not may_pass(error):
                raise
            log.warning("%s. Trying again in %g s.", error, wait_s)
            sleep(wait_s)
    return action()


def may_pass(error: OSError) -> bool:
    """Whether it makes sense to try again. A full disk is told at once: training goes on
    meanwhile, and the next checkpoint tries anew."""
    return not isinstance(error, _LASTING) and error.errno not in _FULL


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
        with _full_disk_told(self, len(content)):
            write_atomically(path, content)
            sync_to_disk(path.parent.parent)  # where the directory itself is entered

    def put_file(self, local: Path, name: str) -> StoredFile:
        needed = local.stat().st_size
        with (
            _full_disk_told(self, needed),
            local.open("rb") as source,
            replacing(self.root / name) as target,
        ):
            return _copy(source, target)

    def fetch(self, name: str, size_bytes: int, sha256: str) -> Path:
        return self.root / name

    def check(self, name: str, size_bytes: int, sha256: str) -> None:
        _check_size(self, name, size_bytes)
        if sha256 and file_digest(self.root / name) != sha256:
            raise _altered(self, name)

    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def delete_tree(self, name: str) -> None:
        if (self.root / name).is_dir():
            shutil.rmtree(self.root / name)

    def free_bytes(self) -> int | None:
        there = next(path for path in (self.root, *self.root.parents) if path.exists())
        return shutil.disk_usage(there).free


@dataclass(frozen=True)
class Cache:
    """Downloads that the ranks of a node share, each fetched once. They are named by their digest,
    so that nothing in here can be out of date."""

    directory: Path = Path(tempfile.gettempdir()) / f"pliant-cache-{os.getuid()}"
    limit_bytes: int = CACHE_BYTES
    """A single load may need more, and gets it."""

    def get(
        self, key: str, size_bytes: int, download: Callable[[Path], None], anew: bool = False
    ) -> Path:
        """The file of that key; `download` makes it where it is not there, or is wanted anew."""
        self._make()
        path = self.directory / key
        with file_lock(self.directory / f".lock-{key[0]}"):
            if anew or not path.is_file() or path.stat().st_size != size_bytes:
                self._make_room(size_bytes)
                download(path)
            path.touch()
        return path

    def _make(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.directory.stat().st_uid != os.getuid():
            raise PermissionError(f"{self.directory} belongs to another user. Set TMPDIR.")

    def _make_room(self, size_bytes: int) -> None:
        """Removes what was not asked for the longest, down to the limit."""
        files = [(path.stat(), path) for path in self.directory.iterdir() if path.name[0] != "."]
        total = sum(status.st_size for status, _ in files) + size_bytes
        for status, path in sorted(files, key=lambda file: file[0].st_mtime):
            if total <= self.limit_bytes or status.st_mtime > time.time() - IN_USE_S:
                return
            path.unlink(missing_ok=True)
            total -= status.st_size


@dataclass(frozen=True)
class RemoteStorage:
    """An object store, or anything else that pyarrow or fsspec can open."""

    uri: str
    folder: str = ""
    cache: Cache = field(default_factory=Cache)
    waits_s: tuple[float, ...] = backoff()

    def place(self, name: str = "") -> str:
        base = self.uri.partition("?")[0].rstrip("/")
        return "/".join(part for part in (base, self.folder, name) if part)

    def below(self, name: str) -> Storage:
        return replace(self, folder=_joined(self.folder, name))

    def names(self, directory: str = "") -> list[str]:
        from pyarrow.fs import FileSelector

        selector = FileSelector(self._path(directory), allow_not_found=True)
        found = self._retried(lambda: self._system.get_file_info(selector))
        return sorted(entry.base_name for entry in found)

    def info(self, name: str) -> FileInfo | None:
        entry = self._retried(lambda: self._system.get_file_info(self._path(name)))
        if not entry.is_file:
            return None
        modified = None if entry.mtime is None else entry.mtime.timestamp()
        return FileInfo(entry.size, modified)

    def read(self, name: str) -> bytes:
        def whole() -> bytes:
            with self._system.open_input_stream(self._path(name)) as source:
                return bytes(source.read())

        return self._retried(whole)

    def write(self, name: str, content: bytes) -> None:
        def send() -> None:
            with self._create(name) as target:
                target.write(content)

        with _full_disk_told(self, len(content)):
            self._retried(send)

    def put_file(self, local: Path, name: str) -> StoredFile:
        def send() -> StoredFile:
            with local.open("rb") as source, self._create(name) as target:
                stored = _copy(source, target)
            entry = self._system.get_file_info(self._path(name))
            # An upload that was cut off may end as a short object all the same.
            if not entry.is_file or entry.size != stored.size_bytes:
                raise OSError(f"{self.place(name)} has {entry.size} bytes after its upload")
            return stored

        with _full_disk_told(self, local.stat().st_size):
            return self._retried(send)

    def fetch(self, name: str, size_bytes: int, sha256: str) -> Path:
        return self._cached(name, size_bytes, sha256, anew=False)

    def check(self, name: str, size_bytes: int, sha256: str) -> None:
        _check_size(self, name, size_bytes)
        if sha256:
            self._cached(name, size_bytes, sha256, anew=True)

    def delete(self, name: str) -> None:
        if self.info(name) is not None:
            self._retried(lambda: self._system.delete_file(self._path(name)))

    def delete_tree(self, name: str) -> None:
        if self.names(name):
            self._retried(lambda: self._system.delete_dir(self._path(name)))

    def free_bytes(self) -> int | None:
        return None

    @property
    def _system(self) -> Any:
        return _file_system(self.uri)[0]

    def _path(self, name: str) -> str:
        return _joined(_file_system(self.uri)[1], self.folder, name)

    def _retried(self, action: Callable[[], T]) -> T:
        return retried(action, self.waits_s)

    def _create(self, name: str) -> Any:
        """A stream to write. An object store has no directories; other file systems want them."""
        path = self._path(name)
        try:
            return self._system.open_output_stream(path)
        except FileNotFoundError:
            self._system.create_dir(path.rpartition("/")[0], recursive=True)
            return self._system.open_output_stream(path)

    def _cached(self, name: str, size_bytes: int, sha256: str, anew: bool) -> Path:
        key = sha256 or hashlib.sha256(self.place(name).encode()).hexdigest()

        def download(path: Path) -> None:
            stored = self._retried(lambda: self._download(name, path))
            if stored.size_bytes != size_bytes or sha256 not in ("", stored.sha256):
                path.unlink()
                raise _altered(self, name)

        try:
            with _full_disk_told(LocalStorage(self.cache.directory), size_bytes):
                return self.cache.get(key, size_bytes, download, anew)
        except FileNotFoundError:
            raise _missing(self, name) from None

    def _download(self, name: str, path: Path) -> StoredFile:
        with (
            self._system.open_input_stream(self._path(name)) as source,
            replacing(path) as target,
        ):
            return _copy(source, target)


def is_outage(storage: Storage, error: Exception) -> bool:
    """Whether a storage could not be reached, rather than what was asked for found wanting. A local
    disk that cannot be read is damage."""
    return isinstance(storage, RemoteStorage) and isinstance(error, OSError) and may_pass(error)


@functools.cache
def _file_system(uri: str) -> tuple[Any, str]:
    """pyarrow's file system of a URI and the path within it, opened once in a process."""
    from pyarrow import ArrowInvalid
    from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem

    try:
        return FileSystem.from_uri(uri)
    except ArrowInvalid:
        pass  # a scheme that fsspec may know
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(uri)
    except (ValueError, ImportError) as error:
        raise UserError(
            f"{uri} names a file system that cannot be opened: {error}. Use a path, s3://bucket/"
            "prefix, gs://bucket/prefix, or install the fsspec package of that name.",
            uri=uri,
        ) from None
    return PyFileSystem(FSSpecHandler(system)), path


def _joined(*parts: str) -> str:
    return "/".join(part.rstrip("/") for part in parts if part)


def _copy(source: Any, target: Any) -> StoredFile:
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
def _full_disk_told(storage: Storage, size_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise no_space(storage, size_bytes) from None
        raise


def _check_size(storage: Storage, name: str, size_bytes: int) -> None:
    found = storage.info(name)
    if found is None:
        raise _missing(storage, name)
    if found.size_bytes != size_bytes:
        place = storage.place(name)
        raise CheckpointDamaged(
            f"{place} has {found.size_bytes:,} bytes instead of {size_bytes:,}.", path=place
        )


def _missing(storage: Storage, name: str) -> CheckpointDamaged:
    place = storage.place(name)
    return CheckpointDamaged(f"{place} is missing.", path=place)


def _altered(storage: Storage, name: str) -> CheckpointDamaged:
    place = storage.place(name)
    return CheckpointDamaged(f"{place} was altered since it was written.", path=place)
