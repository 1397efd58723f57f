"""Training whose weights are the same to the bit, whatever the number of ranks.

Floating-point sums depend on their order, and with it on how a batch was shared out; sums of whole
numbers do not. Each micro-batch's gradient of the mean loss is therefore rounded to a multiple of
2^-40 and added up as int64, over the micro-batches of a rank and then over the ranks. All that
follows is computed alike everywhere, or element by element: the norm, clipping, and an AdamW whose
kernels treat an element the same wherever it lies (the fused ones do not).

What must not change between two runs are the micro-batches, the kernels (device, libraries, threads
for each worker) and the ZeRO stage.
"""

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pliant.batch import StepBatch
from pliant.training import deepspeed_adapter as adapter
from pliant.training.update import Forward, Gradient

GRADIENT_SCALE = 2.0**40
"""Steps per unit of a gradient of the mean loss over a batch's targets."""
LOSS_SCALE = 2.0**24
"""Steps per unit of a summed negative log-likelihood: 5e11 in all, finer than fp32 from 0.5 on."""
SUM_LIMIT = 2.0**62
"""What the magnitudes of all that is added into one int64 must stay below."""
CHUNK = 1 << 18
"""Elements that are converted at a time."""

_LOSS, _VOTES, _BAD_LOSS, _NOT_FINITE, _TOO_LARGE, _HEADER = range(6)
"""What travels with the gradients, in the same reduction."""


