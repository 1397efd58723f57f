"""The actor that keeps a job's record, and through which driver, controller and ranks speak.

It lives on the driver's node, outlives worker groups, and alone writes the journal and MLflow. Rank
0 sends it events; the answer says what is wanted of the worker group.
"""

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from pliant.checkpoints.places import places_of
from pliant.checkpoints.retention import Policy, prune
from pliant.elastic.beats import Beat
from pliant.elastic.ray_adapter import Orders
from pliant.elastic.wish import Wish
from pliant.errors import UserError
from pliant.spec import JobSpec
from pliant.tracking import MlflowTracker, system_metrics
from pliant.tracking.events import Event, replay
from pliant.training.commit import Answer, Commits, Committer, RankSaved
from pliant.training.supervision import Supervision

NAMESPACE = "pliant"
LISTEN_EVERY_S = 0.5
PREDECESSOR_S = 10.0


@dataclass(frozen=True)
class Status:
    """What the driver shows while the job runs."""

    state: str
    """"starting" or "training"."""
    step: int
    world_size: int
    metrics: dict[str, float]
    """Of the last step."""
    news: tuple[str, ...]
    """Sentences since the last call, oldest first."""
    gave_up: str | None
    """Why no further attempt is made; None while the job may go on."""


class Recorder:
    """The actor's class; made by `start_recorder`."""

    def __init__(self, run_dir: Path, spec: JobSpec, uri: str, tags: dict[str, str]) -> None:
        os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
        self._tracker = MlflowTracker(
            uri=uri,
            experiment=spec.tracking.experiment,
            run_name=spec.name,
            run_dir=run_dir,
            tags={**spec.tracking.tags, **tags},
            params=spec.model_dump(mode="json"),
        )
        earlier = list(self._tracker.journal.events())
        history = replay(earlier)
        self._num_attempts = len(history.attempts)
        self._step = max(history.steps, default=0)
        self._drills_done = {event["drill"] for event in earlier if event["kind"] == "drill"}
        self._is_first_here = True
        self._failed = False
        self._wish = Wish.NONE
        self._wanted: int | None = None
        self._saved_step = 0
        self._gave_up: str | None = None
        self._state = "starting"
        self._world_size = 0
        self._metrics: dict[str, float] = {}
        self._news: list[str] = []
        self._closed = threading.Event()
        self._unwritten: deque[Event] = deque()
        self._writing = threading.Lock()
        kinds = Counter(event["kind"] for event in earlier)
        self._num_failures, self._num_alarms = kinds["restart"], kinds["alarm"]
        self._steps_lost = history.steps_lost
        self._began = next((event["time"] for event in earlier), time.time())
        places = places_of(run_dir, spec.checkpoint.storage)
        policy = Policy.of(spec.checkpoint)
        self._committer = Committer(
            places,
            prune=lambda _: prune(places.checkpoints, policy, places.ledger),
            tell=lambda event: self.record([event]),
            observed=lambda: (self._num_failures, max(time.time() - self._began, 0.0)),
        )
        self._withheld: set[int] = {e["step"] for e in earlier if e["kind"] == "rewind"}
        self._broken: dict[str, str] = {}
        self._supervision = Supervision(spec.elastic, lambda event: self.record([event]))
        tell_warnings(self._news.append)
        self.append({"kind": "job", "pid": os.getpid()})
        self._tracker.start()
        every_s = spec.tracking.system_metrics_every_s
        threading.Thread(target=self._sample, args=(every_s,), daemon=True).start()

    def begin_attempt(self, world_size: int, step: int) -> tuple[int, Wish, frozenset[int]]:
        """A worker group is ready to go on from `step`: its number, what is wanted of it, and the
        steps whose updates are to be left out."""
        self._num_attempts += 1
        self._committer.begin(self._num_attempts)
        cause = self._cause()
        self._tell_attempt(cause, world_size, step)
        self._steps_lost += max(self._step - step, 0)
        self.append(
            {
                "kind": "attempt",
                "attempt": self._num_attempts,
                "world_size": world_size,
                "step": step,
                "cause": cause,
                "metrics": {
                    "world_size": float(world_size),
                    "restarts": float(self._num_failures),
                    "steps_lost": float(self._steps_lost),
                },
            }
        )
        self._is_first_here = self._failed = False
        self._state, self._world_size = "training", world_size
        self._step = self._saved_step = step
        if self._wish is not Wish.STOP:
            self._wish = Wish.NONE
        return self._num_attempts, self._wish, frozenset(self._withheld)

    def record(self, events: list[Event]) -> Wish:
        """Keeps the events; tells what is wanted of the worker group."""
        for event in events:
            if event["kind"] == "alarm":
                self._num_alarms += 1
                count = {"alarms": float(self._num_alarms)}
                event = {"step": self._step, **event, "metrics": count}
            self.append(event)
            if event["kind"] == "step":
                self._step, self._metrics = event["step"], event["metrics"]
            elif event["kind"] == "evaluation":
                for name, loss in event["metrics"].items():
                    self._news.append(f"step {event['step']}: {name} {loss:.4f}")
            elif event["kind"] == "checkpoint":
                self._saved_step = max(self._saved_step, event["step"])
            elif event["kind"] in ("note", "alarm"):
                self._news.append(event["text"])
        return self._wish

    def rank_saved(self, report: RankSaved) -> Answer:
        """A rank has stored its part of a checkpoint, or could not."""
        return self._committer.rank_saved(report)

    def wish(self) -> Wish:
        """What is wanted of the worker group, for a rank whose steps take long."""
        return self._wish

    def failed(self, reason: str) -> tuple[int, int]:
        """A worker group ended before its time; (the step being done, the last step saved)."""
        self._failed = True
        self._num_failures += 1
        self._state = "starting"
        self._supervision.attempt_over()
        self._news.append(f"step {self._step}: {reason}")
        self.append({"kind": "restart", "step": self._step, "reason": reason})
        return self._step, self._saved_step

    def rewind(self, step: int, reason: str) -> None:
        """Training goes back to the last checkpoint, and leaves out the update of `step`."""
        self._withheld.add(step)
        self._state, self._failed = "starting", True
        self._supervision.attempt_over()
        self._news.append(reason)
        self.append({"kind": "rewind", "step": step, "reason": reason})

    def beat(self, beat: Beat) -> bool:
        """A rank's sign of life; whether it shall write down its stacks."""
        return self._supervision.beat(beat)

    def broken(self, node: str, reasons: list[str]) -> None:
        """An accelerator on that node has failed its check."""
        if node not in self._broken:
            text = f"node {node[:8]} is left out of the next worker group: {'; '.join(reasons)}"
            self.record([{"kind": "alarm", "what": "hardware", "text": text}])
        self._broken[node] = "; ".join(reasons)

    def gave_up(self, reason: str) -> None:
        """No further attempt will be made."""
        self._gave_up = reason

    def orders(self) -> Orders:
        """What is wanted of the controller."""
        return Orders(
            wanted=self._wanted,
            kill=self._supervision.take_doomed(),
            broken=dict(self._broken),
            is_training=self._state == "training",
        )

    def want_workers(self, wanted: int | None) -> None:
        """Somebody asks for this number of workers; None: as many as there is room for."""
        self._wanted = wanted

    def request_resize(self, num_workers: int, reason: str, leaves_node: bool) -> None:
        """The workers are to make their state safe and end, so that the group can be resized."""
        self._wish = max(self._wish, Wish.DRAIN if leaves_node else Wish.RESIZE)
        self._supervision.attempt_over()  # the handshake has a limit of its own
        goal = f"to {num_workers} workers" if num_workers else "when there is room again"
        self._news.append(f"step {self._step}: resizing from {self._world_size} {goal}: {reason}")
        self.append(
            {
                "kind": "resize",
                "step": self._step,
                "from": self._world_size,
                "to": num_workers,
                "reason": reason,
            }
        )

    def claim_drill(self, number: int, what: str) -> bool:
        """True for the first who asks for the drill in the life of the job."""
        if number in self._drills_done:
            return False
        self._drills_done.add(number)
        self._news.append(f"step {self._step}: drill: {what}")
        self.append({"kind": "drill", "step": self._step, "drill": number, "what": what})
        self._tracker.journal.sync()
        return True

    def request_stop(self) -> None:
        """The ranks stop after their present step."""
        self._wish = Wish.STOP

    def status(self) -> Status:
        news = tuple(self._news)
        del self._news[: len(news)]
        return Status(
            self._state, self._step, self._world_size, dict(self._metrics), news, self._gave_up
        )

    def artifact(self, path: Path) -> None:
        self._tracker.artifact(path)

    def append(self, event: Event) -> None:
        """Keeps an event. Where the disk takes none, it waits in memory: training goes on."""
        with self._writing:
            self._unwritten.append({"time": time.time(), **event})
            try:
                while self._unwritten:
                    self._tracker.journal.append(self._unwritten[0])
                    self._unwritten.popleft()
            except OSError as error:
                if len(self._unwritten) == 1:
                    self._news.append(f"the journal cannot be written, training goes on: {error}")

    def run_id(self, wait_s: float) -> str | None:
        """MLflow's id of the run; waits for it where the server was not reached yet."""
        end = time.monotonic() + wait_s
        while self._tracker.run_id is None and time.monotonic() < end:
            time.sleep(0.05)
        return self._tracker.run_id

    def finish(self, status: Any, deadline_s: float) -> int:
        """Ends the MLflow run; how many events could not be sent."""
        self._closed.set()
        self._supervision.close()
        self._tracker.journal.sync()
        return self._tracker.finish(status, deadline_s)

    def _cause(self) -> str:
        if self._is_first_here:
            return "continued" if self._num_attempts > 1 else "start"
        return "failure" if self._failed else "resize"

    def _tell_attempt(self, cause: str, world_size: int, step: int) -> None:
        workers = f"{world_size} worker{'s' if world_size > 1 else ''}"
        if cause == "start":
            self._news.append(f"training starts with {workers}")
        else:
            lost = max(self._step - step, 0)
            again = f", {lost} done again" if lost else ""
            self._news.append(f"training goes on from step {step} with {workers}{again}")

    def _sample(self, every_s: float) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        while not self._closed.wait(every_s):
            event = {"kind": "system", "step": self._step, "metrics": system_metrics.sample()}
            self.append(event)


