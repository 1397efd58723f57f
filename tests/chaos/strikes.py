"""Carries a schedule out: strikes, waits until training goes on, and notes what it cost."""

import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from chaos.disks import Disk
from chaos.job import Attempt, Job
from chaos.machines import Machine, Machines, frozen, kill
from chaos.schedule import (
    MAX_WORKERS,
    AddNode,
    DamageCheckpoint,
    DamageSnapshot,
    DrainNode,
    Fault,
    FillDisk,
    KillDriver,
    KillHelper,
    KillWorker,
    LockDisk,
    LoseCluster,
    LoseNode,
    Resize,
    StopJob,
    StopWorker,
    Strike,
    told,
)
from pliant.checkpoints import reader, snapshot
from pliant.checkpoints.manifest import MANIFEST, Manifest
from pliant.checkpoints.snapshot import Part, Roots
from pliant.training import wanted
from pliant.training.state import KEY_FILE

SAVE_EVERY = 10
"""Steps between checkpoints of the job; it takes a snapshot after every step."""
GRACE_S = 60.0
"""A node whose workers should have left it is waited for so much longer than its deadline."""
LONGEST_FULL_S = 20.0

PROMISED: dict[type[Fault], int] = {
    Resize: 0,
    AddNode: 0,
    StopJob: 0,
    KillWorker: 1,
    StopWorker: 1,
    KillHelper: 0,
    FillDisk: 0,
    LockDisk: 0,
    KillDriver: 1,
    LoseNode: SAVE_EVERY,
    DamageSnapshot: SAVE_EVERY,
    LoseCluster: 2 * SAVE_EVERY,
    DamageCheckpoint: 3 * SAVE_EVERY,
}
"""Steps that may be lost to a fault; a save may be under way when it strikes."""


@dataclass
class Blow:
    """What a strike did."""

    struck_at: float
    """Unix seconds."""
    ends_attempt: bool
    """Whether a worker group must be formed anew."""
    facts: str = ""


@dataclass(frozen=True)
class Result:
    """What a strike cost."""

    fault: Fault
    step: int
    """When it struck."""
    back_s: float | None
    """Until the next step of a new group; None where none was needed, or it was not waited for."""
    steps_lost: int
    worlds: tuple[int, ...]
    """Sizes of the groups that were formed."""
    facts: str = ""

    @property
    def kind(self) -> str:
        return type(self.fault).__name__


