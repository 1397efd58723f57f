"""Stores snapshots while training goes on: a thread of each rank copies them to the storage."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pliant.checkpoints.slots import Slot, Slots
from pliant.checkpoints.writer import store_rank_file
from pliant.errors import JobError, PliantError
from pliant.storage.local import Storage
from pliant.training.commit import Answer, Commits, RankSaved

log = logging.getLogger(__name__)


@dataclass
class Save:
    """A checkpoint on its way, as one rank sees it."""

    report: RankSaved
    """Without the file."""
    slot: Slot | None
    """Pinned; None where the report says why there is none."""
    began: float
    """On the clock of `time.perf_counter`."""
    seconds: float = 0.0
    """Until this rank's part was stored."""
    answer: Answer | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def step(self) -> int:
        return self.report.manifest.step


class Saver:
    """The thread. It does not keep the process alive."""

    def __init__(
        self,
        storage: Storage,
        slots: Slots,
        commits: Commits,
        answered: Callable[[Save], None],
    ) -> None:
        self._storage = storage
        self._slots = slots
        self._commits = commits
        self._answered = answered
        self._queue: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="saver")
        self._thread.start()

    def submit(self, save: Save) -> None:
        self._queue.put(save)

    def close(self, timeout_s: float) -> None:
        """What is under way is finished within the timeout, or abandoned: without its report the
        checkpoint is never committed."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (save := self._queue.get()) is not None:
            try:
                save.answer = self._store(save)
                self._answered(save)
            finally:
                save.done.set()

    def _store(self, save: Save) -> Answer:
        report = save.report
        try:
            if save.slot is not None:
                report = replace(report, **self._stored(save.slot, report))
        except (OSError, PliantError) as error:
            report = replace(report, error=error)
        except Exception as error:  # the thread must live: training waits for its slots
            report = replace(report, error=OSError(f"{type(error).__name__}: {error}"))
        finally:
            if save.slot is not None:
                self._slots.release(save.slot)
        save.seconds = time.perf_counter() - save.began
        report = replace(report, saving_s=save.seconds)
        if self._closed:
            return Answer("refused", 0)
        try:
            return self._commits(report)
        except Exception as error:  # whoever hosts the committer is gone, and with it the job
            log.warning("A checkpoint could not be reported: %s", error)
            return Answer("failed", 0, JobError(f"The checkpoint could not be reported: {error}"))

    def _stored(self, slot: Slot, report: RankSaved) -> dict[str, Any]:
        chunks = self._slots.layout.chunks
        return {
            "digests": self._slots.digests(slot),
            "file": store_rank_file(
                self._storage, report.directory, report.rank, slot.path, chunks
            ),
        }
