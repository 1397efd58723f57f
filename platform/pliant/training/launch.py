"""The driver's side of a job: from a spec to a summary.

The steps in order: take the run directory, prepare the data, resolve the spec, start the recorder
and the feeder, let Ray Train run the workers, then compare the ledger with the plan and sum up.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import ray
import yaml
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig
from ray.train.v2.api.exceptions import TrainingFailedError

from pliant.checkpoints import reader
from pliant.checkpoints.manifest import Manifest
from pliant.checkpoints.writer import need_space
from pliant.data.feeder import BlockGrid, start_feeder, stop_feeder
from pliant.data.ledger import Audit, audit
from pliant.data.plan import DataPlan, PlanSettings
from pliant.data.prepare import prepare
from pliant.data.store import Prepared
from pliant.elastic.ray_adapter import (
    ElasticTrainer,
    FailureReport,
    pliant_error_in,
    tune_environment,
)
from pliant.errors import ClusterError, Interrupted, JobError, PliantError, SpecError, UserError
from pliant.files import file_lock, write_atomically
from pliant.spec import JobSpec
from pliant.spec.dotted import load_dotted
from pliant.spec.resolve import Facts, resolve
from pliant.tracking import (
    Journal,
    Summary,
    environment_manifest,
    loss_plot,
    read_summary,
    summarize,
    write_summary,
)
from pliant.tracking.mlflow_tracker import JOURNAL_FILE
from pliant.tracking.redaction import recordable
from pliant.training.deepspeed_config import deepspeed_config
from pliant.training.model import count_beforehand
from pliant.training.recorder import Status, start_recorder
from pliant.training.worker import WorkerTask, run_worker

BYTES_PER_PARAMETER = 12
"""Of a checkpoint: an fp32 master and two moments."""
TRACKING_DEADLINE_S = 30.0
RUN_ID_DEADLINE_S = 5.0
POLL_S = 0.25


class Display(Protocol):
    """Shows a person how the job is doing."""

    def say(self, sentence: str) -> None:
        """Something worth a line."""

    def prepared(self, done: int, total: int) -> None:
        """Chunks of data prepared so far."""

    def update(self, status: Status, total_steps: int) -> None:
        """Called a few times a second."""


class StopSignal(Protocol):
    """Set when the user wants the job to stop."""

    def is_set(self) -> bool: ...


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    summary: Summary
    run_dir: Path
    mlflow_uri: str
    error: PliantError | None
    unsent_events: int


def run_job(spec: JobSpec, runs_dir: Path, display: Display, stop: StopSignal) -> Outcome:
    """Runs the job to its end, or on from where it was. Needs a running Ray.

    Raises `UserError` where the job cannot be started; nothing is left behind then. What happens
    once it runs is told by the outcome.
    """
    check_plugins(spec)
    tune_environment(spec.elastic.start_timeout_s)
    run_dir = runs_dir / spec.name
    with _sole_driver(run_dir):
        task, manifest = plan_job(spec, runs_dir, run_dir, display, stop)
        uri = spec.tracking.mlflow_uri or f"sqlite:///{runs_dir / 'mlflow.db'}"
        earlier = _finished_before(task, uri)
        if earlier is not None:
            display.say(
                f"{spec.name} is finished: {earlier.summary.steps} steps. Raise training.steps to "
                "go on, or choose another name."
            )
            return earlier
        write_atomically(run_dir / "manifest.json", _json(manifest))
        write_atomically(run_dir / "spec.yaml", _yaml(spec))
        write_atomically(run_dir / "resolved.yaml", _yaml(task.spec))
        display.say(_start_line(task.spec))
        recorder = start_recorder(run_dir, task.spec, uri, _tags(manifest))
        start_feeder(spec.name, task.grid)
        try:
            error = _run_workers(task, recorder, display, stop)
        finally:
            stop_feeder(spec.name)
        return _conclude(task, recorder, uri, error, stop)


def _finished_before(task: WorkerTask, uri: str) -> Outcome | None:
    """How the job ended, where it was started again though there is nothing left to do."""
    path = task.run_dir / "summary.json"
    if not path.is_file():
        return None
    summary = read_summary(path)
    is_done = summary.state == "FINISHED" and summary.steps == task.spec.training.steps
    return Outcome(summary, task.run_dir, uri, None, 0) if is_done else None


def check_plugins(spec: JobSpec) -> None:
    """Raises `SpecError` for own code that cannot be imported, before anything is started."""
    named: dict[str, list[str | None]] = {
        "model.factory": [spec.model.factory],
        "training.loss": [spec.training.loss],
        "training.callbacks": [*spec.training.callbacks],
        "data.transform": [spec.data.transform],
    }
    for key, paths in named.items():
        for path in paths:
            if path is not None:
                load_dotted(path, key)


def resolve_on_cluster(spec: JobSpec, num_parameters: int) -> JobSpec:
    """The spec as the cluster decides it. Raises `ClusterError` where the cluster is too small."""
    resources = ray.cluster_resources()
    num_gpus = int(resources.get("GPU", 0))
    resolved = resolve(spec, Facts(num_gpus=num_gpus, num_parameters=num_parameters))
    on_gpu = resolved.resources.device == "cuda"
    if spec.training.precision == "fp16" and not on_gpu:
        raise SpecError("training.precision is fp16, which CPUs do not train in. Use bf16 or fp32.")
    kind, each = ("GPU", 1.0) if on_gpu else ("CPU", spec.resources.cpus_per_worker)
    room = int(resources.get(kind, 0) // each)
    if room < spec.elastic.min_workers:
        raise ClusterError(
            f"The cluster has room for {room} workers ({resources.get(kind, 0):g} {kind}s) and "
            f"elastic.min_workers is {spec.elastic.min_workers}. Lower it, or add nodes.",
            room=room,
        )
    return resolved


def plan_job(
    spec: JobSpec, runs_dir: Path, run_dir: Path, display: Display, stop: StopSignal
) -> tuple[WorkerTask, dict[str, Any]]:
    """Everything that is decided before a worker starts."""

    def prepared_so_far(done: int, total: int) -> None:
        if stop.is_set():
            raise Interrupted("Stopped while data was prepared; the finished chunks are kept.")
        display.prepared(done, total)

    store_root = Path(spec.data.store) if spec.data.store else runs_dir / "stores"
    prepared = prepare(spec, store_root, prepared_so_far)
    display.say(_data_line(prepared))
    vocab_size = prepared.manifest["vocab_size"]
    resolved = resolve(spec, Facts(vocab_size=vocab_size))
    num_parameters = count_beforehand(resolved, vocab_size)
    resolved = resolve_on_cluster(resolved, num_parameters)
    plan = DataPlan(_training_split(prepared), plan_settings(spec, shuffle=True))
    steps = spec.training.steps or plan.steps_in(spec.training.epochs or 1)
    resolved = resolve(resolved, _found_in(prepared, steps))
    deepspeed_config(resolved)  # refuses a bad `extra` now
    need_space(run_dir, num_parameters * BYTES_PER_PARAMETER)
    grid = BlockGrid(
        split_path=plan.split.path,
        settings=plan.settings,
        pad_id=prepared.manifest["pad_id"],
        num_steps=steps,
        block_steps=int(resolved.data.block_steps),
    )
    task = WorkerTask(
        spec=resolved,
        run_dir=run_dir,
        grid=grid,
        held_out=_held_out(prepared, spec),
        data_key=prepared.key,
        vocab_size=vocab_size,
    )
    manifest = {
        "name": spec.name,
        "spec": spec.model_dump(mode="json"),
        "resolved": resolved.model_dump(mode="json"),
        "num_parameters": num_parameters,
        "data": {"key": prepared.key, "accounting": prepared.manifest["accounting"]},
        "environment": environment_manifest(spec.env),
    }
    return task, manifest


def plan_settings(spec: JobSpec, shuffle: bool) -> PlanSettings:
    return PlanSettings(
        seq_len=spec.data.seq_len,
        global_batch_size=spec.training.global_batch_size,
        window=spec.data.window,
        packing=spec.data.packing,
        shuffle=shuffle,
        seed=spec.training.seed,
    )


def _training_split(prepared: Prepared) -> Any:
    split = prepared.split("train")
    assert split is not None  # `prepare` refuses an empty training set
    return split


def _found_in(prepared: Prepared, num_training_steps: int) -> Facts:
    """What looking at the data has decided."""
    made_from = prepared.manifest["made_from"]
    formats = {file["format"] for files in made_from["sources"].values() for file in files}
    return Facts(
        num_training_steps=num_training_steps,
        data_shape=made_from["shape"],
        data_format=formats.pop() if len(formats) == 1 else None,
    )


def _held_out(prepared: Prepared, spec: JobSpec) -> dict[str, tuple[Path, PlanSettings]]:
    settings = plan_settings(spec, shuffle=False)
    splits = {name: prepared.split(name) for name in ("validation", "test")}
    return {name: (split.path, settings) for name, split in splits.items() if split is not None}


def _run_workers(
    task: WorkerTask, recorder: Any, display: Display, stop: StopSignal
) -> PliantError | None:
    """Lets Ray Train run the job in a thread, while this one watches over it."""
    trainer = trainer_for(task, recorder)
    outcome: list[PliantError | None] = []
    thread = threading.Thread(target=lambda: outcome.append(_fit(trainer)), daemon=True)
    thread.start()
    asked = False
    assert task.spec.training.steps is not None
    while thread.is_alive():
        thread.join(POLL_S)
        if stop.is_set() and not asked:
            asked = True
            display.say("stopping after this step, with a checkpoint")
            ray.get(recorder.request_stop.remote("asked by the user"))
        display.update(ray.get(recorder.status.remote()), task.spec.training.steps)
    return outcome[0] if outcome else JobError("Ray Train ended without saying how.")


def _fit(trainer: ElasticTrainer) -> PliantError | None:
    try:
        trainer.fit()
    except TrainingFailedError as error:
        return pliant_error_in(error) or JobError(_first_line(error), details=str(error))
    except Exception as error:
        return JobError(f"Ray Train failed: {error}", details=repr(error))
    return None


def trainer_for(
    task: WorkerTask, recorder: Any, train_function: Callable[..., None] = run_worker
) -> ElasticTrainer:
    """A worker group as the task's spec wants it, that runs `train_function`."""
    spec = task.spec
    elastic = spec.elastic
    on_gpu = spec.resources.device == "cuda"
    workers: Any = (elastic.min_workers, elastic.max_workers)
    scaling = ScalingConfig(
        num_workers=workers if elastic.min_workers < elastic.max_workers else workers[0],
        use_gpu=on_gpu,
        resources_per_worker={"CPU": spec.resources.cpus_per_worker}
        | ({"GPU": 1} if on_gpu else {}),
    )
    run_config = RunConfig(
        # A name of its own for every driver: what Ray would restore under an old one is not ours.
        name=f"{spec.name}-{time.time_ns()}",
        storage_path=str(task.run_dir / "ray"),
        failure_config=FailureConfig(max_failures=elastic.max_restarts),
        callbacks=[FailureReport(recorder)],
        worker_runtime_env={"env_vars": worker_environment(spec)},
    )
    return ElasticTrainer(
        train_function,
        train_loop_config={"task": task},
        torch_config=TorchConfig(backend="nccl" if on_gpu else "gloo"),
        scaling_config=scaling,
        run_config=run_config,
    )


