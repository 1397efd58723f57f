"""What pliant itself does after a step: record, evaluate, save, compare, rehearse."""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

import ray

from pliant.batch import StepBatch
from pliant.data.ledger import Ledger
from pliant.elastic.beats import Phase
from pliant.spec import JobSpec
from pliant.topology import BatchShape, Place
from pliant.training.digests import agree, digest
from pliant.training.engine import Engine, StepResult
from pliant.training.loop import Callback
from pliant.training.phases import Phases
from pliant.training.progress import Progress
from pliant.training.recorder import Reporter
from pliant.training.state import TrainingState

log = logging.getLogger(__name__)

Report = Callable[[dict[str, Any]], None]


class InPhase:
    """Another callback, whose time counts as a phase of its own."""

    def __init__(self, phase: Phase, callback: Callback, phases: Phases) -> None:
        self._phase = phase
        self._callback = callback
        self._phases = phases

    def after_step(self, progress: Progress, batch: StepBatch, result: StepResult) -> None:
        with self._phases.during(self._phase):
            self._callback.after_step(progress, batch, result)


class FirstStep:
    """Tells when the first step of an attempt is done."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._is_told = False

    def after_step(self, progress: Progress, batch: StepBatch, result: StepResult) -> None:
        if not self._is_told:
            self._is_told = True
            self._tell("first step is done")


class KeepLedger:
    """Notes which pieces were run."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def after_step(self, progress: Progress, batch: StepBatch, result: StepResult) -> None:
        self._ledger.record(progress.step - 1, batch)


class ReportSteps:
    """Sends each step's figures to the recorder; on rank 0."""

    def __init__(self, reporter: Reporter, shape: BatchShape, place: Place) -> None:
        self._reporter = reporter
        self._shape = shape
        self._place = place

    def after_step(self, progress: Progress, batch: StepBatch, result: StepResult) -> None:
        if result.skipped:
            self._reporter.report({"kind": "skip", "step": progress.step, "reason": result.reason})
        elapsed_s = result.seconds + batch.data_wait_s
        capacity = batch.num_packs * self._shape.seq_len
        self._reporter.report(
            {
                "kind": "step",
                "step": progress.step,
                "samples": batch.num_samples,
                "tokens": batch.num_tokens,
                "capacity": capacity,
                "metrics": {
                    "loss": result.loss,
                    "lr": result.lr,
                    "grad_norm": result.grad_norm,
                    "step_time_s": result.seconds,
                    "data_wait_s": batch.data_wait_s,
                    "samples_per_s": batch.num_samples / elapsed_s,
                    "tokens_per_s": batch.num_tokens / elapsed_s,
                    "fill_ratio": batch.num_tokens / capacity,
                    "tokens_seen": float(progress.tokens),
                    "epoch": float(batch.epoch),
                    "world_size": float(self._place.world_size),
                },
            }
        )


class Evaluate:
    """The loss on the validation set, every so many steps and at the end; on the test set, once."""

    def __init__(
        self,
        engine: Engine,
        batches: Callable[[str], Iterable[StepBatch] | None],
        every: int | None,
        report: Report,
    ) -> None:
        self._engine = engine
        self._batches = batches
        self._every = every
        self._report = report
        self._evaluated_step = 0
        self.metrics: dict[str, float] = {}
        """The newest losses."""

    def after_step(self, progress: Progress, batch: StepBatch, result: StepResult) -> None:
        if self._every and progress.step % self._every == 0:
            self.evaluate(progress)

    def evaluate(self, progress: Progress) -> None:
        """Does nothing where this step was evaluated already."""
        if progress.step == self._evaluated_step:
            return
        self._evaluated_step = progress.step
        self._measure("validation", "eval_loss", progress)

    def test(self, progress: Progress) -> None:
        self._measure("test", "test_loss", progress)

    def _measure(self, split: str, metric: str, progress: Progress) -> None:
        batches = self._batches(split)
        if batches is not None:
            loss = self._engine.evaluate(batches)
            self.metrics[metric] = loss
            event = {"kind": "evaluation", "step": progress.step, "metrics": {metric: loss}}
            self._report(event)


class SaveCheckpoints:
    """Snapshots in memory and checkpoints in the background, each as often as its cadence says."""

    def __init__(self, state: TrainingState, metrics: dict[str, float], report: Report) -> None:
        """`metrics` are the newest evaluation's; whoever evaluates keeps them up to date."""
        self._state = state
        state.metrics = metrics
        state.tell = lambda text: report({"kind": "note", "text": text})

    def after_step(self, progress: Progress, batch: StepBatch, result: StepResult) -> None:
        if self._state.cadence.save_is_due(progress.step):
            self._state.save(progress)
        self._state.snapshot(progress)

    def save(self, progress: Progress, wait: bool = False) -> None:
        """Does nothing where this step is saved or being saved, but for the waiting."""
        self._state.save(progress, wait)


class CompareRanks:
    """Stops the job where ranks hold different parameters."""

    def __init__(self, tensors: Callable[[], list[Any]], every: int) -> None:
        self._tensors = tensors
        self._every = every

    def after_step(self, progress: Progress, batch: StepBatch, result: StepResult) -> None:
        if self._every and progress.step % self._every == 0:
            agree(f"parameters after step {progress.step}", digest(self._tensors()))


class Drills:
    """Carries out the faults that the spec rehearses."""

    def __init__(self, spec: JobSpec, place: Place, recorder: Any) -> None:
        self._drills = list(enumerate(spec.elastic.drills))
        self._place = place
        self._recorder = recorder

    def after_step(self, progress: Progress, batch: StepBatch, result: StepResult) -> None:
        for number, drill in self._drills:
            if drill.step == progress.step and drill.rank == self._place.rank:
                what = f"SIGKILL to the worker of rank {drill.rank}"
                if ray.get(self._recorder.claim_drill.remote(number, what)):
                    # Time for rank 0's report of this step, which a real fault may cut off too.
                    time.sleep(0.2)
                    os.kill(os.getpid(), signal.SIGKILL)
