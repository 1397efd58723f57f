"""Slows a tiny model down, which would else be through with its steps before a fault is felt."""

import time

from pliant.batch import StepBatch
from pliant.training.engine import StepResult
from pliant.training.progress import Progress

PAUSE_S = 0.1


class Pace:
    """A callback that waits a moment after every step, on every rank."""

    def after_step(self, progress: Progress, batch: StepBatch, result: StepResult) -> None:
        time.sleep(PAUSE_S)