def start_recorder(run_dir: Path, spec: JobSpec, uri: str, tags: dict[str, str]) -> Any:
    """The job's recorder, on this node. Raises `UserError` where the cluster has one already: that
    of a driver that was just killed takes a while to go."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    actor = ray.remote(num_cpus=0, max_concurrency=8)(Recorder).options(
        name=recorder_name(spec.name), namespace=NAMESPACE, scheduling_strategy=here
    )
    end = time.monotonic() + PREDECESSOR_S
    while True:
        try:
            return actor.remote(run_dir, spec, uri, tags)
        except ValueError:
            if time.monotonic() > end:
                raise UserError(
                    f"A job named {spec.name} runs on this cluster already. Stop it, or choose "
                    "another name."
                ) from None
        time.sleep(0.5)


def tell_warnings(tell: Callable[[str], object]) -> None:
    """Passes on what pliant warns of in this process, where nobody reads the log."""

    class Telling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tell(record.getMessage())

    logger = logging.getLogger("pliant")
    for handler in logger.handlers[:]:
        if type(handler).__name__ == Telling.__name__:
            logger.removeHandler(handler)
    logger.addHandler(Telling(level=logging.WARNING))


def recorder_name(job: str) -> str:
    return f"recorder-{job}"


def commits_of(job: str) -> Commits:
    """How the job's ranks reach its committer, from any thread."""

    def rank_saved(report: RankSaved) -> Answer:
        recorder = ray.get_actor(recorder_name(job), namespace=NAMESPACE)
        return ray.get(recorder.rank_saved.remote(report))

    return rank_saved


