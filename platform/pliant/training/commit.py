"""Makes a checkpoint of what the ranks have stored: the ledger, then the manifest, then room.

Every rank stores its file in the background and reports it; whoever reports last has the checkpoint
committed. Nothing here speaks to Ray: the recorder's actor hosts the committer, a test calls it.
"""

import logging
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pliant.checkpoints.digests import added, stated
from pliant.checkpoints.manifest import LedgerFile, Manifest, RankFile
from pliant.checkpoints.places import Places
from pliant.data.ledger import Entries, write_ledger
from pliant.errors import PliantError

log = logging.getLogger(__name__)

State = Literal["waiting", "committed", "failed", "refused"]


@dataclass(frozen=True)
class Base:
    """The checkpoint on disk that an attempt goes on from."""

    step: int = 0
    directory: str = ""
    """"" where there is none yet; the ledger goes on from it."""
    ledger: tuple[LedgerFile, ...] = ()
    """All files up to it."""


@dataclass(frozen=True)
class RankSaved:
    """What one rank has stored of a checkpoint, or why it has not."""

    rank: int
    manifest: Manifest
    """Without files and ledger; the same from every rank."""
    directory: str
    base: Base
    """Of the attempt."""
    file: RankFile | None
    error: PliantError | OSError | None
    entries: Entries
    """What the rank trained since the last checkpoint that it knows to be committed, or earlier."""
    digests: dict[str, int]
    """The rank's parts."""
    stall_s: float
    saving_s: float
    """Since the checkpoint was asked for."""


@dataclass(frozen=True)
class Answer:
    """What a rank learns in return."""

    state: State
    """Of the checkpoint; "waiting" while other ranks have not reported."""
    committed_step: int
    """Of the newest checkpoint of this attempt, or of the one that it goes on from."""
    error: PliantError | OSError | None = None
    """Why the checkpoint failed."""
    failures: int = 0
    """Of worker groups so far, in `elapsed_s` seconds of the job's life."""
    elapsed_s: float = 0.0


Commits = Callable[[RankSaved], Answer]
"""How a rank reaches the committer."""


class Committer:
    """One per job; several ranks may call it at once."""

    def __init__(
        self,
        places: Places,
        prune: Callable[[Manifest], object],
        tell: Callable[[dict[str, Any]], object],
        observed: Callable[[], tuple[int, float]] = lambda: (0, 0.0),
    ) -> None:
        """`prune` removes what is not to be kept beside a checkpoint that was just committed;
        `tell` takes events for the record; `observed` gives failures and the seconds they were
        counted over."""
        self._places = places
        self._prune = prune
        self._tell = tell
        self._observed = observed
        self._attempt = 0
        self._base: Base | None = None
        self._reports: dict[int, dict[int, RankSaved]] = {}
        self._is_failing = False
        self._collecting = threading.Lock()
        self._committing = threading.Lock()

    def begin(self, attempt: int) -> None:
        """Reports of earlier attempts are refused from now on."""
        with self._committing, self._collecting:
            if attempt > self._attempt:
                self._attempt, self._base = attempt, None
                self._reports.clear()

    def rank_saved(self, report: RankSaved) -> Answer:
        """Keeps the report; the last rank's returns once the checkpoint is committed or dropped."""
        attempt, step = report.manifest.attempt, report.manifest.step
        if attempt > self._attempt:
            self.begin(attempt)
        with self._collecting:
            if attempt < self._attempt:
                return Answer("refused", 0)
            base = self._base = self._base or report.base
            ranks = self._reports.setdefault(step, {})
            ranks[report.rank] = report
            if len(ranks) < report.manifest.world_size:
                return Answer("waiting", base.step, None, *self._observed())
            del self._reports[step]
        with self._committing:
            if attempt < self._attempt:
                return Answer("refused", 0)
            error = self._conclude([ranks[rank] for rank in sorted(ranks)])
            assert self._base is not None
            state: State = "failed" if error else "committed"
            return Answer(state, self._base.step, error, *self._observed())

    def _conclude(self, ranks: list[RankSaved]) -> PliantError | OSError | None:
        """Commits or drops; training goes on either way."""
        base, began = self._base, time.perf_counter()
        if base is not None and ranks[0].manifest.step <= base.step:
            return None  # a later one was committed meanwhile
        error = next((report.error for report in ranks if report.error is not None), None)
        if error is None:
            try:
                self._commit(ranks)
            except (OSError, PliantError) as caught:
                error = caught
        if error is None:
            self._tell_success(ranks, time.perf_counter() - began)
        else:
            self._drop(ranks[0], error)
        return error

    def _commit(self, ranks: list[RankSaved]) -> None:
        first, base = ranks[0], self._base
        assert base is not None
        ledger = base.ledger + self._write_ledger(ranks, base.step)
        manifest = replace(
            first.manifest,
            files=tuple(report.file for report in ranks if report.file is not None),
            ledger=ledger,
            digests=stated(added(report.digests for report in ranks)),
        )
        manifest.write(self._places.checkpoints, first.directory)
        self._base = Base(manifest.step, first.directory, ledger)
        try:
            self._prune(manifest)
        except (OSError, PliantError) as error:
            log.warning("Old checkpoints could not be removed: %s", error)

    def _write_ledger(self, ranks: list[RankSaved], since: int) -> tuple[LedgerFile, ...]:
        """A rank that does not know of the last commit reports what is in its ledger again."""
        new = [[entry for entry in report.entries if entry[0] >= since] for report in ranks]
        if not any(new):
            return ()
        name = f"{ranks[0].directory}.parquet"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            first, last = write_ledger(path, new)
            stored = self._places.ledger.put_file(path, name)
        return (LedgerFile(name, stored.size_bytes, stored.sha256, first, last),)

    def _tell_success(self, ranks: list[RankSaved], commit_s: float) -> None:
        step = ranks[0].manifest.step
        metrics = {
            "checkpoint_s": max(report.saving_s for report in ranks) + commit_s,
            "checkpoint_stall_s": max(report.stall_s for report in ranks),
        }
        path = self._places.checkpoints.place(ranks[0].directory)
        self._tell({"kind": "checkpoint", "step": step, "path": path, "metrics": metrics})
        if self._is_failing:
            self._is_failing = False
            self._tell({"kind": "note", "step": step, "text": "checkpoints are saved again"})

    def _drop(self, report: RankSaved, error: PliantError | OSError) -> None:
        """Half a checkpoint would only take room. All ranks have reported: nobody writes it now."""
        self._is_failing = True
        step = report.manifest.step
        try:
            self._places.checkpoints.delete_tree(report.directory)
        except OSError as caught:
            log.warning("What was written of step %d could not be removed: %s", step, caught)
        text = f"the checkpoint of step {step} could not be saved, training goes on: {error}"
        self._tell({"kind": "alarm", "step": step, "what": "checkpoint", "text": text})
