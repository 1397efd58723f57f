"""A callback whose every attempt fails."""

from pliant.batch import StepBatch
from pliant.training.engine import StepResult
from pliant.training.progress import Progress


class FailAtStepTwo:
    def after_step(self, progress: Progress, batch: StepBatch, result: StepResult) -> None:
        if progress.step == 2:
            raise RuntimeError("no luck at step 2")
