"""Keeps and restores a run: the engine's fragments, the place in the data, and the ledger.

Snapshots in memory are taken as often as they cost next to nothing (`hot`). Some are stored as
checkpoints while training goes on (`saving`, `commit`). A restored run goes on from the newest of
either kind that is whole (`sources`).
"""

import logging
import queue
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pliant.checkpoints import digests, reader, snapshot
from pliant.checkpoints.places import places_of
from pliant.checkpoints.reader import Checkpoint
from pliant.checkpoints.slots import Slot, owned
from pliant.checkpoints.snapshot import Hot, Roots
from pliant.checkpoints.writer import directory_name
from pliant.data.ledger import Entries, Ledger
from pliant.errors import CheckpointMismatch, FilesDamaged, JobError, PliantError
from pliant.files import write_atomically
from pliant.spec.operations import CheckpointSpec
from pliant.storage.opening import need_space
from pliant.topology import Place
from pliant.training import holders
from pliant.training.agreement import agreed, caught, first_error, gather
from pliant.training.cadence import Cadence
from pliant.training.commit import Base, Commits, RankSaved
from pliant.training.contents import Contents
from pliant.training.hot import Snapshots, choose_root, open_snapshots
from pliant.training.progress import Progress
from pliant.training.saving import Save, Saver
from pliant.training.sources import HotFiles, Source, candidates, snapshots

log = logging.getLogger(__name__)

KEY_FILE = "snapshots.key"
USUAL_SLOTS = 3
CLOSE_S = 0.4


