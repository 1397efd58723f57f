"""What this rank is at, told to the watchdog about once a second.

The training thread marks phases; a mark is one clock reading and one assignment. A daemon thread
sends the beats, and writes down the stacks of all threads when it is asked to. It never raises and
never keeps the process alive.
"""

import faulthandler
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TextIO

from pliant.batch import StepBatch
from pliant.elastic.beats import Beat, Phase, StepTimes

log = logging.getLogger(__name__)

BEAT_S = 1.0
UNTOLD_STEPS = 1000
"""Steps kept for the next beat; older ones are dropped where the recorder is away."""


@dataclass(frozen=True)
class Member:
    """Which rank of which worker group this is."""

    attempt: int
    rank: int
    world_size: int
    node: str


class DeviceClock(Protocol):
    """Times what an accelerator does, where the host runs ahead of it."""

    def begin(self) -> None:
        """The step's own computing begins; called again in the same step, it does nothing."""

    def end(self) -> None:
        """The first collective of the step begins; from here on others are waited for."""

    def take_seconds(self) -> float | None:
        """Between the two in the step that was done; None where that is not known."""


class CudaClock:
    """Two events on the current stream, read when the step is done and the host has waited for its
    loss anyway."""

    def __init__(self) -> None:
        import torch

        self._make: Any = torch.cuda.Event
        self._events: list[Any] = []

    def begin(self) -> None:
        if not self._events:
            self._record()

    def end(self) -> None:
        if len(self._events) == 1:
            self._record()

    def take_seconds(self) -> float | None:
        events, self._events = self._events, []
        if len(events) < 2 or not events[1].query():
            return None
        return float(events[0].elapsed_time(events[1])) / 1000

    def _record(self) -> None:
        event = self._make(enable_timing=True)
        event.record()
        self._events.append(event)