@dataclass
class Chaos:
    """The job, and everything that can befall it."""

    job: Job
    machines: Machines
    checkpoint_disk: Disk | None
    run_disk: Disk | None
    findings: list[str] = field(default_factory=list)
    """What should not have happened, a sentence each."""
    wanted: int | None = None
    """Workers that somebody asked for last."""
    _was_settled: bool = True

    def goal(self) -> int:
        """How many workers the job should come to."""
        return min(self.wanted or MAX_WORKERS, self.machines.room)

    def carry_out(self, strike: Strike) -> Result:
        """Raises `Stuck` where training does not go on."""
        job, fault = self.job, strike.fault
        job.wait_for_steps(strike.after_steps)
        num_before, step = len(job.journal.attempts), job.journal.step
        blow = self._strike(fault)
        self._wait(blow, strike, num_before)
        attempts = job.journal.attempts[num_before:]
        result = Result(
            fault=fault,
            step=step,
            back_s=self._back_s(blow, fault, attempts),
            steps_lost=sum(attempt.lost for attempt in attempts),
            worlds=tuple(attempt.world_size for attempt in attempts),
            facts=blow.facts,
        )
        self._judge(result)
        self._was_settled = strike.settles
        return result

    def resume(self) -> None:
        """Starts the driver once more, after the job got stuck."""
        kill(self.job.journal.ranks(), signal.SIGCONT)
        self.job.end()
        num_before = len(self.job.journal.attempts)
        self.job.start(self.machines.address)
        self.job.wait_for("training after a new start", self._trains_since(num_before))
        self._was_settled = False

    # Waiting

    def _wait(self, blow: Blow, strike: Strike, num_before: int) -> None:
        what = told(strike.fault)
        if blow.ends_attempt:
            self.job.wait_for(f"a step after {what}", self._trains_since(num_before))
        if strike.settles:
            self.job.wait_for(f"{self.goal()} workers after {what}", self._is_settled)

    def _trains_since(self, num_before: int) -> Callable[[], bool]:
        def trains() -> bool:
            attempts = self.job.journal.attempts[num_before:]
            return any(attempt.first_step_at for attempt in attempts)

        return trains

    def _is_settled(self) -> bool:
        latest = self.job.journal.attempts[-1]
        return latest.first_step_at is not None and latest.world_size == self.goal()

    def _back_s(self, blow: Blow, fault: Fault, attempts: list[Attempt]) -> float | None:
        """To the first step; for a fault that only changes the size, in a group of that size."""
        stepped = [attempt for attempt in attempts if attempt.first_step_at is not None]
        if isinstance(fault, Resize | AddNode):
            stepped = [attempt for attempt in stepped if attempt.world_size == self.goal()]
        if not stepped or isinstance(fault, FillDisk | LockDisk | KillHelper):
            return None
        return (stepped[0].first_step_at or 0.0) - blow.struck_at

    def _judge(self, result: Result) -> None:
        """A promise is only held against a group that was whole when it was struck."""
        promised = PROMISED.get(type(result.fault))
        if isinstance(result.fault, DrainNode):
            promised = 0 if result.fault.deadline_s > 1 else SAVE_EVERY
        if promised is not None and self._was_settled and result.steps_lost > promised:
            self.findings.append(
                f"{told(result.fault)} at step {result.step} cost {result.steps_lost} steps; "
                f"at most {promised} were to be lost"
            )
        if isinstance(result.fault, FillDisk | LockDisk | KillHelper) and self._was_settled:
            causes = {a.cause for a in self.job.journal.attempts[-len(result.worlds) :]}
            if result.worlds and "failure" in causes:
                self.findings.append(f"{told(result.fault)} at step {result.step} ended a group")

    # Striking

    def _strike(self, fault: Fault) -> Blow:
        match fault:
            case KillWorker(rank):
                return self._at_rank(rank, signal.SIGKILL)
            case StopWorker(rank):
                return self._at_rank(rank, signal.SIGSTOP)
            case LoseNode(node):
                return self._lose(self._machine(node))
            case AddNode(workers):
                began = time.time()
                self.machines.add(workers)
                return Blow(began, False)
            case DrainNode(node, deadline_s):
                return self._drain(self._machine(node), deadline_s)
            case Resize(workers):
                self.wanted, began = workers, time.time()
                wanted.resize(self.job.run_dir, workers, 0)
                return Blow(began, False)
            case DamageCheckpoint():
                return self._damage_checkpoint(fault)
            case DamageSnapshot():
                return self._damage_snapshot(fault)
            case FillDisk(whole_run, steps):
                disk = self.run_disk if whole_run else self.checkpoint_disk
                assert disk is not None
                return self._without(disk.fill, disk.empty, steps, whole_run)
            case LockDisk(steps):
                disk = self.checkpoint_disk
                assert disk is not None
                return self._without(disk.lock, disk.unlock, steps, False)
            case KillHelper(which):
                pids = self.machines.helpers(which)
                kill(pids)
                return Blow(time.time(), False, f"{len(pids)} processes")
            case KillDriver():
                return self._restart_driver(signal.SIGKILL)
            case StopJob():
                return self._restart_driver(signal.SIGTERM)
            case LoseCluster():
                return self._lose_cluster()

    def _machine(self, number: int) -> Machine:
        """Never the last one, even where a fault before failed and took none."""
        there = self.machines.there
        if len(there) == 1:
            self.machines.add(1)
        return there[number % len(there)]

    def _at_rank(self, rank: int, number: int) -> Blow:
        pids = self._ranks()
        kill([pids[rank % len(pids)]], number)
        return Blow(time.time(), True, f"rank {rank % len(pids)} of {len(pids)}")

    def _ranks(self) -> list[int]:
        """Waits until there are any: a pile of faults may have left none for the moment."""
        self.job.wait_for("a worker group", lambda: bool(self.job.journal.ranks()))
        return self.job.journal.ranks()

    def _lose(self, machine: Machine) -> Blow:
        hit = set(machine.pids()) & set(self.job.journal.ranks())
        began = time.time()
        self.machines.lose(machine, self._forget_memory)
        return Blow(began, bool(hit), f"{len(hit)} workers on it")

    def _drain(self, machine: Machine, deadline_s: float) -> Blow:
        began = time.time()
        hit = set(machine.pids()) & set(self.job.journal.ranks())
        self.machines.drain(machine, deadline_s)
        num_before = len(self.job.journal.attempts)
        if hit and deadline_s > 1:
            self.job.wait_for(
                "the workers leave the drained node",
                self._trains_since(num_before),
                deadline_s + GRACE_S,
            )
        else:
            time.sleep(deadline_s)
        in_time = time.time() - began < deadline_s
        blow = self._lose(machine)
        left = "left in time" if in_time and hit else "did not leave in time" if hit else "none"
        return Blow(began, bool(hit), f"{len(hit)} workers on it, {left}; then {blow.facts}")

    def _restart_driver(self, number: int) -> Blow:
        began = time.time()
        if number == signal.SIGTERM:
            code = self.job.stop()
            if code != 4:
                self.findings.append(f"the driver ended with exit code {code} after SIGTERM, not 4")
        else:
            self.job.send(number)
            self.job.exit_code()
        refused = self.job.refused
        self.job.start(self.machines.address)
        num_before = len(self.job.journal.attempts)
        self.job.wait_for("training after a new start", self._trains_since(num_before))
        again = self.job.refused - refused
        return Blow(began, True, f"refused {again} times at first" if again else "")

    def _lose_cluster(self) -> Blow:
        began = time.time()
        self.job.send(signal.SIGKILL)
        self.job.exit_code()
        rooms = self.machines.lose_all(self._forget_memory)
        self._forget_memory("*")
        self.machines.start_again(rooms)
        self.job.start(self.machines.address)
        return Blow(began, True)

    def _without(
        self, begin: Callable[[], None], end: Callable[[], None], steps: int, is_deaf: bool
    ) -> Blow:
        """While a disk refuses. Nothing is heard of the job where its journal is on it."""
        journal = self.job.journal
        began, seconds = time.time(), min(steps * journal.step_s(), LONGEST_FULL_S)
        begin()
        try:
            if is_deaf:
                time.sleep(seconds)
            else:
                self.job.wait_for_steps(steps)
        finally:
            end()
        ended = time.time()
        self.job.wait_for(
            "a checkpoint once the disk is usable again",
            lambda: bool(journal.since(ended, "checkpoint")),
        )
        alarms = journal.since(began, "alarm", what="checkpoint")
        if not alarms:
            self.findings.append(f"no alarm was raised at step {journal.step} for a useless disk")
        return Blow(began, False, f"{len(alarms)} alarms")

    # Damage

    def _damage_checkpoint(self, fault: DamageCheckpoint) -> Blow:
        root = self.job.run_dir / "checkpoints"
        self.job.wait_for("two checkpoints", lambda: len(reader.committed(root)) > 1)
        pids = self._ranks()
        with frozen(pids):
            names = reader.committed(root)
            path = self._file_of(root / names[0], fault)
            before = path.stat().st_size
            damage(path, fault.how, random.Random(fault.file))
            self._forget_memory("*")
            began = time.time()
            kill([pids[fault.rank % len(pids)]])
        return Blow(began, True, f"{path.name} of {names[0]}, {before} bytes")

    def _file_of(self, directory: Path, fault: DamageCheckpoint) -> Path:
        manifest = Manifest.read(directory)
        if fault.how == "manifest":
            return directory / MANIFEST
        if fault.how == "ledger":
            return self.job.run_dir / "ledger" / manifest.ledger[-1].file
        return directory / manifest.files[fault.file % len(manifest.files)].file

    def _damage_snapshot(self, fault: DamageSnapshot) -> Blow:
        pids = self._ranks()
        rank = fault.rank % len(pids)
        how = "torn" if fault.how == "record" else fault.how
        with frozen(pids):
            mine = [part for part in self._snapshots() if part.rank == rank]
            newest = [part for part in mine if part.age == max(p.age for p in mine)]
            for part in newest:
                path = Path(part.file)
                with suppress(FileNotFoundError):  # the holder was quicker
                    damage(
                        path.with_suffix(".json") if fault.how == "record" else path,
                        how,
                        random.Random(rank),
                    )
            began = time.time()
            kill([pids[rank]])
        steps = {part.moment.step for part in newest}
        return Blow(began, True, f"{len(newest)} copies of step {', '.join(map(str, steps))}")

    def _roots(self) -> Roots | None:
        key = self.job.run_dir / KEY_FILE
        return Roots.of(self.job.run_dir, key.read_text()) if key.is_file() else None

    def _snapshots(self) -> list[Part]:
        roots = self._roots()
        return snapshot.find(roots.paths) if roots else []

    def _forget_memory(self, node_id: str) -> None:
        """What a lost machine had in memory is gone; here it would still be there."""
        roots = self._roots()
        for root in roots.paths if roots else ():
            for directory in root.glob(node_id):
                shutil.rmtree(directory, ignore_errors=True)


def damage(path: Path, how: str, dice: random.Random) -> None:
    """Does to a file what disks, power cuts and half-finished copies do."""
    if how == "missing":
        path.unlink()
        return
    content = bytearray(path.read_bytes())
    half = len(content) // 2
    if how == "short":
        path.write_bytes(content[:half])
    elif how == "torn":  # the size is right, the second half was never written
        path.write_bytes(content[:half] + bytes(len(content) - half))
    else:
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        path.write_bytes(content)