def worker_environment(spec: JobSpec) -> dict[str, str]:
    """The variables of every worker, the same on every node; the spec's own come last."""
    threads = str(spec.resources.threads_per_worker)
    return {
        "DS_ACCELERATOR": spec.resources.device,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    } | spec.env


def _conclude(
    task: WorkerTask, recorder: Any, uri: str, error: PliantError | None, stop: StopSignal
) -> Outcome:
    """Compares the ledger with the plan, sums up, and closes the record."""
    run_dir = task.run_dir
    checkpoint = newest_manifest(run_dir)
    checked = check_ledger(run_dir, task.grid, checkpoint)
    state, reason = _verdict(task, checkpoint, error, checked, stop)
    ray.get(recorder.append.remote({"kind": "end", "state": state, "reason": reason}))
    run_id = ray.get(recorder.run_id.remote(RUN_ID_DEADLINE_S))
    summary = summarize(
        Journal(run_dir / JOURNAL_FILE).events(),
        state=state,
        reason=reason,
        samples_missing=checked.missing + checked.misplaced,
        samples_duplicated=checked.duplicated,
        mlflow_run_id=run_id,
    )
    write_summary(run_dir / "summary.json", summary)
    shutil.rmtree(run_dir / "ray", ignore_errors=True)
    loss_plot(Journal(run_dir / JOURNAL_FILE).events(), run_dir / "loss.png")
    for name in ("spec.yaml", "resolved.yaml", "manifest.json", "summary.json", "loss.png"):
        ray.get(recorder.artifact.remote(run_dir / name))
    status = {"FINISHED": "FINISHED", "INTERRUPTED": "KILLED"}.get(state, "FAILED")
    unsent = ray.get(recorder.finish.remote(status, TRACKING_DEADLINE_S))
    ray.kill(recorder)
    if error is None and state == "FAILED":
        error = JobError(reason or "The job failed.")
    if error is not None and "details" in error.facts:
        (run_dir / "error.txt").write_text(error.details, encoding="utf-8")
        error = JobError(f"{error.message} The whole report is in {run_dir / 'error.txt'}.")
    return Outcome(summary, run_dir, uri, error, unsent)


