"""Runs optimizer steps: the only place where a batch meets the model.

The loss of a step is the summed negative log-likelihood of the global batch's target tokens divided
by their number. It is neither a mean over micro-batches nor over ranks, so that it does not depend
on how the batch was cut, and a part without targets contributes zero.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F

from pliant.batch import IGNORED, MicroBatch, StepBatch
from pliant.errors import TrainingDiverged, TrainingRewinds
from pliant.spec import JobSpec
from pliant.spec.dotted import load_dotted
from pliant.spec.training import TrainingSpec
from pliant.topology import Place
from pliant.training import deepspeed_adapter as adapter
from pliant.training.deepspeed_config import clips_by_itself, deepspeed_config
from pliant.training.divergence import History, decide, fault_of_loss
from pliant.training.exact import ExactUpdate, demand_determinism
from pliant.training.model import forward
from pliant.training.schedule import learning_rate
from pliant.training.update import Update, ZeroUpdate

log = logging.getLogger(__name__)

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [B, T, V], unshifted labels [B, T]) -> the summed negative log-likelihood, a scalar."""


@dataclass(frozen=True)
class StepResult:
    """What a step tells, the same on every rank."""

    loss: float
    lr: float
    grad_norm: float
    votes: int
    """The sum of the ranks' votes in this step."""
    seconds: float
    """From the batch to the updated weights, on this rank."""
    skipped: bool = False
    """Whether the step's update was left out. The batch counts as trained on all the same. (Updates
    that fp16 leaves out while it looks for a loss scale are not meant.)"""
    reason: str = ""
    """Why it was left out, in a sentence."""


class Engine(Protocol):
    """What the loop needs of an engine."""

    def step(self, batch: StepBatch, step: int, vote: int) -> StepResult:
        """One optimizer step; `vote` is added up over the ranks along with the loss."""

    def evaluate(self, batches: Iterable[StepBatch]) -> float:
        """The loss over all batches, without training."""


class Nll:
    """The summed negative log-likelihood of a micro-batch's targets under the model."""

    def __init__(self, model: Any, loss: Loss, device: torch.device, seed: int) -> None:
        self.loss = loss
        self._model = model
        self._device = device
        self._seed = seed

    def __call__(self, micro: MicroBatch) -> torch.Tensor:
        tokens_BT = micro.tokens_BT.to(self._device, non_blocking=True)
        labels_BT = micro.labels_BT.to(self._device, non_blocking=True)
        positions_BT = micro.positions_BT.to(self._device, non_blocking=True)
        logits_BTV = forward(self._model, tokens_BT, positions_BT, micro.packed)
        return self.loss(logits_BTV, labels_BT)

    def in_training(self, micro: MicroBatch, step: int) -> torch.Tensor:
        """With the dropout of that micro-batch in that step."""
        seed_micro_batch(self._seed, step, micro.index)
        return self(micro)


