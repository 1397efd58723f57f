"""Files in an object store, or in anything else that pyarrow or fsspec can open.

Credentials come from the environment, as the file system's own library reads them. What may pass is
tried again with growing waits; what is read is kept in a cache that the ranks of a node share.
"""

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pliant.errors import PliantError
from pliant.files import file_lock, replacing
from pliant.storage.filesystems import file_system
from pliant.storage.local import (
    FULL,
    FileInfo,
    LocalStorage,
    Storage,
    StoredFile,
    altered,
    check_size,
    copy_and_digest,
    full_disk_told,
    missing,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

CACHE_BYTES = 64 * 2**30
IN_USE_S = 600.0
"""A cached file that was asked for within this time is not removed to make room."""

_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


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
    return not isinstance(error, _LASTING) and error.errno not in FULL


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

        with full_disk_told(self, len(content)):
            self._retried(send)

    def put_file(self, local: Path, name: str) -> StoredFile:
        def send() -> StoredFile:
            with local.open("rb") as source, self._create(name) as target:
                stored = copy_and_digest(source, target)
            entry = self._system.get_file_info(self._path(name))
            # An upload that was cut off may end as a short object all the same.
            if not entry.is_file or entry.size != stored.size_bytes:
                raise OSError(f"{self.place(name)} has {entry.size} bytes after its upload")
            return stored

        with full_disk_told(self, local.stat().st_size):
            return self._retried(send)

    def fetch(self, name: str, size_bytes: int, sha256: str) -> Path:
        return self._cached(name, size_bytes, sha256, anew=False)

    def workspace(self, name: str) -> Path:
        place = hashlib.sha256(self.place(name).encode()).hexdigest()
        return self.cache.directory / ".workspaces" / place

    def check(self, name: str, size_bytes: int, sha256: str) -> None:
        check_size(self, name, size_bytes)
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
        return file_system(self.uri)[0]

    def _path(self, name: str) -> str:
        return _joined(file_system(self.uri)[1], self.folder, name)

    def _retried(self, action: Callable[[], T]) -> T:
        return retried(lambda: _with_os_errors(action), self.waits_s)

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
                raise altered(self, name)

        try:
            with full_disk_told(LocalStorage(self.cache.directory), size_bytes):
                return self.cache.get(key, size_bytes, download, anew)
        except FileNotFoundError:
            raise missing(self, name) from None

    def _download(self, name: str, path: Path) -> StoredFile:
        with (
            self._system.open_input_stream(self._path(name)) as source,
            replacing(path) as target,
        ):
            return copy_and_digest(source, target)


def _with_os_errors(action: Callable[[], T]) -> T:
    """Clients of object stores raise errors of their own, which may pass like any other."""
    try:
        return action()
    except (OSError, PliantError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _joined(*parts: str) -> str:
    return "/".join(part.rstrip("/") for part in parts if part)
