"""What every worker runs: from an empty process to the end of training, or to the next fault."""

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from pliant.accel import attention
from pliant.batch import StepBatch
from pliant.data.feeder import NAMESPACE, BlockGrid, feeder_name
from pliant.data.ledger import Ledger
from pliant.data.plan import DataPlan, PlanSettings
from pliant.data.store import Split
from pliant.data.stream import BlockSource, FeederBlocks, NoBlocks, StepStream, evaluation_batches
from pliant.elastic.resume import job_identity
from pliant.spec import JobSpec
from pliant.spec.dotted import load_dotted
from pliant.topology import BatchShape, Place
from pliant.training import deepspeed_adapter
from pliant.training.callbacks import (
    CompareRanks,
    Drills,
    Evaluate,
    KeepLedger,
    ReportSteps,
    SaveCheckpoints,
)
from pliant.training.digests import agree, digest
from pliant.training.engine import ZeroEngine, build_engine
from pliant.training.loop import Callback, train
from pliant.training.model import build_model
from pliant.training.progress import Progress
from pliant.training.recorder import Reporter, recorder_name, tell_warnings
from pliant.training.state import TrainingState, frozen_digest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerTask:
    """All that a worker needs to know; the same for every worker and attempt."""

    spec: JobSpec
    """Resolved: nothing in it says "auto"."""
    run_dir: Path
    grid: BlockGrid
    held_out: dict[str, tuple[Path, PlanSettings]]
    """"validation" and "test", where the data has them."""
    data_key: str
    vocab_size: int


def run_worker(config: dict[str, WorkerTask]) -> None:
    """The train function of the worker group."""
    task = config["task"]
    spec = task.spec
    quiet_libraries()
    torch.set_num_threads(spec.resources.threads_per_worker)
    context = ray.train.get_context()
    place = Place(context.get_world_rank(), context.get_world_size())
    recorder = ray.get_actor(recorder_name(spec.name), namespace=NAMESPACE)
    if place.rank == 0:
        tell_warnings(lambda text: recorder.record.remote([{"kind": "note", "text": text}]))
    with attention.registered():
        engine, state, ledger = prepare_engine(task, place)
        progress = state.restore()
        agree("loaded parameters", digest(whole_tensors(engine)))
        stop = threading.Event()
        state.attempt = _begin_attempt(recorder, place, progress, stop)
        reporter = Reporter(recorder, stop)
        _train(task, place, engine, state, ledger, progress, reporter, stop, recorder)
        reporter.flush()
        engine.deepspeed.destroy()


def prepare_engine(task: WorkerTask, place: Place) -> tuple[ZeroEngine, TrainingState, Ledger]:
    """The engine with fresh weights, checked to be the same on every rank, and its state."""
    spec = task.spec
    model = build_model(spec, task.vocab_size)
    agree("initial weights", digest(model.parameters()))
    frozen = frozen_digest(model, digest)
    engine = build_engine(model, spec, place, ray.train.torch.get_device())
    ledger = Ledger()
    state = TrainingState(
        engine.deepspeed,
        place,
        task.run_dir,
        ledger,
        job_identity(spec, task.data_key),
        frozen,
        spec.checkpoint.keep,
    )
    return engine, state, ledger


def _begin_attempt(recorder: Any, place: Place, progress: Progress, stop: threading.Event) -> int:
    """The attempt's number, which every rank learns from rank 0."""
    answer: list[Any] = [None]
    if place.rank == 0:
        answer = [ray.get(recorder.begin_attempt.remote(place.world_size, progress.step))]
    dist.broadcast_object_list(answer, src=0)
    attempt, stop_now = answer[0]
    if stop_now:
        stop.set()
    return int(attempt)


def _train(
    task: WorkerTask,
    place: Place,
    engine: ZeroEngine,
    state: TrainingState,
    ledger: Ledger,
    progress: Progress,
    reporter: Reporter,
    stop: threading.Event,
    recorder: Any,
) -> None:
    spec = task.spec
    shape = BatchShape(
        spec.training.global_batch_size, spec.training.micro_batch_size, spec.data.seq_len
    )
    report = reporter.report if place.rank == 0 else (lambda event: None)
    evaluate = Evaluate(
        engine, partial(_held_out, task, shape, place), spec.training.eval_every, report
    )
    save = SaveCheckpoints(state, spec.checkpoint.every, report)
    callbacks: list[Callback] = [KeepLedger(ledger)]
    if place.rank == 0:
        callbacks.append(ReportSteps(reporter, shape, place))
    callbacks += [
        CompareRanks(partial(whole_tensors, engine), spec.training.digest_every),
        evaluate,
        save,
        Drills(spec, place, recorder),
        *(load_dotted(path, "training.callbacks")() for path in spec.training.callbacks),
    ]
    stream = open_stream(task, shape, place, progress.step)
    batches: Iterable[StepBatch] = () if stop.is_set() else stream
    progress = train(engine, batches, callbacks, progress, stop)
    save.save(progress)
    if progress.step == spec.training.steps:
        evaluate.evaluate(progress)
        evaluate.test(progress)


def open_stream(task: WorkerTask, shape: BatchShape, place: Place, first: int) -> StepStream:
    """This rank's batches from step `first` on."""
    return StepStream(task.grid, shape, place, _blocks(task.spec.name), first)


def _held_out(
    task: WorkerTask, shape: BatchShape, place: Place, name: str
) -> Iterable[StepBatch] | None:
    """One pass over a held-out split; None where the data has none of that name."""
    if name not in task.held_out:
        return None
    path, settings = task.held_out[name]
    return evaluation_batches(DataPlan(Split(path), settings), task.grid.pad_id, shape, place)


def _blocks(job: str) -> BlockSource:
    try:
        return FeederBlocks(ray.get_actor(feeder_name(job), namespace=NAMESPACE))
    except ValueError:
        log.warning("There is no feeder; this worker assembles its batches itself.")
        return NoBlocks()


def whole_tensors(engine: ZeroEngine) -> list[torch.Tensor]:
    """Trained parameters that every rank holds whole."""
    return [tensor for _, tensor in deepspeed_adapter.whole_parameters(engine.deepspeed)]


def quiet_libraries() -> None:
    """Their INFO lines would bury what a user needs to see."""
    for name in ("DeepSpeed", "transformers", "ray.train", "ray.data"):
        logging.getLogger(name).setLevel(logging.WARNING)
