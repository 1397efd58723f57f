"""The actor that keeps a job's record, and through which the driver and the ranks speak.

It lives on the driver's node, outlives worker groups, and alone writes the journal and MLflow. Rank
0 sends it events; the answer says whether the job was asked to stop.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from pliant.errors import UserError
from pliant.spec import JobSpec
from pliant.tracking import MlflowTracker, system_metrics
from pliant.tracking.events import Event, replay

NAMESPACE = "pliant"


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
        history = replay(self._tracker.journal.events())
        self._num_attempts = len(history.attempts)
        self._step = max(history.steps, default=0)
        self._drills_done = {
            event["drill"] for event in self._tracker.journal.events() if event["kind"] == "drill"
        }
        self._is_first_here = True
        self._failed = False
        self._stop = False
        self._state = "starting"
        self._world_size = 0
        self._metrics: dict[str, float] = {}
        self._news: list[str] = []
        self._closed = threading.Event()
        tell_warnings(self._news.append)
        self._tracker.journal.append({"kind": "job", "pid": os.getpid()})
        self._tracker.start()
        every_s = spec.tracking.system_metrics_every_s
        threading.Thread(target=self._sample, args=(every_s,), daemon=True).start()

    def begin_attempt(self, world_size: int, step: int) -> tuple[int, bool]:
        """A worker group is ready to go on from `step`; its number, and whether to stop at once."""
        self._num_attempts += 1
        cause = self._cause()
        self._tell_attempt(cause, world_size, step)
        self._tracker.journal.append(
            {
                "kind": "attempt",
                "attempt": self._num_attempts,
                "world_size": world_size,
                "step": step,
                "cause": cause,
                "metrics": {"world_size": float(world_size)},
            }
        )
        self._is_first_here = self._failed = False
        self._state, self._world_size, self._step = "training", world_size, step
        return self._num_attempts, self._stop

    def record(self, events: list[Event]) -> bool:
        """Keeps the events; tells whether the job was asked to stop."""
        for event in events:
            self._tracker.journal.append(event)
            if event["kind"] == "step":
                self._step, self._metrics = event["step"], event["metrics"]
            elif event["kind"] == "evaluation":
                for name, loss in event["metrics"].items():
                    self._news.append(f"step {event['step']}: {name} {loss:.4f}")
            elif event["kind"] == "note":
                self._news.append(event["text"])
        return self._stop

    def failed(self, reason: str) -> None:
        """A worker group ended before its time."""
        self._failed = True
        self._state = "starting"
        self._news.append(f"step {self._step}: {reason}")
        self._tracker.journal.append({"kind": "restart", "step": self._step, "reason": reason})

    def claim_drill(self, number: int, what: str) -> bool:
        """True for the first who asks for the drill in the life of the job."""
        if number in self._drills_done:
            return False
        self._drills_done.add(number)
        self._news.append(f"step {self._step}: drill: {what}")
        self._tracker.journal.append(
            {"kind": "drill", "step": self._step, "drill": number, "what": what}
        )
        self._tracker.journal.sync()
        return True

    def request_stop(self) -> None:
        """The ranks stop after their present step."""
        self._stop = True

    def status(self) -> Status:
        news = tuple(self._news)
        del self._news[: len(news)]
        return Status(self._state, self._step, self._world_size, dict(self._metrics), news)

    def artifact(self, path: Path) -> None:
        self._tracker.artifact(path)

    def append(self, event: Event) -> None:
        self._tracker.journal.append(event)

    def run_id(self, wait_s: float) -> str | None:
        """MLflow's id of the run; waits for it where the server was not reached yet."""
        end = time.monotonic() + wait_s
        while self._tracker.run_id is None and time.monotonic() < end:
            time.sleep(0.05)
        return self._tracker.run_id

    def finish(self, status: Any, deadline_s: float) -> int:
        """Ends the MLflow run; how many events could not be sent."""
        self._closed.set()
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
            self._tracker.journal.append(event)


def start_recorder(run_dir: Path, spec: JobSpec, uri: str, tags: dict[str, str]) -> Any:
    """The job's recorder, on this node. Raises `UserError` where the cluster has one already."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    actor = ray.remote(num_cpus=0, max_concurrency=8)(Recorder).options(
        name=recorder_name(spec.name), namespace=NAMESPACE, scheduling_strategy=here
    )
    try:
        return actor.remote(run_dir, spec, uri, tags)
    except ValueError:
        raise UserError(
            f"A job named {spec.name} runs on this cluster already. Stop it, or choose another "
            "name."
        ) from None


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


class Reporter:
    """Rank 0's line to the recorder: events go out together, one call at a time, and the training
    loop never waits for an answer."""

    def __init__(self, recorder: Any, stop: threading.Event) -> None:
        self._recorder = recorder
        self._stop = stop
        self._events: list[Event] = []
        self._call: Any = None

    def report(self, event: Event) -> None:
        self._events.append({"time": time.time(), **event})
        if self._call is not None and not self._answered(timeout_s=0):
            return
        self._send()

    def flush(self) -> None:
        """Returns once everything has been recorded."""
        while self._call is not None or self._events:
            if self._call is None:
                self._send()
            self._answered(timeout_s=None)

    def _send(self) -> None:
        self._call, self._events = self._recorder.record.remote(self._events), []

    def _answered(self, timeout_s: float | None) -> bool:
        done, _ = ray.wait([self._call], timeout=timeout_s)
        if not done:
            return False
        if ray.get(self._call):
            self._stop.set()
        self._call = None
        return True
