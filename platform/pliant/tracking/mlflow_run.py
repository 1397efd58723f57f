"""One run on an MLflow server: finding or creating it, and sending to it without repeats."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pliant import __version__
from pliant.files import file_lock
from pliant.tracking import mlflow_library
from pliant.tracking.events import BY_STEP, Event
from pliant.tracking.parameters import clean_name
from pliant.tracking.run_state import RunState

log = logging.getLogger(__name__)

EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""MLflow's page then opens on training runs, not on traces of agents."""
MAX_METRICS = 1000
MAX_TAGS = 100
MAX_CHARACTERS = 150_000
"""Of the parameters of one request: MLflow takes 1 MB, and escapes a character as up to 6 bytes."""
KEY_TAG = "pliant.run_key"
_SQLITE = "sqlite:///"
_GONE = "RESOURCE_DOES_NOT_EXIST"
_REJECTED = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")


@dataclass(frozen=True)
class Mark:
    """The newest value of a metric that the server has."""

    step: int
    time_ms: int


class MlflowRun:
    """A run that exists. Its methods raise MLflow's errors if the server cannot be reached."""

    def __init__(self, client: Any, run_id: str, marks: dict[str, Mark]) -> None:
        self.run_id = run_id
        self._client = client
        self._marks = marks

    def describe(self, tags: Mapping[str, str], params: Mapping[str, str]) -> None:
        """Set tags and parameters. A parameter keeps its first value, for MLflow never changes
        one; another value goes to the tag `pliant.changed.NAME`."""
        entities = mlflow_library.load("mlflow.entities")
        known = self._client.get_run(self.run_id).data.params
        changed = {k: v for k, v in params.items() if k in known and known[k] != v}
        all_tags = {**tags, **{f"pliant.changed.{k}": v for k, v in changed.items()}}
        new = [entities.Param(k, v) for k, v in params.items() if k not in known]
        for chunk in _chunks(new):
            self._client.log_batch(self.run_id, params=chunk, synchronous=True)
        for chunk in _chunks([entities.RunTag(clean_name(k), v) for k, v in all_tags.items()]):
            self._client.log_batch(self.run_id, tags=chunk, synchronous=True)

    def new_metrics(self, event: Event, *, maybe_sent: bool) -> list[Any]:
        """The event's metrics as MLflow's, without those that the server already has.

        `maybe_sent`: whether the event may have been accepted by the server unnoticed, just before
        the last connection broke off.
        """
        metric = mlflow_library.load("mlflow.entities").Metric
        time_ms, by_step = int(event["time"] * 1000), event["kind"] in BY_STEP
        fresh = []
        for name, value in _numbers(event):
            mark = self._marks.get(name, Mark(step=-1, time_ms=-1))
            step = int(event.get("step") or 0)
            seen = step <= mark.step if by_step else maybe_sent and time_ms <= mark.time_ms
            if not seen:
                # Steps of one metric never fall, so that the server's latest value is also the
                # one sent last, and tells after a crash what has been sent.
                self._marks[name] = Mark(max(step, mark.step), time_ms)
                fresh.append(metric(name, value, time_ms, self._marks[name].step))
        return fresh

    def send(self, metrics: Sequence[Any]) -> None:
        """Send metrics in their order. One that the server rejects for itself is dropped with a
        warning, since the rest would wait behind it for ever."""
        for start in range(0, len(metrics), MAX_METRICS):
            batch = metrics[start : start + MAX_METRICS]
            try:
                self._client.log_batch(self.run_id, metrics=batch, synchronous=True)
            except Exception as error:
                if not self._rejects(error):
                    raise
                self._send_singly(batch)

    def tag(self, name: str, value: str) -> None:
        self._client.set_tag(self.run_id, name, value)

    def send_file(self, path: Path, artifact_path: str | None) -> None:
        """Upload a file or, with all that is in it, a directory."""
        if path.is_dir():
            self._client.log_artifacts(self.run_id, str(path), artifact_path)
        else:
            self._client.log_artifact(self.run_id, str(path), artifact_path)

    def end(self, status: str, time_ms: int) -> None:
        self._client.set_terminated(self.run_id, status, end_time=time_ms)

    def _send_singly(self, metrics: Sequence[Any]) -> None:
        for metric in metrics:
            try:
                self._client.log_batch(self.run_id, metrics=[metric], synchronous=True)
            except Exception as error:
                if not self._rejects(error):
                    raise
                log.warning("MLflow rejected %s at step %d: %s", metric.key, metric.step, error)

    def _rejects(self, error: Exception) -> bool:
        """Whether it is the values that are refused: a deleted run refuses everything."""
        refused = getattr(error, "error_code", None) in _REJECTED
        return refused and self._client.get_run(self.run_id).info.lifecycle_stage == "active"