class TrainingState:
    """The state of one attempt, as one rank holds it. All ranks call its methods, in the same
    steps; `close` alone may be called at any time."""

    def __init__(
        self,
        contents: Contents,
        place: Place,
        run_dir: Path,
        ledger: Ledger,
        settings: CheckpointSpec,
        commits: Commits,
    ) -> None:
        self._contents = contents
        self._place = place
        self._run_dir = run_dir
        self._places = places_of(run_dir, settings.storage)
        self._ledger = ledger
        self._commits = commits
        self._is_hot = settings.hot_every != 0
        self._base = Base()
        self._entries: Entries = []
        self._restored_age: tuple[int, int] | None = None
        self._has_let_go = False
        self._has_warned = False
        self._roots: Roots | None = None
        self._snapshots: Snapshots | None = None
        self._saver: Saver | None = None
        self._save: Save | None = None
        self._answered: queue.SimpleQueue[Save] = queue.SimpleQueue()
        self._left_at: float | None = None
        self.cadence = Cadence(settings.every, settings.hot_every, place.world_size)
        self.attempt = 0
        """Set it before the first step."""
        self.tell: Callable[[str], object] = log.info
        """Takes sentences on what rank 0 decides."""
        self.metrics: dict[str, float] = {}
        """The newest evaluation; checkpoints carry it."""
        self.damage: list[str] = []
        """On rank 0, what was passed over because it was not whole; a sentence each."""

    @property
    def waits(self) -> int:
        """How often training waited because no slot was free."""
        return self._snapshots.slots.waits if self._snapshots else 0

    def restore(self) -> Progress:
        """Loads the newest state that is whole; a fresh `Progress` where there is none.

        Raises `CheckpointMismatch` for a checkpoint of another model or job.
        """
        self._roots = Roots.of(self._run_dir, agreed(self._key))
        snapshot.remove(self._run_dir, but=self._roots)
        sources = candidates(self._places, self._hots(), self.damage)
        is_untouched = True
        while (source := agreed(lambda: next(sources, None))) is not None:
            checkpoint = self._load(source)
            if checkpoint is not None:
                return self._go_on(source, checkpoint)
            is_untouched = False
        if not is_untouched:
            self.discard_snapshots()
            raise RuntimeError("The only state there was could be loaded in part; start afresh.")
        return Progress()

    def save(self, progress: Progress, wait: bool = False) -> float:
        """Takes a snapshot and has it stored in the background; returns how many seconds training
        was held up. A failure is told to the record, and the next save tries again.

        With `wait` it returns once the checkpoint of this step is committed, and raises on every
        rank what any rank met, `NoSpace` for one; the last good checkpoint stays.
        """
        began = time.perf_counter()
        is_new = self._save is None or self._save.step != progress.step
        if is_new and progress.step == self._base.step:
            return 0.0  # the run has just been restored from it, or has not begun
        if is_new:
            self._begin_save(progress, began)
        stall_s = time.perf_counter() - began
        if wait and not self._is_committed(raises=is_new):
            self._begin_save(progress, time.perf_counter())
            self._is_committed(raises=True)
        if self._left_at is not None:
            self._left_at += time.perf_counter() - began
        return stall_s

    def snapshot(self, progress: Progress) -> None:
        """After every step; takes a snapshot where one is due."""
        if self._left_at is not None:
            self.cadence.stepped(time.perf_counter() - self._left_at)
        if self._is_hot and self.cadence.hot_is_due(progress.step):
            error = caught(lambda: self._take(progress))
            if isinstance(error, BaseException) and not self._has_warned:
                self._has_warned = True
                log.warning("Rank %d has no snapshot: %s", self._place.rank, error)
        self._hear_answers()
        self.cadence.look(self.tell)
        self._left_at = time.perf_counter()

    def just_in_time(self, progress: Progress, durable: bool) -> None:
        """Makes the state of this step safe, since the group is about to end: in memory, which
        takes no time, or on disk where the node may go or there are no snapshots."""
        if not durable and self._is_safe_in_memory(progress):
            return
        try:
            self.save(progress, wait=True)
        except (OSError, PliantError) as error:
            log.warning("The group ends without a checkpoint of step %d: %s", progress.step, error)

    def discard_snapshots(self) -> None:
        """For a state that is not to be trusted: the run will go on from the last checkpoint."""
        self.close()  # nothing more is sent to other nodes
        if self._roots is not None:
            job = self._run_dir.name
            snapshot.forget(self._roots.paths, None)
            holders.forget_elsewhere(job, None, None, timeout_s=holders.ASK_TIMEOUT_S)

    def close(self) -> None:
        """Ends the threads and unmaps the snapshots, which stay for the next attempt. A save that
        is under way is finished at once or never committed."""
        saver, self._saver = self._saver, None
        snapshots, self._snapshots = self._snapshots, None
        if saver is not None:
            saver.close(CLOSE_S)
        if snapshots is not None:
            snapshots.close(CLOSE_S)

    # Restoring

    def _key(self) -> str:
        """What tells this run's snapshots from those of an earlier run in the same place."""
        path = self._run_dir / KEY_FILE
        if not path.exists():
            write_atomically(path, uuid.uuid4().hex[:12].encode())
        return path.read_text()

    def _hots(self) -> list[Hot]:
        """On rank 0, which chooses."""
        if self._place.rank or not self._is_hot:
            return []
        assert self._roots is not None
        return snapshots(self._run_dir.name, self._roots)

    def _load(self, source: Source) -> Checkpoint | None:
        """None where it turned out not to be whole, on whichever rank."""
        assert self._roots is not None
        files = HotFiles(self._run_dir.name, self._roots, source.hot) if source.hot else None
        loaded = caught(lambda: self._read(source, files))
        is_read = not isinstance(loaded, BaseException)
        told = gather((_steps(loaded[1]), loaded[2]) if is_read else loaded)
        error = first_error([*told, caught(lambda: _check_together(source, told))])
        if files is not None:
            files.close()
        if error is None:
            self._entries = loaded[1]
            return loaded[0]
        if isinstance(error, CheckpointMismatch) and source.hot is None:
            raise error
        if self._place.rank == 0:
            self.damage.append(str(error))
            log.warning("Falling back to an older state than %s: %s", source, error)
        return None

    def _read(
        self, source: Source, files: HotFiles | None
    ) -> tuple[Checkpoint, Entries, dict[str, int]]:
        """The checkpoint, loaded; entries of its ledger; this rank's parts of the digests that it
        states."""
        fragments, place = self._contents.fragments(), self._place
        checkpoint = files.checkpoint(fragments, source.base) if files else source.checkpoint
        assert checkpoint is not None
        self._contents.check(checkpoint)
        reader.load(checkpoint, fragments)
        entries = files.entries(place.rank, place.world_size, source.base) if files else []
        stated = checkpoint.manifest.digests.keys()
        return checkpoint, entries, digests.partial_digests(fragments, stated)

    def _go_on(self, source: Source, checkpoint: Checkpoint) -> Progress:
        progress = self._contents.take_over(checkpoint.manifest)
        self._base = source.base
        self.cadence.begin(source.base.step)
        assert self._roots is not None
        age = source.hot.age if source.hot else None
        snapshot.forget(self._roots.paths, age)
        self._restored_age = age
        if self._place.rank == 0:
            log.info("Going on from %s.", source)
        return progress

    # Snapshots

    def _take(self, progress: Progress) -> None:
        """The snapshot of this step, unless it was taken before. Raises `NoSpace` on every rank
        where there is no place for snapshots, and `OSError` on one that has no room for this."""
        snapshots = self._open()
        new = self._ledger.take()
        self._entries += new

        def write_ledger() -> None:
            log = snapshots.slots.ledger
            is_begun_anew, self._has_let_go = self._has_let_go, True  # should it fail half-way
            log.restart(self._entries) if is_begun_anew else log.append(new)
            self._has_let_go = False

        moment = self._contents.moment(progress)
        stall_s = snapshots.take(self._contents.fragments(), moment, self._is_hot, write_ledger)
        if stall_s is not None:
            self.cadence.stalled(stall_s)

    def _open(self) -> Snapshots:
        """At the first snapshot: by then the attempt is known."""
        if self._snapshots is None:
            assert self._roots is not None
            root = self._root()
            self._snapshots = open_snapshots(
                root,
                self._roots,
                self._run_dir.name,
                self._place,
                self.attempt,
                self._contents,
                self._base.directory,
                self._is_hot,
            )
            slots = self._snapshots.slots
            slots.ledger.append(self._entries)
            if self._is_hot and self._place.rank == 0:
                holders.forget_elsewhere(self._run_dir.name, self._restored_age, self.attempt)
            self._saver = Saver(self._places.checkpoints, slots, self._commits, self._answered.put)
        return self._snapshots

    def _root(self) -> Path:
        """Where snapshots lie; without room for enough of them there is no hot tier, on no rank."""
        assert self._roots is not None
        size_bytes = sum(f.tensor.nbytes for f in owned(self._contents.fragments()))
        world_size = self._place.world_size
        found = choose_root(self._roots, size_bytes, USUAL_SLOTS, world_size)
        if self._is_hot and isinstance(found, BaseException):
            log.warning("There will be no snapshots between checkpoints: %s", found)
            self._is_hot = False
        if not self._is_hot:
            found = choose_root(self._roots, size_bytes, 1, world_size)
        if isinstance(found, BaseException):
            raise found
        return found

    def _is_safe_in_memory(self, progress: Progress) -> bool:
        """On all ranks or on none."""
        if not self._is_hot:
            return False
        error = caught(lambda: self._take(progress))
        is_taken = self._is_hot and not isinstance(error, BaseException)
        is_safe = is_taken and holders.can_be_reached(self._run_dir.name)
        return all(gather(is_safe and self._snapshots and self._snapshots.has(progress.step)))

    # Saving

    def _begin_save(self, progress: Progress, began: float) -> None:
        slot = caught(lambda: self._slot_to_save(progress))
        is_there = isinstance(slot, Slot)
        report = RankSaved(
            rank=self._place.rank,
            manifest=self._contents.manifest(progress, self.attempt, self.metrics),
            directory=directory_name(progress.step, self.attempt, self._place.world_size),
            base=self._base,
            file=None,
            error=None if is_there else slot,
            entries=list(self._entries),
            digests={},
            stall_s=time.perf_counter() - began,
            saving_s=0.0,
        )
        self._save = Save(report, slot if is_there else None, began)
        self.cadence.saved(progress.step)
        if self._saver is not None:
            self._saver.submit(self._save)
        else:  # there is not even a place for snapshots
            self._save.answer = self._commits(report)
            self._save.done.set()

    def _slot_to_save(self, progress: Progress) -> Slot:
        """Pinned. Raises `NoSpace` where the checkpoint of all ranks together would not fit."""
        self._take(progress)
        assert self._snapshots is not None
        need_space(self._places.checkpoints, self._snapshots.total_bytes)
        return self._snapshots.pinned(progress.step)

    def _is_committed(self, raises: bool) -> bool:
        """Waits for the last save, on all ranks."""
        assert self._save is not None
        self._save.done.wait()
        answers = gather(self._save.answer)
        self._hear_answers()
        if any(answer.state == "committed" for answer in answers):
            return True
        if raises:
            raise first_error([answer.error for answer in answers]) or JobError(
                f"The checkpoint of step {self._save.step} was not committed, since another "
                "attempt has begun."
            )
        return False

    def _hear_answers(self) -> None:
        """What the saving thread has learned. Entries that are in a checkpoint are let go."""
        while not self._answered.empty():
            save = self._answered.get()
            assert save.answer is not None
            if save.answer.state in ("waiting", "committed"):
                self.cadence.stored(save.report.stall_s, save.seconds, save.answer)
            kept = [entry for entry in self._entries if entry[0] >= save.answer.committed_step]
            self._has_let_go |= len(kept) < len(self._entries)
            self._entries = kept


def _steps(entries: Entries) -> set[int]:
    return {step for step, _ in entries}


def _check_together(source: Source, told: list[Any]) -> None:
    """What all ranks have read, put together. Raises `FilesDamaged`."""
    if first_error(told) is not None:
        return
    whole = digests.added(parts for _, parts in told)
    if source.checkpoint is not None:
        digests.check(source.checkpoint.manifest, whole)
    if source.hot is not None:
        digests.check(source.hot.manifest({}, ()), whole)
        recorded: set[int] = set().union(*(steps for steps, _ in told))
        missing = set(range(source.base.step, source.hot.age[1])) - recorded
        if missing:
            raise FilesDamaged(
                f"{source.hot} has no ledger of step {min(missing)}.", path=source.base.directory
            )