def _verdict(
    task: WorkerTask,
    checkpoint: Manifest | None,
    error: PliantError | None,
    checked: Audit,
    stop: StopSignal,
) -> tuple[str, str | None]:
    steps = checkpoint.step if checkpoint else 0
    if error is not None:
        return "FAILED", error.message
    if not checked.is_exact:
        return "FAILED", (
            f"The ledger differs from the plan: {checked.missing} samples missing, "
            f"{checked.duplicated} duplicated, {checked.misplaced} in the wrong step."
        )
    if steps == task.spec.training.steps:
        return "FINISHED", None
    if stop.is_set():
        return "INTERRUPTED", f"stopped after step {steps}; start it again to go on"
    return "FAILED", f"The workers ended after step {steps} of {task.spec.training.steps}."


def newest_manifest(run_dir: Path) -> Manifest | None:
    directories = reader.committed(run_dir / "checkpoints")
    return Manifest.read(directories[0]) if directories else None


def check_ledger(run_dir: Path, grid: BlockGrid, checkpoint: Manifest | None) -> Audit:
    """What the newest checkpoint says was trained, against the plan up to its step."""
    if checkpoint is None:
        return Audit(steps=0, missing=0, duplicated=0, misplaced=0)
    files = [run_dir / "ledger" / entry.file for entry in checkpoint.ledger]
    return audit(files, grid.open(), checkpoint.step)


