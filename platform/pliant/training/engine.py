"""Runs optimizer steps: the only place where a batch meets the model.

The loss of a step is the summed negative log-likelihood of the global batch's target tokens divided
by their number. It is neither a mean over micro-batches nor over ranks, so that it does not depend
on how the batch was cut, and a part without targets contributes zero.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F

from pliant.batch import IGNORED, MicroBatch, StepBatch
from pliant.errors import TrainingDiverged
from pliant.spec import JobSpec
from pliant.spec.dotted import load_dotted
from pliant.topology import Place
from pliant.training import deepspeed_adapter as adapter
from pliant.training.deepspeed_config import clips_by_itself, deepspeed_config
from pliant.training.model import forward
from pliant.training.schedule import learning_rate

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [B, T, V], unshifted labels [B, T]) -> the summed negative log-likelihood, a scalar."""


@dataclass(frozen=True)
class StepResult:
    """What a step tells, the same on every rank."""

    loss: float
    lr: float
    grad_norm: float
    votes: int
    """How many ranks voted in this step."""
    seconds: float
    """From the batch to the updated weights, on this rank."""


class Engine(Protocol):
    """What the loop needs of an engine."""

    def step(self, batch: StepBatch, step: int, vote: bool) -> StepResult:
        """One optimizer step; `vote` is counted over the ranks along with the loss."""

    def evaluate(self, batches: Iterable[StepBatch]) -> float:
        """The loss over all batches, without training."""


class ZeroEngine:
    """DeepSpeed ZeRO over data-parallel ranks."""

    def __init__(
        self, deepspeed_engine: Any, spec: JobSpec, place: Place, device: torch.device
    ) -> None:
        self.deepspeed = deepspeed_engine
        self._spec = spec
        self._place = place
        self._device = device
        self._loss: Loss = (
            load_dotted(spec.training.loss, "training.loss") if spec.training.loss else nll_sum
        )
        self._clipped_norm = math.nan

    def step(self, batch: StepBatch, step: int, vote: bool) -> StepResult:
        began = time.perf_counter()
        lr = learning_rate(self._spec.training, step)
        for group in adapter.parameter_groups(self.deepspeed):
            group["lr"] = lr
        # DeepSpeed averages gradients over the ranks; a sum over the global batch is wanted.
        weight = self._place.world_size / max(batch.num_targets, 1)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for micro in batch.micro_batches:
            seed_micro_batch(self._spec.training.seed, step, micro.index)
            nll = self._nll(micro)
            self.deepspeed.backward(nll * weight, scale_wrt_gas=False)
            total += nll.detach().double()
        self.deepspeed.step()
        nll_total, votes = self._sum_over_ranks(total, float(vote))
        loss = nll_total / max(batch.num_targets, 1)
        grad_norm = self._grad_norm()
        self._check_finite(step, loss, grad_norm)
        return StepResult(loss, lr, grad_norm, int(votes), time.perf_counter() - began)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[StepBatch]) -> float:
        self.deepspeed.eval()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        num_targets = 0
        for batch in batches:
            num_targets += batch.num_targets
            for micro in batch.micro_batches:
                total += self._nll(micro).double()
        self.deepspeed.train()
        nll_total, _ = self._sum_over_ranks(total, 0.0)
        return nll_total / max(num_targets, 1)

    def clip(self, parameters: list[torch.nn.Parameter]) -> None:
        """Clips reduced gradients and notes their norm, where DeepSpeed does neither."""
        limit = self._spec.training.clip_norm or math.inf
        self._clipped_norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))

    def _nll(self, micro: MicroBatch) -> torch.Tensor:
        tokens_BT = micro.tokens_BT.to(self._device, non_blocking=True)
        labels_BT = micro.labels_BT.to(self._device, non_blocking=True)
        positions_BT = micro.positions_BT.to(self._device, non_blocking=True)
        logits_BTV = forward(self.deepspeed, tokens_BT, positions_BT, micro.packed)
        return self._loss(logits_BTV, labels_BT)

    def _sum_over_ranks(self, total: torch.Tensor, vote: float) -> tuple[float, float]:
        pair = torch.stack([total, torch.tensor(vote, dtype=torch.float64, device=self._device)])
        dist.all_reduce(pair)
        first, second = pair.tolist()
        return first, second

    def _check_finite(self, step: int, loss: float, grad_norm: float) -> None:
        """A loss may be finite where its gradient is not; DeepSpeed then skips the update with no
        more than a warning. In fp16 that is normal: the loss scale was too high and is lowered."""
        is_fp16 = self._spec.training.precision == "fp16"
        figures = {"loss": loss} if is_fp16 else {"loss": loss, "gradient's norm": grad_norm}
        for what, value in figures.items():
            if not math.isfinite(value):
                raise TrainingDiverged(
                    f"The {what} of step {step + 1} is {value}. Lower training.lr, add "
                    "warmup_steps, or look at that step's data.",
                    step=step + 1,
                )

    def _grad_norm(self) -> float:
        if clips_by_itself(self._spec):
            return self._clipped_norm
        return adapter.grad_norm(self.deepspeed)


def nll_sum(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Each label is predicted by the token before it; IGNORED labels count for nothing."""
    logits = logits_BTV[:, :-1].reshape(-1, logits_BTV.shape[-1]).float()
    labels = labels_BT[:, 1:].reshape(-1)
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def seed_micro_batch(seed: int, step: int, index: int) -> None:
    """Dropout follows from the micro-batch, not from the rank that runs it."""
    digest = hashlib.blake2b(f"{seed},{step},{index}".encode(), digest_size=7).digest()
    torch.manual_seed(int.from_bytes(digest))


def build_engine(
    model: torch.nn.Module, spec: JobSpec, place: Place, device: torch.device
) -> ZeroEngine:
    """Hands the model to DeepSpeed, with AdamW over it."""
    deepspeed = adapter.import_deepspeed(device.type)
    groups = parameter_groups(model, spec.training.weight_decay)
    # The rate is set before each step. DeepSpeed may take one without gradients to make the
    # optimizer's state; at a rate of 0 it changes no weights.
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=spec.training.betas, eps=spec.training.eps)
    if not dist.is_initialized():
        raise RuntimeError("the process group must exist before the engine")
    deepspeed_engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=deepspeed_config(spec)
    )
    adapter.set_optimizer_steps(deepspeed_engine, 0)
    engine = ZeroEngine(deepspeed_engine, spec, place, device)
    if clips_by_itself(spec):
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer.register_step_pre_hook(lambda *_: engine.clip(trained))
    return engine


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases, norms and other vectors do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
