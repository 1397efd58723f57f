"""The training loop: one batch after another, from the stream to the optimizer step."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pliant.batch import StepBatch
from pliant.elastic.wish import Wish
from pliant.training.engine import Engine, StepResult
from pliant.training.progress import Progress


class Callback(Protocol):
    """Looks on after every step, on every rank; named in `training.callbacks` or pliant's own.

    It may use collectives, as long as every rank does so in the same step.
    """

    def after_step(self, progress: Progress, batch: StepBatch, result: StepResult) -> None:
        """`progress` already counts this step."""


def train(
    engine: Engine,
    batches: Iterable[StepBatch],
    callbacks: Sequence[Callback],
    progress: Progress,
    wish: Callable[[], Wish],
) -> tuple[Progress, Wish]:
    """Trains until the batches end or something is wished of the group; all ranks end after the
    same step, and with the same wish. `wish` is asked before each step; at most one rank may have
    any."""
    for batch in batches:
        result = engine.step(batch, progress.step, vote=int(wish()))
        progress = progress.after(batch)
        for callback in callbacks:
            callback.after_step(progress, batch, result)
        if result.votes:
            return progress, Wish(result.votes)
    return progress, Wish.NONE
