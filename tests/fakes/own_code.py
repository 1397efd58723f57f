"""A user's own code, as a spec names it by dotted paths: models, losses and a callback."""

from typing import Any

import torch
from torch import nn

from pliant.batch import PackedMetadata, StepBatch
from pliant.spec.model import ModelSpec
from pliant.training.engine import StepResult, nll_sum
from pliant.training.progress import Progress


class AverageSoFar(nn.Module):
    """Predicts the next token from the mean embedding of the segment so far; returns logits."""

    def __init__(self, vocab_size: int, width: int, keeps_segments_apart: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size)
        self.keeps_segments_apart = keeps_segments_apart
        self.register_buffer("seen", torch.zeros(3, 2))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        packed: PackedMetadata,
        use_cache: bool,
    ) -> torch.Tensor:
        embedded_BTC = self.embed(input_ids)
        rows = (
            packed.segments
            if self.keeps_segments_apart
            else [[input_ids.shape[1]]] * len(input_ids)
        )
        means = [
            torch.cat([_running_mean(part) for part in torch.split(row, list(lengths))])
            for row, lengths in zip(embedded_BTC, rows, strict=True)
        ]
        return self.head(self.norm(torch.stack(means)))


def _running_mean(part_TC: torch.Tensor) -> torch.Tensor:
    counts = torch.arange(1, len(part_TC) + 1, dtype=part_TC.dtype)
    return part_TC.cumsum(dim=0) / counts[:, None]


def average_so_far(spec: ModelSpec, vocab_size: int) -> nn.Module:
    return AverageSoFar(vocab_size, spec.factory_args.get("width", 8), True)


def average_over_boundaries(spec: ModelSpec, vocab_size: int) -> nn.Module:
    """Ignores the segments: pliant must refuse it."""
    return AverageSoFar(vocab_size, 8, False)


def transposed_average(spec: ModelSpec, vocab_size: int) -> nn.Module:
    """With weights that do not lie in memory in their own order."""
    model = AverageSoFar(vocab_size, 8, True)
    model.head.weight = nn.Parameter(torch.randn(8, vocab_size).t())
    model.register_buffer("seen", torch.arange(6.0).view(2, 3).t())
    return model


def no_model(spec: ModelSpec, vocab_size: int) -> Any:
    return "not a module"


def doubled_nll(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    return 2 * nll_sum(logits_BTV, labels_BT)


def nan_nll(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    return nll_sum(logits_BTV, labels_BT) * float("nan")


def nan_gradient_nll(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """A finite loss whose gradient is not: the slope of a square root at zero, times zero."""
    zero = (logits_BTV - logits_BTV.detach()).pow(2).sum()
    return nll_sum(logits_BTV, labels_BT) + zero.sqrt()


class LowestLoss:
    """A callback: remembers the best step."""

    def __init__(self) -> None:
        self.step, self.loss = 0, float("inf")

    def after_step(self, progress: Progress, batch: StepBatch, result: StepResult) -> None:
        if result.loss < self.loss:
            self.step, self.loss = progress.step, result.loss


def upper_case(record: dict[str, Any]) -> dict[str, Any] | None:
    """A transform: drops every record whose prompt has a 7, and shouts the rest."""
    if "7" in record["prompt"]:
        return None
    return {"prompt": record["prompt"].upper(), "completion": record["completion"].upper()}