class Phases:
    """The present phase and the times of the steps; marked by the training thread alone.

    With a `device` clock, a step's time in "compute" is what the accelerator took up to the step's
    first collective: the host's own time says little there.
    """

    def __init__(
        self,
        member: Member,
        clock: Callable[[], float] = time.monotonic,
        device: DeviceClock | None = None,
    ) -> None:
        self._member = member
        self._clock = clock
        self._device = device
        self._present: tuple[Phase, float, int, int] = ("start", clock(), 0, 0)
        """Phase, since when, steps done, collectives entered: one tuple, so that another thread
        sees all four as they were at one time."""
        self._seconds: dict[Phase, float] = {}
        self._untold: deque[StepTimes] = deque(maxlen=UNTOLD_STEPS)

    @property
    def phase(self) -> Phase:
        return self._present[0]

    def joined(self, attempt: int) -> None:
        """The attempt's number, once it is known."""
        self._member = replace(self._member, attempt=attempt)

    def resumed(self, step: int) -> None:
        """Training goes on from `step`; what came before was the start."""
        self._seconds = {}
        self._present = ("data", self._clock(), step, self._present[3])

    def enter(self, phase: Phase) -> None:
        """The phase that begins now ends the one before."""
        before, since, step, collectives = self._present
        now = self._clock()
        self._seconds[before] = self._seconds.get(before, 0.0) + now - since
        self._present = (phase, now, step, collectives + (phase == "collective"))
        if self._device is not None:
            if phase == "compute":
                self._device.begin()
            elif phase == "collective":
                self._device.end()

    def again(self, batch: StepBatch) -> StepBatch:
        """The present phase begins anew with this batch, which is handed back."""
        self.enter(self.phase)
        return batch

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """The phase, and then the one before again."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def step_done(self, step: int) -> None:
        """`step` steps are done, with all that follows a step; the next begins with its data."""
        self.enter("data")
        own_s = self._device.take_seconds() if self._device is not None else None
        if own_s is not None:
            self._seconds["compute"] = own_s
        self._untold.append(StepTimes(step, self._seconds))
        self._seconds = {}
        _, since, _, collectives = self._present
        self._present = ("data", since, step, collectives)

    def beat(self, dumps: int = 0, is_last: bool = False) -> Beat:
        """For the watchdog; called by one thread. Takes along the steps not told yet."""
        phase, since, step, collectives = self._present
        steps = [self._untold.popleft() for _ in range(len(self._untold))]
        return Beat(
            attempt=self._member.attempt,
            rank=self._member.rank,
            world_size=self._member.world_size,
            node=self._member.node,
            pid=os.getpid(),
            step=step,
            phase="end" if is_last else phase,
            phase_s=self._clock() - since,
            collectives=collectives,
            steps=tuple(steps),
            dumps=dumps,
        )


def marked_batches(phases: Phases, batches: Iterable[StepBatch], step: int) -> Iterator[StepBatch]:
    """The batches; what the loop does with each counts as computing, and what it waits for as
    data. `step` steps are done before the first."""
    for number, batch in enumerate(batches, start=step + 1):
        phases.enter("compute")
        yield batch
        phases.step_done(number)


COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter_tensor",
)
"""Functions of torch.distributed that wait for other ranks; DeepSpeed calls them by name too."""


@contextmanager
def marked_collectives(phases: Phases, distributed: ModuleType | Any) -> Iterator[None]:
    """Within it, torch.distributed's collectives mark their phase, whoever calls them. Without it a
    rank that waits for a peer inside the backward pass looks as if it computed. Enter it before
    DeepSpeed is initialised, which keeps some of them, and leave it after the engine is destroyed.

    A call that returns before it is carried out (NCCL, async_op) is marked for as long as the call
    takes; the wait shows where the host first needs the result.
    """
    originals = {name: getattr(distributed, name) for name in COLLECTIVES}

    def marked(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if phases.phase == "collective":  # one that consists of others
                return original(*args, **kwargs)
            with phases.during("collective"):
                return original(*args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(distributed, name, marked(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(distributed, name, original)


class Heart:
    """Sends the beats of `phases` until it is closed.

    `send` answers whether the stacks shall be written; they go to `stacks`, one after another. With
    `silent_s` they are written as well when this thread cannot run for so long, which is what a
    thread that never lets go of the interpreter looks like.
    """

    def __init__(
        self,
        phases: Phases,
        send: Callable[[Beat], object],
        stacks: Path,
        every_s: float = BEAT_S,
        silent_s: float | None = None,
    ) -> None:
        self._phases = phases
        self._send = send
        self._stacks = stacks
        self._every_s = every_s
        self._silent_s = silent_s
        self._dumps = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pliant-heart", daemon=True)

    def start(self) -> "Heart":
        self._thread.start()
        return self

    def close(self, wait_s: float = 1.0) -> None:
        """Ends the beats with a last one; waits for it no longer than `wait_s`."""
        self._closed.set()
        self._thread.join(wait_s)

    def _run(self) -> None:
        with _alarm_file(self._stacks, self._silent_s) as file:
            while not self._closed.is_set():
                self._arm(file)
                asked = self._tell(self._phases.beat(self._dumps))
                if asked:
                    self._dumps += 1
                    write_stacks(self._stacks, self._phases.beat(self._dumps))
                    continue  # the next beat says so
                self._closed.wait(self._every_s)
        self._tell(self._phases.beat(self._dumps, is_last=True))

    def _tell(self, beat: Beat) -> bool:
        """A recorder that is away is no reason to stop training."""
        try:
            return bool(self._send(beat))
        except Exception as error:
            log.debug("a beat was not sent: %s", error)
            return False

    def _arm(self, file: TextIO | None) -> None:
        if file is not None and self._silent_s is not None:
            faulthandler.dump_traceback_later(self._silent_s, file=file)


@contextmanager
def _alarm_file(stacks: Path, silent_s: float | None) -> Iterator[TextIO | None]:
    """Open beforehand: who writes to it then has no interpreter. Removed where nothing came."""
    if silent_s is None:
        yield None
        return
    path = stacks.with_suffix(".silent.txt")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError:
        yield None
        return
    try:
        yield file
    finally:
        faulthandler.cancel_dump_traceback_later()
        file.close()
        if path.exists() and path.stat().st_size == 0:
            path.unlink(missing_ok=True)


def write_stacks(path: Path, beat: Beat) -> None:
    """Appends the stacks of all threads, under a line that says when and in which phase."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(
                f"\n=== {time.strftime('%Y-%m-%d %H:%M:%S')}  rank {beat.rank} of "
                f"{beat.world_size}, pid {beat.pid}: phase {beat.phase} of step {beat.step + 1} "
                f"for {beat.phase_s:.1f} s\n"
            )
            file.flush()
            faulthandler.dump_traceback(file=file, all_threads=True)
    except OSError as error:
        log.warning("The stacks of rank %d could not be written: %s", beat.rank, error)