class Reporter:
    """Rank 0's line to the recorder: events go out together, one call at a time, and the training
    loop never waits for an answer. What the recorder wishes comes back with the answers, and twice
    a second while a step takes long."""

    def __init__(self, recorder: Any, wish: Wish) -> None:
        self._recorder = recorder
        self._wish = wish
        self._events: list[Event] = []
        self._call: Any = None
        self._closed = threading.Event()
        threading.Thread(target=self._listen, daemon=True, name="wishes").start()

    def report(self, event: Event) -> None:
        self._events.append({"time": time.time(), **event})
        if self._call is not None and not self._answered(timeout_s=0):
            return
        self._send()

    def wish(self) -> Wish:
        """The latest that is known."""
        return self._wish

    def flush(self) -> None:
        """Returns once everything has been recorded."""
        while self._call is not None or self._events:
            if self._call is None:
                self._send()
            self._answered(timeout_s=None)

    def close(self) -> None:
        """Returns once everything has been recorded, as far as the recorder is there."""
        self._closed.set()
        with suppress(RayError):
            self.flush()

    def _send(self) -> None:
        self._call, self._events = self._recorder.record.remote(self._events), []

    def _answered(self, timeout_s: float | None) -> bool:
        done, _ = ray.wait([self._call], timeout=timeout_s)
        if not done:
            return False
        self._wish = ray.get(self._call)
        self._call = None
        return True

    def _listen(self) -> None:
        while not self._closed.wait(LISTEN_EVERY_S):
            with suppress(RayError):  # the recorder is gone, and with it the job
                self._wish = ray.get(self._recorder.wish.remote())