@contextmanager
def _sole_driver(run_dir: Path) -> Iterator[None]:
    """One driver per run directory; one that did not get as far as a record is removed again."""
    existed = run_dir.exists()
    run_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            held.enter_context(file_lock(run_dir / ".lock", wait=False))
        except BlockingIOError:
            raise UserError(
                f"{run_dir.name} is running already. Wait for it, stop it, or choose another name."
            ) from None
        try:
            yield
        except (UserError, Interrupted):
            if not existed:
                _remove_empty(run_dir)
            raise


def _remove_empty(run_dir: Path) -> None:
    (run_dir / ".lock").unlink(missing_ok=True)
    for directory in (run_dir, run_dir.parent):
        with suppress(OSError):  # it holds something
            directory.rmdir()


def _start_line(spec: JobSpec) -> str:
    elastic = spec.elastic
    bounds = f"{elastic.min_workers} to {elastic.max_workers}"
    line = (
        f"{spec.name}: {spec.training.steps} steps, {bounds} workers on {spec.resources.device}, "
        f"ZeRO stage {spec.deepspeed.zero_stage}, {spec.training.precision}"
    )
    if not spec.env:
        return line
    shown = [f"{name}={recordable(name, value)}" for name, value in sorted(spec.env.items())]
    return f"{line}; every worker gets {' '.join(shown)}"


def _data_line(prepared: Prepared) -> str:
    parts = [
        f"{split['pieces']:,} samples, {split['tokens']:,} tokens for {name}"
        for name, split in prepared.manifest["splits"].items()
    ]
    return f"data {prepared.key[:8]}: {'; '.join(parts)}"


def _tags(manifest: dict[str, Any]) -> dict[str, str]:
    commit = manifest["environment"].get("git", {}) or {}
    return {"pliant.version": version("pliant"), "git.commit": str(commit.get("commit", ""))}


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2, default=str).encode() + b"\n"


def _yaml(spec: JobSpec) -> bytes:
    return yaml.safe_dump(
        spec.model_dump(mode="json"), sort_keys=False, allow_unicode=True
    ).encode()


def _first_line(error: BaseException) -> str:
    """The last line of the first worker's traceback says what happened."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
