"""The driver's side of a job: from a spec to a summary.

In order: take the run directory, plan (`planning`), start the recorder and the feeder, let Ray
Train run the workers, conclude (`conclusion`).
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import ray
import yaml
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig
from ray.train.v2.api.exceptions import TrainingFailedError

from pliant.checkpoints import reader
from pliant.checkpoints.places import check_usable, places_of
from pliant.data.account import TokenAccount
from pliant.data.feeder import start_feeder, stop_feeder
from pliant.data.prepare import Report
from pliant.data.store import Prepared
from pliant.elastic.ray_adapter import (
    Elasticity,
    ElasticTrainer,
    PolicySettings,
    PoolSettings,
    pliant_error_in,
    runtime_env_of_workers,
    tune_environment,
)
from pliant.elastic.resume import check_identity, job_identity
from pliant.elastic.scaling import Bounds
from pliant.errors import Interrupted, JobError, PliantError, UserError
from pliant.files import file_lock, write_atomically
from pliant.spec import JobSpec
from pliant.spec.elastic import ElasticSpec
from pliant.tracking.redaction import recordable
from pliant.training.conclusion import Outcome, StopSignal, conclude, finished_before
from pliant.training.planning import check_plugins, plan_job
from pliant.training.priming import prime
from pliant.training.recorder import Status, start_recorder
from pliant.training.wanted import WantedWorkers
from pliant.training.worker import WorkerTask, run_worker

POLL_S = 0.25


class Display(Protocol):
    """Shows a person how the job is doing."""

    def say(self, sentence: str) -> None:
        """Something worth a line."""

    def prepared(self, done: int, total: int) -> None:
        """Chunks of data prepared so far."""

    def update(self, status: Status, total_steps: int) -> None:
        """Called a few times a second."""


def run_job(spec: JobSpec, runs_dir: Path, display: Display, stop: StopSignal) -> Outcome:
    """Runs the job to its end, or on from where it was. Needs a running Ray.

    Raises `UserError` where the job cannot be started; nothing is left behind then. What happens
    once it runs is told by the outcome.
    """
    check_plugins(spec)
    tune_environment(spec.elastic.start_timeout_s)
    run_dir = runs_dir / spec.name
    with _sole_driver(run_dir):
        plan = plan_job(spec, runs_dir, _watched(display, stop))
        task = plan.task
        display.say(_data_line(plan.prepared))
        display.say(plan.account.sentence())
        uri = spec.tracking.mlflow_uri or f"sqlite:///{runs_dir / 'mlflow.db'}"
        _check_that_it_goes_on(task)
        earlier = finished_before(task, uri)
        if earlier is not None:
            display.say(
                f"{spec.name} is finished: {earlier.summary.steps} steps. Raise training.steps to "
                "go on, or choose another name."
            )
            return earlier
        manifest = plan.manifest(spec)
        write_atomically(run_dir / "manifest.json", _json(manifest))
        write_atomically(run_dir / "spec.yaml", _yaml(manifest["spec"]))
        write_atomically(run_dir / "resolved.yaml", _yaml(manifest["resolved"]))
        display.say(_start_line(task.spec))
        recorder = start_recorder(run_dir, task.spec, uri, _tags(manifest))
        recorder.append.remote(_data_event(plan.account))
        start_feeder(spec.name, task.grid)
        try:
            error = _run_workers(task, recorder, display, stop)
        finally:
            stop_feeder(spec.name)
        return conclude(task, recorder, uri, error, stop)


def _check_that_it_goes_on(task: WorkerTask) -> None:
    """Raises `CheckpointMismatch` before anything of an earlier run is touched."""
    places = places_of(task.run_dir, task.spec.checkpoint.storage)
    if task.spec.checkpoint.storage is not None:
        check_usable(places.checkpoints)
    checkpoint = reader.newest(places.checkpoints, places.ledger, digests=False)
    if checkpoint is not None:
        check_identity(checkpoint, job_identity(task.spec, task.data_key))


def _watched(display: Display, stop: StopSignal) -> Report:
    """Shows how the preparation of data goes on, and ends it when the user wants that."""

    def report(done: int, total: int) -> None:
        if stop.is_set():
            raise Interrupted("Stopped while data was prepared; the finished chunks are kept.")
        display.prepared(done, total)

    return report


def _run_workers(
    task: WorkerTask, recorder: Any, display: Display, stop: StopSignal
) -> PliantError | None:
    """Lets Ray Train run the job in a thread, while this one watches over it."""
    trainer = trainer_for(task, recorder)
    outcome: list[PliantError | None] = []
    thread = threading.Thread(target=lambda: outcome.append(_fit(trainer)), daemon=True)
    thread.start()
    asked_s: float | None = None
    wanted = WantedWorkers(task.run_dir)
    assert task.spec.training.steps is not None
    while thread.is_alive():
        if wanted.changed():
            recorder.want_workers.remote(wanted.value)
        thread.join(POLL_S)
        status = ray.get(recorder.status.remote())
        display.update(status, task.spec.training.steps)
        if stop.is_set() and asked_s is None:
            asked_s = time.monotonic()
            ray.get(recorder.request_stop.remote())
            if status.state == "training":
                display.say("stopping after this step, with a checkpoint")
        if asked_s is not None and status.state == "starting":
            waited_s = time.monotonic() - asked_s
            # Workers that come up again have state to save; the first would stop at once.
            if status.world_size == 0 or waited_s > task.spec.elastic.start_timeout_s:
                display.say("stopping while the workers start")
                trainer.end()
                return None
    gave_up = ray.get(recorder.status.remote()).gave_up
    if not outcome:
        return JobError("Ray Train ended without saying how.")
    if gave_up is not None and type(outcome[0]) is JobError:
        return JobError(gave_up, **outcome[0].facts)
    return outcome[0]


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
    environment = worker_environment(spec)
    scaling = ScalingConfig(
        num_workers=elastic.max_workers,
        use_gpu=on_gpu,
        resources_per_worker={"CPU": spec.resources.cpus_per_worker}
        | ({"GPU": 1} if on_gpu else {}),
    )
    run_config = RunConfig(
        # A name of its own for every driver: what Ray would restore under an old one is not ours.
        name=f"{spec.name}-{time.time_ns()}",
        storage_path=str(task.run_dir / "ray"),
        worker_runtime_env={"env_vars": environment},
    )
    return ElasticTrainer(
        train_function,
        train_loop_config={"task": task},
        torch_config=TorchConfig(backend="nccl" if on_gpu else "gloo"),
        scaling_config=scaling,
        run_config=run_config,
        elasticity=Elasticity(
            elastic, _policy_settings(elastic), _pool_settings(task, environment), recorder
        ),
    )


def _policy_settings(elastic: ElasticSpec) -> PolicySettings:
    bounds = Bounds(elastic.min_workers, elastic.max_workers, tuple(elastic.allowed_workers))
    return PolicySettings(
        bounds,
        elastic.settle_s,
        elastic.pause_s,
        elastic.start_timeout_s,
        elastic.handshake_timeout_s,
        elastic.hang_start_s,
    )


def _pool_settings(task: WorkerTask, environment: dict[str, str]) -> PoolSettings:
    elastic = task.spec.elastic
    assert elastic.spares != "auto"
    return PoolSettings(
        keeps_processes=elastic.reuse_workers,
        num_spares=elastic.spares,
        park_timeout_s=elastic.reuse_wait_s,
        max_reuses=elastic.max_reuses,
        runtime_env=runtime_env_of_workers(environment),
        prime=partial(prime, task.spec),
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


@contextmanager
def _sole_driver(run_dir: Path) -> Iterator[None]:
    """One driver per run directory; one that did not get as far as a record is removed again."""
    existed = run_dir.exists()
    with ExitStack() as held:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            held.enter_context(file_lock(run_dir / ".lock", wait=False))
        except BlockingIOError:
            raise UserError(
                f"{run_dir.name} is running already. Wait for it, stop it, or choose another name."
            ) from None
        except OSError as error:
            raise UserError(
                f"{run_dir} cannot be used: {error.strerror}. Choose a directory with --runs-dir "
                "that can be written."
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
    if spec.training.warmup_steps >= (spec.training.steps or 0):
        line += f"; the warm-up of {spec.training.warmup_steps} steps will not be over by then"
    if not spec.env:
        return line
    shown = [f"{name}={recordable(name, value)}" for name, value in sorted(spec.env.items())]
    return f"{line}; every worker gets {' '.join(shown)}"


def _data_line(prepared: Prepared) -> str:
    parts = [
        f"{split['tokens']:,} tokens for {name}"
        for name, split in prepared.manifest["splits"].items()
    ]
    return f"data {prepared.key[:8]}: {'; '.join(parts)}"


def _data_event(account: TokenAccount) -> dict[str, Any]:
    figures = {f"data/{name}": float(count) for name, count in account.figures().items()}
    return {"kind": "data", "step": 0, "metrics": figures}


def _tags(manifest: dict[str, Any]) -> dict[str, str]:
    commit = manifest["environment"].get("git", {}) or {}
    return {"pliant.version": version("pliant"), "git.commit": str(commit.get("commit", ""))}


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2, default=str).encode() + b"\n"


def _yaml(tree: dict[str, Any]) -> bytes:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode()


def _first_line(error: BaseException) -> str:
    """The last line of the first worker's traceback says what happened."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
