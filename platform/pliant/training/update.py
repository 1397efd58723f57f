"""How a step's gradients come about and reach the weights. `ZeroUpdate` leaves both to DeepSpeed;
`exact.ExactUpdate` does them in whole numbers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pliant.batch import MicroBatch, StepBatch
from pliant.topology import Place
from pliant.training import deepspeed_adapter as adapter

Forward = Callable[[MicroBatch, int], torch.Tensor]
"""(micro-batch, step counted from 0) -> its summed negative log-likelihood, with dropout."""


@dataclass(frozen=True)
class Gradient:
    """What is known of a step's gradient, the same on every rank."""

    norm: float
    """Before clipping; not finite where an element is not."""
    fault: str | None
    """What is wrong with it, as the predicate of a sentence."""


class Update(Protocol):
    """One optimizer step is one call of `gather` and one of `apply`, on every rank."""

    def gather(self, batch: StepBatch, step: int, vote: int) -> tuple[float, int]:
        """Runs this rank's part forward and backward; the summed negative log-likelihood and the
        votes, over all ranks."""

    def apply(self, wanted: bool) -> Gradient:
        """Changes the weights by the gathered gradients, where that is wanted and they have no
        fault; otherwise weights, moments and the optimizer's count of steps stay as they are."""

    def total(self, losses: list[torch.Tensor]) -> float:
        """The sum of scalars over all ranks."""


class Gate:
    """Keeps an optimizer from applying the gradients that it is given.

    Gradients are taken away before its step and given back after it, for whoever owns them to
    clear: an optimizer leaves parameters without gradients alone. That way DeepSpeed's own step
    runs to its end at every stage, and all of its books are kept.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.is_open = True
        self._taken: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: Any, *_: Any) -> None:
        if self.is_open:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._taken.append((parameter, parameter.grad))
                parameter.grad = None

    def _after(self, *_: Any) -> None:
        for parameter, gradient in self._taken:
            parameter.grad = gradient
        self._taken.clear()


class ZeroUpdate:
    """DeepSpeed accumulates, reduces, clips and steps."""

    def __init__(
        self,
        deepspeed_engine: Any,
        forward: Forward,
        optimizer: torch.optim.Optimizer,
        place: Place,
        device: torch.device,
        clip_norm: float | None,
    ) -> None:
        """`clip_norm` is for where DeepSpeed neither clips nor tells the norm; 0 only measures."""
        self._deepspeed = deepspeed_engine
        self._forward = forward
        self._place = place
        self._device = device
        self._clip_norm = clip_norm
        self._clipped_norm = math.nan
        if clip_norm is not None:
            optimizer.register_step_pre_hook(self._clip)
        self._gate = Gate(optimizer)

    def gather(self, batch: StepBatch, step: int, vote: int) -> tuple[float, int]:
        # DeepSpeed averages gradients over the ranks; a sum over the global batch is wanted.
        weight = self._place.world_size / max(batch.num_targets, 1)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for micro in batch.micro_batches:
            nll = self._forward(micro, step)
            self._deepspeed.backward(nll * weight, scale_wrt_gas=False)
            total += nll.detach().double()
        nll_total, votes = self._sum_over_ranks(total, vote)
        return nll_total, round(votes)

    def apply(self, wanted: bool) -> Gradient:
        """DeepSpeed itself leaves out an update whose gradient is not finite, with no more than a
        warning, except at stage 0 in fp32."""
        self._gate.is_open = wanted
        self._deepspeed.step()
        if self._clip_norm is None:
            norm = adapter.grad_norm(self._deepspeed)
        else:
            norm = self._clipped_norm
        return Gradient(norm, None if math.isfinite(norm) else f"has the norm {norm}")

    def total(self, losses: list[torch.Tensor]) -> float:
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        return self._sum_over_ranks(sum((loss.double() for loss in losses), zero), 0)[0]

    def _clip(self, optimizer: Any, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        limit = self._clip_norm or math.inf
        self._clipped_norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
        if not math.isfinite(self._clipped_norm):
            self._gate.is_open = False

    def _sum_over_ranks(self, total: torch.Tensor, vote: int) -> tuple[float, float]:
        pair = torch.stack([total, torch.tensor(vote, dtype=torch.float64, device=self._device)])
        dist.all_reduce(pair)
        first, second = pair.tolist()
        return first, second
