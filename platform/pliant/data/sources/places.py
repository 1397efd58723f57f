"""Files on this machine's disk or in a remote file system, compressed or not, opened alike."""

import errno
import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any, BinaryIO, Literal, cast

import pyarrow as pa

from pliant.errors import DataError, NoSpace
from pliant.storage.filesystems import file_system

Compression = Literal["gzip", "zstd"]

COMPRESSIONS: dict[str, Compression] = {
    ".gz": "gzip",
    ".gzip": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
}
"""By the last ending of a name."""
BUFFER_BYTES = 2**20
REMOTE_BUFFER_BYTES = 2**23
"""Each filling of the buffer is a request."""
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


@dataclass(frozen=True)
class Place:
    """Where a file lies."""

    path: str
    """Absolute on the disk, else within the file system of `uri`."""
    uri: str = ""
    """Opens a file system of pyarrow or fsspec; empty for the disk."""
    compression: Compression | None = None

    def __str__(self) -> str:
        if not self.uri or SCHEME.match(self.path):
            return self.path
        scheme = self.uri.partition("://")[0]
        return f"{scheme}://{self.path.lstrip('/')}"


@contextmanager
def reading(place: Place, what: str = "") -> Iterator[None]:
    """What goes wrong while a file is read becomes a `DataError` that names it.

    `what` is what its content was to be, such as "a readable Parquet file".
    """
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise DataError(_account(place, what, error), path=str(place)) from None


def _account(place: Place, what: str, error: Exception) -> str:
    problem = _problem(error).rstrip(".")
    of_the_system = isinstance(error, FileNotFoundError) or getattr(error, "errno", None)
    if what and not of_the_system:
        return (
            f"{place} is not {what}: {problem}. Write it again, or set data.format to what it is."
        )
    if place.compression and not of_the_system:
        return (
            f"{place} cannot be decompressed: {problem}. Fetch or write it again, or rename it if "
            f"it is not {place.compression}."
        )
    return f"{place} cannot be read: {problem}. The data must be readable on every node."


def _problem(error: Exception) -> str:
    """The system's words for an error, else the first line of the library's."""
    if isinstance(error, FileNotFoundError):
        return os.strerror(errno.ENOENT)
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else (str(error).splitlines() or [repr(error)])[0]


@contextmanager
def stored(place: Place) -> Iterator[BinaryIO]:
    """A file's bytes as they are stored, still compressed; any offset may be sought."""
    if not place.uri:
        with open(place.path, "rb", buffering=BUFFER_BYTES) as file:
            yield file
    else:
        with file_system(place.uri)[0].open_input_file(place.path) as remote:
            yield _buffered(remote, REMOTE_BUFFER_BYTES)


@contextmanager
def content(place: Place, begin: int = 0) -> Iterator[BinaryIO]:
    """A file's decompressed bytes from `begin` on.

    A compressed file is read from its start: what lies before `begin` is decompressed block by
    block and thrown away, so that reading needs time for it, but no memory.
    """
    with ExitStack() as stack:
        file = stack.enter_context(stored(place))
        if place.compression is None:
            file.seek(begin)
        else:
            stream = pa.CompressedInputStream(file, place.compression)
            file = _buffered(stack.enter_context(stream), BUFFER_BYTES)
            _skip(file, begin)
        yield file


@contextmanager
def seekable(place: Place) -> Iterator[IO[bytes]]:
    """A file's decompressed bytes, at any offset, for formats that have their index at the end.

    A compressed file is decompressed to a temporary one first, which is gone afterwards.
    """
    if place.compression is None:
        with stored(place) as file:
            yield file
        return
    with tempfile.TemporaryFile() as spool:
        try:
            with content(place) as stream:
                shutil.copyfileobj(stream, spool, BUFFER_BYTES)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise NoSpace(
                f"{place} must be decompressed to {tempfile.gettempdir()}, whose disk is full. "
                "Free some space, set TMPDIR to another disk, or decompress the file beforehand.",
            ) from None
        spool.seek(0)
        yield spool


def _buffered(raw: Any, buffer_bytes: int) -> BinaryIO:
    """pyarrow's files know no lines; Python's buffer over them does."""
    return cast(BinaryIO, io.BufferedReader(raw, buffer_bytes))


def _skip(file: BinaryIO, count: int) -> None:
    while count and (block := file.read(min(count, BUFFER_BYTES))):
        count -= len(block)
