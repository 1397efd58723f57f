"""What belongs to the state of a run beside its ledger: tensors, counters, and what they are of."""

from dataclasses import asdict
from typing import Any

import torch

from pliant.checkpoints import reader
from pliant.checkpoints.fragments import Fragment
from pliant.checkpoints.manifest import Manifest
from pliant.checkpoints.reader import Checkpoint
from pliant.checkpoints.snapshot import Description, Moment
from pliant.elastic.resume import check_identity
from pliant.topology import Place
from pliant.training import deepspeed_adapter as adapter
from pliant.training.divergence import History
from pliant.training.engine import ZeroEngine
from pliant.training.progress import Progress

_GROUP_SETTINGS = ("lr", "betas", "eps", "weight_decay")


class Contents:
    """Of one engine, as one rank holds it."""

    def __init__(
        self,
        engine: ZeroEngine,
        place: Place,
        identity: dict[str, Any],
        frozen_digest: str,
    ) -> None:
        self.device: torch.device = engine.deepspeed.device
        self._judge = engine
        self._engine = engine.deepspeed
        self._source = adapter.fragment_source(engine.deepspeed)
        self._place = place
        self._identity = identity
        self._frozen_digest = frozen_digest

    def fragments(self) -> list[Fragment]:
        return self._source.fragments() + _buffers(self._engine, self._place.rank == 0)

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises `CheckpointMismatch` for a checkpoint of another model or job."""
        reader.check_tensors(checkpoint, _tensors(self._engine))
        check_identity(checkpoint, self._identity, self._frozen_digest)

    def take_over(self, manifest: Manifest) -> Progress:
        """Sets what follows from the tensors and what is no tensor; they have been loaded on all
        ranks."""
        self._source.refresh()
        adapter.set_optimizer_steps(self._engine, manifest.optimizer["steps"])
        adapter.set_loss_scale(self._engine, manifest.optimizer["loss_scale"])
        history = manifest.optimizer.get("history", {"losses": (), "skips": 0})
        self._judge.history = History(tuple(history["losses"]), history["skips"])
        self._engine.global_steps = manifest.step
        return Progress(**manifest.progress)

    def description(self, origin: str) -> Description:
        return Description(
            zero_stage=self._engine.zero_optimization_stage(),
            tensors=_tensors(self._engine),
            frozen_digest=self._frozen_digest,
            identity=self._identity,
            origin=origin,
        )

    def moment(self, progress: Progress) -> Moment:
        return Moment(progress.step, dict(progress.__dict__), self._optimizer())

    def manifest(self, progress: Progress, attempt: int, metrics: dict[str, float]) -> Manifest:
        """Without files, ledger and digests, which the committer adds."""
        return Manifest(
            step=progress.step,
            attempt=attempt,
            world_size=self._place.world_size,
            zero_stage=self._engine.zero_optimization_stage(),
            epoch=progress.epoch,
            pack=progress.pack,
            tensors=_tensors(self._engine),
            frozen_digest=self._frozen_digest,
            identity=self._identity,
            optimizer=self._optimizer(),
            progress=dict(progress.__dict__),
            files=(),
            ledger=(),
            metrics=dict(metrics),
        )

    def _optimizer(self) -> dict[str, Any]:
        groups = [
            {key: value for key, value in group.items() if key in _GROUP_SETTINGS}
            for group in adapter.parameter_groups(self._engine)
        ]
        return {
            "steps": adapter.optimizer_steps(self._engine),
            "loss_scale": adapter.loss_scale(self._engine),
            "groups": groups,
            "history": asdict(self._judge.history),
        }


def frozen_digest(model: torch.nn.Module, digest_of: Any) -> str:
    """Of the parameters that are not trained: they are not saved, but built again."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return f"{digest_of(frozen):016x}"


def _buffers(engine: Any, is_owner: bool) -> list[Fragment]:
    """Persistent buffers, the same on every rank."""
    persistent = engine.module.state_dict(keep_vars=True)
    return [
        Fragment("buffer", name, 0, buffer.numel(), buffer.data.view(-1), is_owner)
        for name, buffer in engine.module.named_buffers()
        if name in persistent
    ]


def _tensors(engine: Any) -> dict[str, int]:
    """kind/name -> elements, of everything that all ranks together save."""
    tensors = {fragment.key: fragment.numel for fragment in _buffers(engine, True)}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            numel = getattr(parameter, "ds_numel", parameter.numel())
            tensors |= {f"{kind}/{name}": numel for kind in ("fp32", *adapter.MOMENTS)}
    return tensors
