"""What every worker runs: from an empty process to the end of training, or to the next fault."""

import ctypes
import gc
import logging
import os
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
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
from pliant.data.store import SplitPlace
from pliant.data.stream import BlockSource, FeederBlocks, NoBlocks, StepStream, evaluation_batches
from pliant.elastic.health import CheckCards, open_cards
from pliant.elastic.resume import job_identity
from pliant.elastic.wish import Wish, Yielded
from pliant.errors import RanksDisagree, TrainingRewinds
from pliant.spec import JobSpec
from pliant.spec.dotted import load_dotted
from pliant.topology import BatchShape, Place
from pliant.training import deepspeed_adapter
from pliant.training.callbacks import (
    CompareRanks,
    Drills,
    Evaluate,
    FirstStep,
    InPhase,
    KeepLedger,
    ReportSteps,
    SaveCheckpoints,
)
from pliant.training.contents import Contents, frozen_digest
from pliant.training.digests import agree, digest
from pliant.training.engine import ZeroEngine, build_engine
from pliant.training.loop import Callback, train
from pliant.training.model import build_model, skeleton
from pliant.training.phases import (
    CudaClock,
    Heart,
    Member,
    Phases,
    marked_batches,
    marked_collectives,
)
from pliant.training.progress import Progress
from pliant.training.recorder import Reporter, commits_of, recorder_name, tell_warnings
from pliant.training.state import TrainingState

log = logging.getLogger(__name__)

BEAT_TIMEOUT_S = 5.0
SILENT_S = 30.0
"""A process whose interpreter is held for so long writes down its stacks."""


@dataclass(frozen=True)
class WorkerTask:
    """All that a worker needs to know; the same for every worker and attempt."""

    spec: JobSpec
    """Resolved: nothing in it says "auto"."""
    run_dir: Path
    grid: BlockGrid
    held_out: dict[str, tuple[SplitPlace, PlanSettings]]
    """"validation" and "test", where the data has them."""
    data_key: str
    vocab_size: int


def run_worker(config: dict[str, WorkerTask]) -> None:
    """The train function of the worker group. However it ends, it leaves nothing behind in the
    process, which may serve the next group."""
    task = config["task"]
    quiet_libraries()
    if not gc.get_freeze_count():
        deepspeed_adapter.import_deepspeed(task.spec.resources.device)
        skeleton(task.spec, task.vocab_size)  # imports what the model needs
        gc.collect()
    gc.freeze()  # what was imported is not looked through again when an attempt ends
    try:
        _run(task)
    except BaseException as error:
        _forget_frames(error)
        raise
    finally:
        deepspeed_adapter.leave_process_group()
        _return_memory()


def _run(task: WorkerTask) -> None:
    spec = task.spec
    torch.set_num_threads(spec.resources.threads_per_worker)
    context = ray.train.get_context()
    place = Place(context.get_world_rank(), context.get_world_size())
    recorder = ray.get_actor(recorder_name(spec.name), namespace=NAMESPACE)
    moments = _Moments(recorder, place.rank)
    moments.tell("worker begins")
    if place.rank == 0:
        tell_warnings(lambda text: recorder.record.remote([{"kind": "note", "text": text}]))
    node = ray.get_runtime_context().get_node_id()
    clock = CudaClock() if spec.resources.device == "cuda" else None
    phases = Phases(Member(0, place.rank, place.world_size, node), device=clock)
    with attention.registered(), marked_collectives(phases, dist):
        engine, state, ledger = prepare_engine(task, place)
        moments.tell("engine is ready")
        try:
            progress = state.restore()
            for text in state.damage:
                recorder.append.remote({"kind": "damage", "text": text})
            agree("loaded parameters", digest(whole_tensors(engine)))
            moments.tell("state is restored")
            state.attempt, wish, engine.withheld = _begin_attempt(recorder, place, progress)
            phases.joined(state.attempt)
            with _watched(task, phases, recorder):
                _train(task, place, engine, state, ledger, progress, wish, moments, phases)
        except (RanksDisagree, TrainingRewinds):
            state.discard_snapshots()
            raise
        finally:
            state.close()
            engine.deepspeed.destroy()


@contextmanager
def _watched(task: WorkerTask, phases: Phases, recorder: Any) -> Iterator[None]:
    """Signs of life go to the recorder, and the health of the cards, where there are any."""
    elastic = task.spec.elastic
    rank = ray.train.get_context().get_world_rank()
    heart = Heart(
        phases,
        lambda beat: ray.get(recorder.beat.remote(beat), timeout=BEAT_TIMEOUT_S),
        task.run_dir / "stacks" / f"rank-{rank:05d}.txt",
        silent_s=max(elastic.hang_floor_s, SILENT_S),
    )
    cards = _watch_cards(elastic.health_every_s, recorder)
    heart.start()
    try:
        yield
    finally:
        heart.close()
        cards.set()