class ZeroEngine:
    """DeepSpeed ZeRO over data-parallel ranks."""

    def __init__(
        self,
        deepspeed_engine: Any,
        spec: JobSpec,
        nll: Nll,
        update: Update,
        withheld: frozenset[int] = frozenset(),
    ) -> None:
        self.deepspeed = deepspeed_engine
        self.nll = nll
        self.withheld = withheld
        """Steps, by the number that `Progress.step` has once they are done, whose updates are left
        out unseen."""
        self.history = History()
        """Of the steps so far; to be set where training goes on from a checkpoint."""
        self._spec = spec
        self._update = update

    def step(self, batch: StepBatch, step: int, vote: int) -> StepResult:
        """Raises `TrainingDiverged` or `TrainingRewinds`, on all ranks, as the spec's policy is."""
        began = time.perf_counter()
        lr = learning_rate(self._spec.training, step)
        for group in adapter.parameter_groups(self.deepspeed):
            group["lr"] = lr
        nll_total, votes = self._update.gather(batch, step, int(vote))
        loss = nll_total / max(batch.num_targets, 1)
        grad_norm, reason = self._apply(step + 1, loss)
        self.history = self.history.after(loss, bool(reason), self._spec.training.spike_window)
        seconds = time.perf_counter() - began
        return StepResult(loss, lr, grad_norm, votes, seconds, bool(reason), reason)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[StepBatch]) -> float:
        self.deepspeed.eval()
        losses = []
        num_targets = 0
        for batch in batches:
            num_targets += batch.num_targets
            losses += [self.nll(micro) for micro in batch.micro_batches]
        self.deepspeed.train()
        return self._update.total(losses) / max(num_targets, 1)

    def _apply(self, number: int, loss: float) -> tuple[float, str]:
        """The gradient's norm, and why the update of step `number` was left out, if it was."""
        settings = self._spec.training
        if number in self.withheld:
            norm = self._update.apply(wanted=False).norm
            return norm, f"Training went back to leave out the update of step {number}."
        fault = fault_of_loss(settings, self.history, loss)
        gradient = self._update.apply(wanted=fault is None)
        if fault is not None:
            return gradient.norm, self._left_out(number, f"The loss of step {number} {fault}.")
        # In fp16 a gradient that is not finite is normal: the loss scale was too high and falls.
        if gradient.fault is not None and settings.precision != "fp16":
            sentence = f"The gradient of step {number} {gradient.fault}."
            return gradient.norm, self._left_out(number, sentence)
        return gradient.norm, ""

    def _left_out(self, number: int, fault: str) -> str:
        """The reason for leaving out the update, where that is all that follows from the fault."""
        settings = self._spec.training
        action = decide(settings, self.history)
        if action == "rewind":
            raise TrainingRewinds(
                f"{fault} Training goes back to the last checkpoint and leaves out that update.",
                step=number,
            )
        if action == "stop":
            raise TrainingDiverged(f"{fault} {_advice(settings, self.history)}", step=number)
        if dist.get_rank() == 0:
            log.warning("%s Its update is left out.", fault)
        return fault


def _advice(settings: TrainingSpec, history: History) -> str:
    before = ""
    if settings.on_divergence != "stop":
        before = (
            f"Updates left out in a row before it: {history.skips}; training.max_skips allows "
            f"{settings.max_skips}. "
        )
    return f"{before}Lower training.lr, add warmup_steps, or look at that step's data."


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
    model: torch.nn.Module,
    spec: JobSpec,
    place: Place,
    device: torch.device,
    withheld: frozenset[int] = frozenset(),
) -> ZeroEngine:
    """Hands the model to DeepSpeed, with AdamW over it. `withheld`: see `ZeroEngine`."""
    settings = spec.training
    deepspeed = adapter.import_deepspeed(device.type)
    if not dist.is_initialized():
        raise RuntimeError("the process group must exist before the engine")
    if settings.exact and device.type == "cuda":
        demand_determinism()
    optimizer = _optimizer(model, settings)
    deepspeed_engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=deepspeed_config(spec)
    )
    adapter.set_optimizer_steps(deepspeed_engine, 0)
    # DeepSpeed's own forward pass prepares for its own backward pass, which exact training has not.
    called = deepspeed_engine.module if settings.exact else deepspeed_engine
    loss: Loss = load_dotted(settings.loss, "training.loss") if settings.loss else nll_sum
    nll = Nll(called, loss, device, settings.seed)
    if settings.exact:
        num_micro_batches = settings.global_batch_size // settings.micro_batch_size
        update: Update = ExactUpdate(
            deepspeed_engine, nll.in_training, optimizer, num_micro_batches, settings.clip_norm
        )
    else:
        clip_norm = settings.clip_norm if clips_by_itself(spec) else None
        update = ZeroUpdate(deepspeed_engine, nll.in_training, optimizer, place, device, clip_norm)
    return ZeroEngine(deepspeed_engine, spec, nll, update, withheld)


def _optimizer(model: torch.nn.Module, settings: TrainingSpec) -> torch.optim.AdamW:
    """The rate is set before each step. DeepSpeed may take one without gradients to make the
    optimizer's state; at a rate of 0 it changes no weights."""
    return torch.optim.AdamW(
        parameter_groups(model, settings.weight_decay),
        lr=0.0,
        betas=settings.betas,
        eps=settings.eps,
        foreach=False if settings.exact else None,
    )


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases, norms and other vectors do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
