"""One MLflow run per job: a thread follows the journal and sends it, whenever the server lets it.

Callers never wait for MLflow. What was not sent stays in the journal, and the next driver of the
job, or `sync`, goes on where this one stopped.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from pliant.errors import UserError
from pliant.files import file_lock
from pliant.tracking.events import Event
from pliant.tracking.journal import Journal
from pliant.tracking.mlflow_run import MAX_METRICS, MlflowRun, connect
from pliant.tracking.parameters import flatten_params, shorten
from pliant.tracking.run_state import STATE_FILE, RunState, Status, load_state, save_state

log = logging.getLogger(__name__)

JOURNAL_FILE = "events.jsonl"
ALARM_TAG = "pliant.alarm"
"""The last alarm, for who looks at the run in MLflow."""
POLL_S = 1.0
FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0


class MlflowTracker:
    """Sends a run's journal to MLflow in the background.

    `journal` is the writer of `run_dir/events.jsonl`, if the caller already has one: a journal has
    only one. `start` goes on with the run that `run_dir` knows, or creates one.
    """

    def __init__(
        self,
        uri: str,
        experiment: str,
        run_name: str,
        run_dir: Path,
        tags: Mapping[str, str],
        params: Mapping[str, Any],
        journal: Journal | None = None,
    ) -> None:
        self.journal = journal or Journal(run_dir / JOURNAL_FILE)
        self._run_dir = run_dir
        self._state = RunState(
            uri=uri,
            experiment=experiment,
            run_name=run_name,
            tags={name: shorten(str(value)) for name, value in tags.items()},
            params=flatten_params(params),
            start_time_ms=int(time.time() * 1000),
        )
        self._thread = threading.Thread(target=self._work, name="mlflow-tracker", daemon=True)
        self._saving = threading.Lock()
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._owner = False
        self._down = False
        self._retry_s = FIRST_RETRY_S
        self._maybe_sent = 0

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None until the server was first reached."""
        return self._state.run_id

    def start(self) -> None:
        """Begin to send, in a thread. Raises UserError if `mlflow.json` is damaged."""
        self._resume()
        self._thread.start()

    def artifact(self, path: Path, artifact_path: str | None = None) -> None:
        """Send a file or directory, as it will be when the server is reached. The queue is part of
        the journal; a path inside the run directory is kept relative to it."""
        path = path.resolve()
        with suppress(ValueError):
            path = path.relative_to(self._run_dir.resolve())
        self.journal.append({"kind": "artifact", "path": str(path), "artifact_path": artifact_path})

    def finish(self, status: Status, deadline_s: float) -> int:
        """Send what is waiting, end the MLflow run and stop the thread, in `deadline_s` seconds.

        Returns how many events were not sent, the end of the run counting as one; 0 is all.
        """
        self._state.end_time_ms = self._state.end_time_ms or int(time.time() * 1000)
        self._state.status = status
        self._save()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        self._stopped.set()
        self._wake.set()
        return self.unsent()

    def restore(self, state: RunState) -> None:
        """Be the tracker of an earlier process, its end included. To be called before `start`."""
        self._state = state

    def _work(self) -> None:
        with ExitStack() as held:
            while not self._stopped.is_set():
                try:
                    if not self._owner:
                        held.enter_context(self._sole_sender())
                    self._connect_and_follow()
                    return
                except Exception as error:
                    self._report_down(error)
                woken = self._pause(self._retry_s)
                self._retry_s = FIRST_RETRY_S if woken else min(2 * self._retry_s, LAST_RETRY_S)

    @contextmanager
    def _sole_sender(self) -> Iterator[None]:
        """A second sender, such as a driver that lingers on or `sync`, would repeat what this one
        sends; and only the sender writes the state."""
        with file_lock(self._run_dir / f"{STATE_FILE}.lock", wait=False):
            self._resume()
            self._owner = True
            self._save()
            yield

    def _resume(self) -> None:
        known = load_state(self._run_dir)
        if known is not None and known.uri == self._state.uri:
            self._state.resume(known)

    def _connect_and_follow(self) -> None:
        """Send events as they come, until `finish`. A failure ends the connection, since only a
        new one learns from the server what it accepted."""
        self._maybe_sent = self.journal.size_bytes()
        run = connect(self._state)
        self._state.ended = False
        self._save()
        while not self._stopped.is_set():
            status = self._state.status
            self._send_events(run)
            self._send_files(run)
            self._report_up()
            if status is not None:
                self._end(run, status)
                return
            self._pause(POLL_S)

    def _send_events(self, run: MlflowRun) -> None:
        while not self._stopped.is_set():
            metrics, files, alarm, offset = self._next_batch(run)
            if offset == self._state.offset:
                return
            run.send(metrics)
            if alarm is not None:
                run.tag(ALARM_TAG, shorten(alarm))
            queue = [file for file in self._state.artifacts if file not in files]
            self._state.artifacts = queue + files
            self._state.offset = offset
            self._save()

    def _next_batch(
        self, run: MlflowRun
    ) -> tuple[list[Any], list[list[str | None]], str | None, int]:
        """New metrics of about one request, files and the last alarm met among them, and the
        offset behind them."""
        metrics: list[Any] = []
        files: list[list[str | None]] = []
        alarm: str | None = None
        offset = self._state.offset
        for event, after in self.journal.read(offset):
            offset = after
            metrics += run.new_metrics(event, maybe_sent=offset <= self._maybe_sent)
            if event["kind"] == "artifact":
                files.append([event["path"], event["artifact_path"]])
            elif event["kind"] == "alarm":
                alarm = str(event["text"])
            if len(metrics) >= MAX_METRICS:
                break
        return metrics, files, alarm, offset

    def _send_files(self, run: MlflowRun) -> None:
        """Files come after metrics: the store of artifacts may fail by itself."""
        while self._state.artifacts and not self._stopped.is_set():
            path, artifact_path = self._state.artifacts[0]
            file = self._run_dir / str(path)
            if file.exists():
                run.send_file(file, artifact_path)
            else:
                log.warning("%s was to be sent to MLflow, but is no longer there.", file)
            self._state.artifacts = self._state.artifacts[1:]
            self._save()

    def _end(self, run: MlflowRun, status: Status) -> None:
        run.end(status, self._state.end_time_ms or int(time.time() * 1000))
        self._state.ended = True
        self._save()

    def unsent(self) -> int:
        """Events that the server does not have yet, the end of the run counting as one."""
        waiting = sum(1 for event, _ in self.journal.read(self._state.offset) if _is_sent(event))
        return waiting + len(self._state.artifacts) + (0 if self._state.ended else 1)

    def _save(self) -> None:
        with self._saving:
            if self._owner:
                save_state(self._run_dir, self._state)

    def _pause(self, seconds: float) -> bool:
        """Whether `finish` cut the pause short."""
        woken = self._wake.wait(seconds)
        self._wake.clear()
        return woken

    def _report_down(self, error: Exception) -> None:
        if isinstance(error, BlockingIOError):
            reason = "another process is sending this run's events"
        else:
            reason = shorten(f"{type(error).__name__}: {error}", 300)
        level = logging.DEBUG if self._down else logging.WARNING
        kept = "Events are kept in %s and sent as soon as possible."
        log.log(level, f"MLflow at %s: %s. {kept}", self._state.uri, reason, self.journal.path)
        self._down = True

    def _report_up(self) -> None:
        if self._down:
            log.info("MLflow at %s is back; everything is sent.", self._state.uri)
        self._down = False
        self._retry_s = FIRST_RETRY_S


def sync(run_dir: Path, deadline_s: float = 60.0, status: Status | None = None) -> int:
    """Send what an ended run left unsent, and end its MLflow run: with `status`, or with the one
    that the job reported, or else (its driver was killed) with KILLED.

    Returns as `MlflowTracker.finish`. Raises UserError if `run_dir` has no recorded run.
    """
    state = load_state(run_dir)
    if state is None:
        raise UserError(
            f"{run_dir} has no {STATE_FILE}, so no job was recorded there. Give the directory of "
            "a run.",
            run_dir=str(run_dir),
        )
    tracker = MlflowTracker(
        state.uri, state.experiment, state.run_name, run_dir, state.tags, state.params
    )
    tracker.restore(state)
    if tracker.unsent() == 0:
        return 0
    tracker.start()
    return tracker.finish(status or state.status or "KILLED", deadline_s)


def _is_sent(event: Event) -> bool:
    return event["kind"] == "artifact" or bool(event.get("metrics"))
