"""The durable record of a run: one JSON object a line, only ever appended to.

Everything else that is known of a run (its MLflow run, summary and plots) is derived from it.
"""

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pliant.tracking.events import Event

log = logging.getLogger(__name__)
_TAIL_BYTES = 1 << 16


class Journal:
    """A file of events. It has one writer, an object that threads may share, and any readers.

    A line that a killed writer left unfinished is cut off by the next writer, and not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._lock = threading.Lock()

    def append(self, event: Event) -> None:
        """Write `event`, with the present time unless it has one. It survives this process at once
        and the machine after `sync`.

        Raises OSError (a full disk, for example); the file is then as it was.
        """
        stamped = {"kind": event.get("kind", "note"), "time": time.time(), **event}
        line = json.dumps(stamped, default=_plain, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            _write_whole(self._opened(), line, self.path)

    def sync(self) -> None:
        """Return once everything appended has reached the disk."""
        with self._lock:
            os.fsync(self._opened())

    def close(self) -> None:
        """Let go of the file; a later `append` opens it again."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def size_bytes(self) -> int:
        """Length of the file; 0 before it exists."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def read(self, offset: int = 0) -> Iterator[tuple[Event, int]]:
        """Events from the byte `offset` on, each with the offset after it. A line that is no event
        (a damaged disk) comes as an event of the kind "damaged"."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                yield self._parse(line, offset), offset

    def events(self) -> Iterator[Event]:
        """All events, in order."""
        return (event for event, _ in self.read())

    def _parse(self, line: bytes, offset: int) -> Event:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict) and {"kind", "time"} <= event.keys():
            return event
        log.warning("%s: the line before byte %d is damaged and was skipped.", self.path, offset)
        return {"kind": "damaged", "time": 0.0}

    def _opened(self) -> int:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(self.path, flags, 0o644)
            _cut_torn_line(self._file)
        return self._file


def _write_whole(file: int, line: bytes, path: Path) -> None:
    """One write, so that readers and kills see whole lines; a short one (full disk) is undone."""
    before = os.fstat(file).st_size
    if os.write(file, line) != len(line):
        os.ftruncate(file, before)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _cut_torn_line(file: int) -> None:
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - _TAIL_BYTES)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    os.ftruncate(file, end)


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch become Python's; whatever else JSON lacks becomes text."""
    return value.item() if hasattr(value, "item") else str(value)