def _watch_cards(every_s: float, recorder: Any) -> threading.Event:
    """Set what is returned to end it."""
    closed = threading.Event()
    checks = CheckCards(open_cards())
    node = ray.get_runtime_context().get_node_id()

    def watch() -> None:
        while not closed.wait(every_s):
            if reasons := checks.check():
                recorder.broken.remote(node, reasons)

    threading.Thread(target=watch, daemon=True, name="cards").start()
    return closed


def _return_memory() -> None:
    """What was freed goes back to the system. An attempt has a thread of its own, and glibc would
    keep its memory for threads to come."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _forget_frames(error: BaseException | None) -> None:
    """A traceback keeps the variables of every frame alive, and with them the engine."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class _Moments:
    """Tells the recorder when an attempt got how far."""

    def __init__(self, recorder: Any, rank: int) -> None:
        self.recorder = recorder
        self._rank = rank

    def tell(self, what: str) -> None:
        event = {"kind": "timeline", "time": time.time(), "what": what}
        self.recorder.append.remote({**event, "rank": self._rank, "pid": os.getpid()})


def prepare_engine(task: WorkerTask, place: Place) -> tuple[ZeroEngine, TrainingState, Ledger]:
    """The engine with fresh weights, checked to be the same on every rank, and its state."""
    spec = task.spec
    model = build_model(spec, task.vocab_size)
    agree("initial weights", digest(model.parameters()))
    frozen = frozen_digest(model, digest)
    engine = build_engine(model, spec, place, ray.train.torch.get_device())
    ledger = Ledger()
    contents = Contents(engine, place, job_identity(spec, task.data_key), frozen)
    commits = commits_of(spec.name)
    state = TrainingState(contents, place, task.run_dir, ledger, spec.checkpoint, commits)
    return engine, state, ledger


def _begin_attempt(
    recorder: Any, place: Place, progress: Progress
) -> tuple[int, Wish, frozenset[int]]:
    """The attempt's number, what is wished of it, and the steps whose updates are left out, which
    every rank learns from rank 0."""
    answer: list[Any] = [None]
    if place.rank == 0:
        answer = [ray.get(recorder.begin_attempt.remote(place.world_size, progress.step))]
    dist.broadcast_object_list(answer, src=0)
    attempt, wish, withheld = answer[0]
    return int(attempt), Wish(wish), withheld


def _train(
    task: WorkerTask,
    place: Place,
    engine: ZeroEngine,
    state: TrainingState,
    ledger: Ledger,
    progress: Progress,
    wish: Wish,
    moments: _Moments,
    phases: Phases,
) -> None:
    spec = task.spec
    shape = BatchShape(
        spec.training.global_batch_size, spec.training.micro_batch_size, spec.data.seq_len
    )
    recorder = moments.recorder
    reporter = Reporter(recorder, wish) if place.rank == 0 else None
    report = reporter.report if reporter else (lambda event: None)
    held_out = partial(_held_out, task, shape, place, phases)
    evaluate = Evaluate(engine, held_out, spec.training.eval_every, report)
    save = SaveCheckpoints(state, evaluate.metrics, report)
    callbacks: list[Callback] = [KeepLedger(ledger)]
    if reporter:
        callbacks.append(ReportSteps(reporter, shape, place))
    callbacks += [
        CompareRanks(partial(whole_tensors, engine), spec.training.digest_every),
        InPhase("evaluation", evaluate, phases),
        *(load_dotted(path, "training.callbacks")() for path in spec.training.callbacks),
        InPhase("checkpoint", save, phases),  # the step counts as done from here on
        FirstStep(moments.tell),
        Drills(spec, place, recorder),
    ]
    stream = open_stream(task, shape, place, progress.step)
    batches: Iterable[StepBatch] = () if wish is Wish.STOP else stream
    batches = marked_batches(phases, batches, progress.step)
    phases.resumed(progress.step)
    try:
        ask = reporter.wish if reporter else (lambda: Wish.NONE)
        progress, wish = train(engine, batches, callbacks, progress, ask)
        with phases.during("checkpoint"):
            if wish in (Wish.RESIZE, Wish.DRAIN):
                state.just_in_time(progress, durable=wish is Wish.DRAIN)
                raise Yielded(progress.step)
            save.save(progress, wait=True)
        if progress.step == spec.training.steps:
            with phases.during("evaluation"):
                evaluate.evaluate(progress)
                evaluate.test(progress)
    finally:
        if reporter:
            reporter.close()


def open_stream(task: WorkerTask, shape: BatchShape, place: Place, first: int) -> StepStream:
    """This rank's batches from step `first` on."""
    return StepStream(task.grid, shape, place, _blocks(task.spec.name), first)


def _held_out(
    task: WorkerTask, shape: BatchShape, place: Place, phases: Phases, name: str
) -> Iterable[StepBatch] | None:
    """One pass over a held-out split, each batch of which counts as progress; None where the data
    has none of that name."""
    if name not in task.held_out:
        return None
    split, settings = task.held_out[name]
    plan = DataPlan(split.open(), settings)
    batches = evaluation_batches(plan, task.grid.pad_id, shape, place)
    return (phases.again(batch) for batch in batches)


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