def demand_determinism() -> None:
    """For this process, on CUDA: operators whose sums depend on timing have a deterministic kernel
    take their place, or raise an error."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


class ExactUpdate:
    """Gradients are added up in int64, on top of ZeRO 0 to 2."""

    def __init__(
        self,
        deepspeed_engine: Any,
        forward: Forward,
        optimizer: torch.optim.Optimizer,
        num_micro_batches: int,
        clip_norm: float,
    ) -> None:
        """`num_micro_batches` are those of a whole step, over all ranks; a `clip_norm` of 0 does
        not clip."""
        self._deepspeed = deepspeed_engine
        self._forward = forward
        self._optimizer = optimizer
        self._num_micro_batches = num_micro_batches
        self._clip_norm = clip_norm
        self._source = adapter.fragment_source(deepspeed_engine)
        self._slots = adapter.gradient_slots(deepspeed_engine)
        named = deepspeed_engine.module.named_parameters()
        trained = {name: parameter for name, parameter in named if parameter.requires_grad}
        self._parameters = list(trained.values())
        sizes = {name: parameter.numel() for name, parameter in trained.items()}
        self._sums = FixedPoint(sizes, self._parameters[0].device)

    def gather(self, batch: StepBatch, step: int, vote: int) -> tuple[float, int]:
        sums = self._sums
        sums.clear()
        for micro in batch.micro_batches:
            if len(micro.piece_ids) == 0:
                continue  # a dummy: how many there are depends on the number of ranks
            nll = self._forward(micro, step)
            # Not `backward`, which would set off DeepSpeed's own reduction.
            gradients = torch.autograd.grad(
                nll / max(batch.num_targets, 1), self._parameters, allow_unused=True
            )
            sums.add_gradients(gradients)
            sums.add_loss(nll.detach())
        sums.reduce(self._num_micro_batches, vote)
        return sums.loss(), sums.votes

    def apply(self, wanted: bool) -> Gradient:
        fault = self._fault()
        norm = math.nan if fault else self._sums.norm()
        if wanted and fault is None:
            factor = min(1.0, self._clip_norm / (norm + 1e-6)) if self._clip_norm else 1.0
            for slot in self._slots:
                self._sums.copy(slot.name, slot.start, factor, slot.gradient)
            self._optimizer.step()
            self._source.refresh()
        self._deepspeed.global_steps += 1
        return Gradient(norm, fault)

    def total(self, losses: list[torch.Tensor]) -> float:
        self._sums.clear()
        for loss in losses:
            self._sums.add_loss(loss)
        self._sums.reduce_loss(len(losses) * dist.get_world_size())
        return self._sums.loss()

    def _fault(self) -> str | None:
        if self._sums.not_finite:
            return "has elements that are not finite"
        if self._sums.too_large:
            limit = SUM_LIMIT / GRADIENT_SCALE / self._num_micro_batches
            return f"has elements of {limit:,.0f} or more, which training.exact cannot add up"
        return None


class FixedPoint:
    """Sums of gradients and losses in int64, over micro-batches and then over ranks.

    All buffers are made once: 8 bytes for each trained parameter, and three chunks.
    """

    def __init__(self, sizes: dict[str, int], device: torch.device) -> None:
        """`sizes`: the elements of each gradient, in the order in which they are added."""
        self._all = torch.zeros(sum(sizes.values()) + _HEADER, dtype=torch.int64, device=device)
        self._gradients, self._header = self._all[:-_HEADER], self._all[-_HEADER:]
        self._sums = dict(
            zip(sizes, torch.split(self._gradients, list(sizes.values())), strict=True)
        )
        self._single = torch.empty(CHUNK, dtype=torch.float32, device=device)
        self._double = torch.empty(CHUNK, dtype=torch.float64, device=device)
        self._whole = torch.empty(CHUNK, dtype=torch.int64, device=device)
        self._peaks = torch.zeros(2, dtype=torch.float64, device=device)
        """The largest scaled loss and gradient that this rank has added."""
        self._found = [0] * _HEADER

    def clear(self) -> None:
        self._all.zero_()
        self._peaks.zero_()

    def add_loss(self, nll: torch.Tensor) -> None:
        scaled = (nll.double() * LOSS_SCALE).round()
        self._note_peak(0, scaled.abs())
        self._header[_LOSS] += scaled.to(torch.int64)

    def add_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """One for each of `sizes`; None is a gradient of zeros."""
        for sums, gradient in zip(self._sums.values(), gradients, strict=True):
            if gradient is not None:
                self._add(sums, gradient.reshape(-1))

    def reduce(self, num_terms: int, vote: int) -> None:
        """Adds up over the ranks. `num_terms` gradients and losses were added on all ranks."""
        limit = SUM_LIMIT / num_terms
        loss, gradient = self._peaks
        self._header[_VOTES] = vote
        self._header[_BAD_LOSS] = ~(loss < limit)
        self._header[_NOT_FINITE] = ~gradient.isfinite()
        self._header[_TOO_LARGE] = gradient.isfinite() & (gradient >= limit)
        dist.all_reduce(self._all)
        self._found = self._header.tolist()

    def reduce_loss(self, num_terms: int) -> None:
        """As `reduce`, where only losses were added."""
        self._header[_BAD_LOSS] = ~(self._peaks[0] < SUM_LIMIT / max(num_terms, 1))
        dist.all_reduce(self._header)
        self._found = self._header.tolist()

    def loss(self) -> float:
        """Summed over all ranks; NaN where one of them is not finite or beyond all bounds."""
        return math.nan if self._found[_BAD_LOSS] else self._found[_LOSS] / LOSS_SCALE

    @property
    def votes(self) -> int:
        return self._found[_VOTES]

    @property
    def not_finite(self) -> bool:
        """Whether some rank added a gradient that is not."""
        return self._found[_NOT_FINITE] > 0

    @property
    def too_large(self) -> bool:
        """Whether the sums of gradients may have wrapped around."""
        return self._found[_TOO_LARGE] > 0

    def norm(self) -> float:
        """Of all gradients together. Chunks follow from the model alone, and so does the result."""
        squares = torch.zeros((), dtype=torch.float64, device=self._all.device)
        for part in torch.split(self._gradients, CHUNK):
            squares += self._as_double(part, 1.0).square_().sum()
        return math.sqrt(squares.item())

    def copy(self, name: str, start: int, factor: float, into: torch.Tensor) -> None:
        """Elements from `start` on of a gradient, times `factor`, rounded to the dtype of `into`
        (1-D)."""
        whole = self._sums[name][start : start + len(into)]
        for part, to in zip(torch.split(whole, CHUNK), torch.split(into, CHUNK), strict=True):
            to.copy_(self._as_double(part, factor))

    def _add(self, sums: torch.Tensor, gradient: torch.Tensor) -> None:
        """Scaling by a power of two and rounding to whole numbers are exact in fp32."""
        for into, part in zip(torch.split(sums, CHUNK), torch.split(gradient, CHUNK), strict=True):
            scaled = self._single[: len(part)].copy_(part).mul_(GRADIENT_SCALE).round_()
            low, high = scaled.aminmax()
            self._note_peak(1, torch.maximum(high, -low))
            into.add_(self._whole[: len(part)].copy_(scaled))

    def _note_peak(self, which: int, magnitude: torch.Tensor) -> None:
        """The comparison hands on a NaN."""
        torch.maximum(self._peaks[which], magnitude.double(), out=self._peaks[which])

    def _as_double(self, whole: torch.Tensor, factor: float) -> torch.Tensor:
        """Valid until the next call."""
        return self._double[: len(whole)].copy_(whole).mul_(factor / GRADIENT_SCALE)
