"""The training loop: one batch after another, from the stream to the optimizer step."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from pliant.batch import StepBatch
from pliant.training.engine import Engine, StepResult
from pliant.training.progress import Progress


class Callback(Protocol):
    """Looks on after every step, on every rank; named in `training.callbacks` or pliant's own.

    It may use collectives, as long as every rank does so in the same step.
    """

    def after_step(self, progress: Progress, batch: StepBatch, result: StepResult) -> None:
        """`progress` already counts this step."""


class StopRequest(Protocol):
    """Whether this rank was asked to stop."""

    def is_set(self) -> bool: ...


def train(
    engine: Engine,
    batches: Iterable[StepBatch],
    callbacks: Sequence[Callback],
    progress: Progress,
    stop: StopRequest,
) -> Progress:
    """Trains until the batches end or some rank was asked to stop; all ranks stop after the same
    step."""
    for batch in batches:
        result = engine.step(batch, progress.step, vote=stop.is_set())
        progress = progress.after(batch)
        for callback in callbacks:
            callback.after_step(progress, batch, result)
        if result.votes:
            break
    return progress
