"""Whether a step went wrong, and what is to be done about it: pure functions of values that are the
same on every rank, so that all ranks decide alike."""

import math
import statistics
from dataclasses import dataclass
from typing import Literal

from pliant.spec.training import TrainingSpec

Action = Literal["stop", "skip", "rewind"]

LEAST_DEVIATION = 0.01
"""Of the median. Losses that hardly move are not to make a spike of every ripple."""


@dataclass(frozen=True)
class History:
    """What is known of the steps before. It belongs into a checkpoint: a run that goes on from one
    is then to judge its steps as the undisturbed run does."""

    losses: tuple[float, ...] = ()
    """Of the last steps whose updates were applied."""
    skips: int = 0
    """Updates left out in a row, up to the last step."""

    def after(self, loss: float, skipped: bool, window: int) -> "History":
        """With one step more; at most `window` losses are kept."""
        if skipped:
            return History(self.losses, self.skips + 1)
        return History((*self.losses, loss)[-window:])


def fault_of_loss(settings: TrainingSpec, history: History, loss: float) -> str | None:
    """What is wrong with a step's loss, as the predicate of a sentence; None where nothing is."""
    if not math.isfinite(loss):
        return f"is {loss}"
    if settings.spike_factor == 0 or len(history.losses) < settings.spike_window:
        return None
    median = statistics.median(history.losses)
    limit = median + settings.spike_factor * deviation(history.losses)
    if loss <= limit:
        return None
    return (
        f"is {loss:.4g}, a spike: the last {len(history.losses)} have the median {median:.4g}, and "
        f"training.spike_factor {settings.spike_factor:g} allows up to {limit:.4g}"
    )


def deviation(losses: tuple[float, ...]) -> float:
    """The median absolute deviation from the median, which a few outliers do not move (Hampel,
    1974); no less than `LEAST_DEVIATION` of the median."""
    median = statistics.median(losses)
    spread = statistics.median(abs(loss - median) for loss in losses)
    return max(spread, LEAST_DEVIATION * abs(median))


def decide(settings: TrainingSpec, history: History) -> Action:
    """What follows from a fault."""
    if history.skips >= settings.max_skips:
        return "stop"
    return settings.on_divergence