def connect(state: RunState) -> MlflowRun:
    """The run of `state` on its server, created unless it exists, and set to running.

    A run that was deleted on the server is replaced, and `state` then starts from the first event.
    """
    with _first_contact(state.uri):
        client = mlflow_library.load("mlflow.tracking").MlflowClient(state.uri)
        run = _existing(client, state) or _created(client, state)
    state.run_id = run.info.run_id
    if run.info.status != "RUNNING":
        client.update_run(state.run_id, status="RUNNING")
    latest = run.to_proto().data.metrics
    marks = {m.key: Mark(step=m.step, time_ms=m.timestamp) for m in latest}
    connected = MlflowRun(client, run.info.run_id, marks)
    _describe(connected, state)
    return connected


def _describe(run: MlflowRun, state: RunState) -> None:
    try:
        run.describe({**_own_tags(state), **state.tags}, state.params)
    except Exception as error:
        if getattr(error, "error_code", None) not in _REJECTED:
            raise
        log.warning("MLflow rejected parameters or tags of the run: %s", error)


def _existing(client: Any, state: RunState) -> Any | None:
    if state.run_id is None:
        return None
    try:
        run = client.get_run(state.run_id)
    except Exception as error:
        if getattr(error, "error_code", None) != _GONE:
            raise
        run = None
    if run is not None and run.info.lifecycle_stage == "active":
        return run
    log.warning("MLflow run %s was deleted; the job is recorded anew.", state.run_id)
    state.forget_run()
    return None


def _created(client: Any, state: RunState) -> Any:
    experiment_id = _experiment_id(client, state)
    same = client.search_runs([experiment_id], f"tags.`{KEY_TAG}` = '{state.key}'", max_results=1)
    if same:
        return client.get_run(same[0].info.run_id)
    return client.create_run(
        experiment_id, state.start_time_ms, tags={KEY_TAG: state.key}, run_name=state.run_name
    )


def _experiment_id(client: Any, state: RunState) -> str:
    experiment = client.get_experiment_by_name(state.experiment)
    if experiment is None:
        try:
            return client.create_experiment(
                state.experiment, _artifact_location(state.uri), tags=EXPERIMENT_TAGS
            )
        except Exception as error:
            if getattr(error, "error_code", None) != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = client.get_experiment_by_name(state.experiment)
    if experiment.lifecycle_stage != "active":
        client.restore_experiment(experiment.experiment_id)
    return experiment.experiment_id


def _own_tags(state: RunState) -> dict[str, str]:
    return {
        KEY_TAG: state.key,
        "mlflow.source.name": "pliant",
        "mlflow.source.type": "JOB",
        "pliant.version": __version__,
    }


def database_path(uri: str) -> Path | None:
    """The file of an SQLite store; None for any other store."""
    if not uri.startswith(_SQLITE):
        return None
    return Path(uri.removeprefix(_SQLITE).partition("?")[0]).absolute()


def _first_contact(uri: str) -> AbstractContextManager[None]:
    """Jobs that create the same SQLite store at the same moment take turns."""
    database = database_path(uri)
    return file_lock(database.with_name(f"{database.name}.lock")) if database else nullcontext()


def _artifact_location(uri: str) -> str | None:
    database = database_path(uri)
    return (database.parent / "mlartifacts").as_uri() if database else None


def _numbers(event: Event) -> Iterator[tuple[str, float]]:
    for name, value in (event.get("metrics") or {}).items():
        if isinstance(value, int | float):
            yield clean_name(name), float(value)


def _chunks(pairs: Iterable[Any]) -> Iterator[list[Any]]:
    """Parameters or tags in requests of a size that MLflow accepts."""
    chunk: list[Any] = []
    room = MAX_CHARACTERS
    for pair in pairs:
        needed = len(pair.key) + len(pair.value)
        if chunk and (len(chunk) == MAX_TAGS or needed > room):
            yield chunk
            chunk, room = [], MAX_CHARACTERS
        chunk.append(pair)
        room -= needed
    if chunk:
        yield chunk
