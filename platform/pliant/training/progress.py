"""How far a run has come."""

from dataclasses import dataclass, replace

from pliant.batch import StepBatch


@dataclass(frozen=True)
class Progress:
    """The same on every rank; saved with every checkpoint."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    pack: int = 0
    """Packs of the epoch that are done."""
    samples: int = 0
    tokens: int = 0
    """Without padding."""

    def after(self, batch: StepBatch) -> "Progress":
        return replace(
            self,
            step=self.step + 1,
            epoch=batch.epoch,
            pack=batch.end_pack,
            samples=self.samples + batch.num_samples,
            tokens=self.tokens + batch.num_tokens,
        )
