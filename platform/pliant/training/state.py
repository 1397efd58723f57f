"""Saves and restores a run: the engine's fragments, the place in the data, and the ledger."""

import logging
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pliant.checkpoints import reader, retention, writer
from pliant.checkpoints.fragments import Fragment
from pliant.checkpoints.manifest import LedgerFile, Manifest, RankFile, file_digest
from pliant.data.ledger import Entries, Ledger, write_ledger
from pliant.elastic.resume import check_identity
from pliant.errors import PliantError
from pliant.topology import Place
from pliant.training import deepspeed_adapter as adapter
from pliant.training.progress import Progress

log = logging.getLogger(__name__)


class TrainingState:
    """The state of one attempt, as one rank holds it. Its methods are called by all ranks."""

    def __init__(
        self,
        deepspeed_engine: Any,
        place: Place,
        run_dir: Path,
        ledger: Ledger,
        identity: dict[str, Any],
        frozen_digest: str,
        keep: int,
    ) -> None:
        self._engine = deepspeed_engine
        self._source = adapter.fragment_source(deepspeed_engine)
        self._place = place
        self._checkpoints = run_dir / "checkpoints"
        self._ledgers = run_dir / "ledger"
        self._ledger = ledger
        self._identity = identity
        self._frozen_digest = frozen_digest
        self._keep = keep
        self._committed: tuple[LedgerFile, ...] = ()
        self.attempt = 0
        self.saved_step: int | None = None
        """The step of the newest checkpoint that this attempt knows of."""

    def restore(self) -> Progress:
        """Loads the newest whole checkpoint; a fresh `Progress` where there is none.

        Raises `CheckpointMismatch` for a checkpoint of another model or job.
        """
        checkpoint = self._agree_on_checkpoint()
        if checkpoint is None:
            return Progress()
        reader.check_tensors(checkpoint, _tensors(self._engine))
        check_identity(checkpoint, self._identity, self._frozen_digest)
        reader.load(checkpoint, self._fragments())
        self._source.refresh()
        manifest = checkpoint.manifest
        adapter.set_optimizer_steps(self._engine, manifest.optimizer["steps"])
        adapter.set_loss_scale(self._engine, manifest.optimizer["loss_scale"])
        self._engine.global_steps = manifest.step
        self._committed = manifest.ledger
        self.saved_step = manifest.step
        return Progress(**manifest.progress)

    def save(self, progress: Progress) -> float:
        """Writes and commits a checkpoint; returns how many seconds that took.

        Raises on every rank what any rank met, `NoSpace` for one; the last good checkpoint stays.
        """
        began = time.perf_counter()
        place = self._place
        directory = writer.attempt_directory(
            self._checkpoints, progress.step, self.attempt, place.world_size
        )
        entries = self._ledger.take()
        file = _caught(lambda: writer.write_rank_file(directory, place.rank, self._fragments()))
        parts = _gather((file, entries))
        outcome: list[Any] = [None]
        if place.rank == 0:
            outcome = [_caught(lambda: self._commit(directory, progress, parts))]
        dist.broadcast_object_list(outcome, src=0)
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        self._committed = outcome[0]
        self.saved_step = progress.step
        return time.perf_counter() - began

    def _agree_on_checkpoint(self) -> reader.Checkpoint | None:
        """Rank 0 verifies and chooses; all take the same."""
        chosen: list[Any] = [None]
        if self._place.rank == 0:
            chosen = [_caught(lambda: reader.newest(self._checkpoints, self._ledgers))]
        dist.broadcast_object_list(chosen, src=0)
        if isinstance(chosen[0], BaseException):
            raise chosen[0]
        return chosen[0]

    def _commit(
        self, directory: Path, progress: Progress, parts: list[tuple[Any, Entries]]
    ) -> tuple[LedgerFile, ...]:
        """On rank 0, once every rank's file is on disk."""
        for file, _ in parts:
            if isinstance(file, BaseException):
                shutil.rmtree(directory, ignore_errors=True)  # half of it would only take room
                raise file
        ledger = self._committed + self._write_ledger(directory.name, parts)
        self._manifest(progress, [file for file, _ in parts], ledger).write(directory)
        retention.prune(self._checkpoints, self._keep)
        return ledger

    def _write_ledger(self, name: str, parts: list[tuple[Any, Entries]]) -> tuple[LedgerFile, ...]:
        ranks = [entries for _, entries in parts]
        if not any(ranks):
            return ()
        path = self._ledgers / f"{name}.parquet"
        first, last = write_ledger(path, ranks)
        return (LedgerFile(path.name, path.stat().st_size, file_digest(path), first, last),)

    def _manifest(
        self, progress: Progress, files: list[RankFile], ledger: tuple[LedgerFile, ...]
    ) -> Manifest:
        groups = [
            {key: value for key, value in group.items() if key in _GROUP_SETTINGS}
            for group in adapter.parameter_groups(self._engine)
        ]
        return Manifest(
            step=progress.step,
            attempt=self.attempt,
            world_size=self._place.world_size,
            zero_stage=self._engine.zero_optimization_stage(),
            epoch=progress.epoch,
            pack=progress.pack,
            tensors=_tensors(self._engine),
            frozen_digest=self._frozen_digest,
            identity=self._identity,
            optimizer={
                "steps": adapter.optimizer_steps(self._engine),
                "loss_scale": adapter.loss_scale(self._engine),
                "groups": groups,
            },
            progress=progress.__dict__,
            files=tuple(files),
            ledger=ledger,
        )

    def _fragments(self) -> list[Fragment]:
        return self._source.fragments() + _buffers(self._engine, self._place.rank == 0)


_GROUP_SETTINGS = ("lr", "betas", "eps", "weight_decay")


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


def _gather(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _caught(action: Any) -> Any:
    """What `action` returns, or the error it raises: to be told to the other ranks first."""
    try:
        return action()
    except (OSError, PliantError) as error:
        return error
