"""Files that are there whole or not at all, even after a power cut, and locks between processes."""

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that appears at `path` complete and on disk, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not named by the process: two hosts may share the disk, and pids come again.
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_to_disk(path.parent)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content`; a reader, or a kill at any moment, never finds half of it."""
    with replacing(path) as file:
        file.write(content)


def sync_to_disk(path: Path) -> None:
    """Returns once a file's bytes, or a directory's entries, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on `path`, which is left in place. The lock ends with its process.

    Raises BlockingIOError if another process holds it and `wait` is false.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
