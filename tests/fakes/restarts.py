"""Runs that are saved and others that go on from them; what `test_state` runs in each rank."""

import shutil
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fakes.commits import hosted_commits
from fakes.engines import V, global_batch, here, share, whole_state
from fakes.jobs import TINY_LLAMA, tiny_spec
from fakes.measure import zero
from pliant.accel import attention
from pliant.checkpoints import reader
from pliant.data.ledger import Ledger
from pliant.elastic.resume import job_identity
from pliant.errors import PliantError
from pliant.spec import JobSpec
from pliant.training import deepspeed_adapter as adapter
from pliant.training.contents import Contents, frozen_digest
from pliant.training.digests import digest
from pliant.training.engine import ZeroEngine, build_engine
from pliant.training.model import build_model
from pliant.training.progress import Progress
from pliant.training.state import TrainingState

SAVED_STEP, LAST_STEP = 3, 5

MODELS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"model": {"lora": {"r": 4}}},
    "tied": {"model": {"config": {**TINY_LLAMA, "tie_word_embeddings": True}}},
}
BF16 = {"training": {"precision": "bf16"}}
OWN = {"model": {"config": None, "factory": "fakes.own_code.average_so_far"}}

VARIANTS: dict[str, dict[str, Any]] = {
    **{
        f"{name}, stage {stage}": {**changes, "deepspeed": zero(stage)}
        for name, changes in MODELS.items()
        for stage in range(4)
    },
    **{f"bf16, stage {stage}": {**BF16, "deepspeed": zero(stage)} for stage in (0, 1, 3)},
    **{f"own model, stage {stage}": {**OWN, "deepspeed": zero(stage)} for stage in (0, 1, 3)},
    "full, stage 1, round robin": {"deepspeed": zero(1, round_robin_gradients=True)},
    "full, stage 2, offloaded": {"deepspeed": zero(2, offload_optimizer="cpu")},
    "full, stage 3, offloaded": {
        "deepspeed": zero(3, offload_optimizer="cpu", offload_param="cpu")
    },
    "full, stage 3, whole": {"deepspeed": {"zero_stage": 3}},
    "full, stage 3, sub-groups": {"deepspeed": zero(3, sub_group_size=3000)},
}


def at_stage(variant: str, stage: int) -> dict[str, Any]:
    """The changes of a variant, with another stage."""
    return {**VARIANTS[variant], "deepspeed": zero(stage)}


@dataclass
class Run:
    engine: ZeroEngine
    state: TrainingState
    ledger: Ledger
    progress: Progress
    events: list[dict[str, Any]]
    """What the committer told, on rank 0."""

    def train(self, until: int, keeps: bool = True) -> list[float]:
        """Steps up to number `until`; their losses. Unless it `keeps`, nobody learns of them."""
        losses = []
        while self.progress.step < until:
            step = self.progress.step
            batch = share(global_batch(step), here(), step)
            losses.append(self.engine.step(batch, step, vote=False).loss)
            self.ledger.record(step, batch)
            self.progress = self.progress.after(batch)
            if keeps:
                self.state.snapshot(self.progress)
        return losses


@contextmanager
def run_of(
    spec: JobSpec,
    run_dir: Path,
    data_key: str = "key",
    keep: int = 5,
    hot_every: int = 0,
    change: Callable[[torch.nn.Module], None] | None = None,
) -> Iterator[Run]:
    """A restored run. `change` alters the model before anything else sees it."""
    warnings.simplefilter("ignore")
    with attention.registered():
        model = build_model(spec, V)
        if change is not None:
            change(model)
        frozen = frozen_digest(model, digest)
        engine = build_engine(model, spec, here(), torch.device("cpu"))
        ledger = Ledger()
        contents = Contents(engine, here(), job_identity(spec, data_key), frozen)
        commits, events = hosted_commits(run_dir, keep)
        settings = spec.checkpoint.model_copy(update={"hot_every": hot_every})
        state = TrainingState(contents, here(), run_dir, ledger, settings, commits)
        try:
            yield Run(engine, state, ledger, state.restore(), events)
        finally:
            state.close()
        engine.deepspeed.destroy()


def scramble(model: torch.nn.Module) -> None:
    """Whatever a restored run has right it has from the checkpoint."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    for buffer in model.buffers():
        if buffer.dtype == torch.int64:
            buffer.fill_(-1)


def first_runs(root: Path, variants: list[str]) -> dict[str, dict[str, Any]]:
    """Each variant from the start, saved on its way."""
    return {name: _first_run(root / name, tiny_spec(VARIANTS[name])) for name in variants}


def _first_run(run_dir: Path, spec: JobSpec) -> dict[str, Any]:
    with run_of(spec, run_dir) as run:
        assert run.progress == Progress()
        run.train(SAVED_STEP)
        _set_buffers(run.engine.deepspeed.module)
        run.state.save(run.progress, wait=True)
        facts = _facts(run)
        return {**facts, "losses": run.train(LAST_STEP), "final": whole_state(run.engine)}


def _set_buffers(model: torch.nn.Module) -> None:
    """As a model's own code might have done by now."""
    for name, buffer in model.named_buffers():
        if name in ("seen", "steps"):
            buffer.copy_(torch.arange(1, 1 + buffer.numel()).view(buffer.shape))


def later_runs(root: Path, jobs: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Runs that go on from a saved variant, with the settings given; nothing is saved."""
    return [_later_run(root / name, tiny_spec(changes)) for name, changes in jobs]


def _later_run(run_dir: Path, spec: JobSpec) -> dict[str, Any]:
    with run_of(spec, run_dir, change=scramble) as run:
        facts = _facts(run)
        return {**facts, "losses": run.train(LAST_STEP), "final": whole_state(run.engine)}


def _facts(run: Run) -> dict[str, Any]:
    deepspeed = run.engine.deepspeed
    persistent = deepspeed.module.state_dict()
    return {
        "progress": run.progress,
        "state": {key: tensor.clone() for key, tensor in whole_state(run.engine).items()},
        "steps": adapter.optimizer_steps(deepspeed),
        "all_steps": sorted(
            {int(s["step"]) for s in adapter._inner_optimizer(deepspeed).state.values()}
        ),
        "decays": [group["weight_decay"] for group in adapter.parameter_groups(deepspeed)],
        "buffers": {n: b.clone() for n, b in deepspeed.module.named_buffers() if n in persistent},
    }


def mismatches(root: Path) -> dict[str, PliantError | None]:
    """What a run of each kind says to a checkpoint that is not its own."""
    full, lora = root / "full, stage 1", root / "lora, stage 1"

    def base_weights(model: torch.nn.Module) -> None:
        with torch.no_grad():
            next(p for p in model.parameters() if not p.requires_grad).view(-1)[0] += 1e-3

    config = TINY_LLAMA
    return {
        "wider": _refusal(full, {"model": {"config": {**config, "hidden_size": 48}}}),
        "deeper": _refusal(full, {"model": {"config": {**config, "num_hidden_layers": 3}}}),
        "shallower": _refusal(full, {"model": {"config": {**config, "num_hidden_layers": 1}}}),
        "fewer heads": _refusal(
            full,
            {"model": {"config": {**config, "num_attention_heads": 2, "num_key_value_heads": 1}}},
        ),
        "adapters": _refusal(full, MODELS["lora"]),
        "batch size": _refusal(full, {"training": {"global_batch_size": 6}}),
        "seed": _refusal(full, {"training": {"seed": 1}}),
        "data": _refusal(full, {}, data_key="other"),
        "frozen weights": _refusal(lora, MODELS["lora"], change=base_weights),
        "nothing": _refusal(full, {}),
    }


def _refusal(run_dir: Path, changes: dict[str, Any], **how: Any) -> PliantError | None:
    try:
        with run_of(tiny_spec(changes), run_dir, **how):
            return None
    except PliantError as error:
        return error


def full_disk(run_dir: Path) -> dict[str, Any]:
    """The disk of the last rank is full at the second checkpoint."""
    usage = namedtuple("usage", "total used free")
    real = shutil.disk_usage
    with run_of(tiny_spec(), run_dir) as run:
        run.train(1)
        run.state.save(run.progress, wait=True)
        run.train(2)
        if here().rank == here().world_size - 1:
            shutil.disk_usage = lambda path: usage(9, 9, 0)  # type: ignore[assignment]
        try:
            run.state.save(run.progress, wait=True)
            error = None
        except PliantError as caught:
            error = caught
        shutil.disk_usage = real
        dist.barrier()
        return {"error": error, "left": _names(run_dir)}


def damaged_history(run_dir: Path) -> list[Any]:
    """Saves steps 2 and 4; step 4 is damaged; another attempt goes on from 2 and saves step 3,
    keeping one; where does the attempt after it start?"""
    with run_of(tiny_spec(), run_dir) as run:
        run.state.attempt = 1
        for step in (2, 4):
            run.train(step)
            run.state.save(run.progress, wait=True)
    if here().rank == 0:
        path = run_dir / "checkpoints/step-00000004.attempt-1.ranks-2/rank-00001.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    dist.barrier()
    with run_of(tiny_spec(), run_dir, keep=1) as run:
        resumed = run.progress.step
        run.state.attempt = 2
        run.train(3)
        run.state.save(run.progress, wait=True)
        newest = reader.newest(run_dir / "checkpoints", run_dir / "ledger")
        ledger = [(entry.first_step, entry.last_step) for entry in newest.manifest.ledger]
    with run_of(tiny_spec(), run_dir) as run:
        return [resumed, ledger, run.progress.step, _names(run_dir)]


def _names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def on_two_ranks(root: Path) -> dict[str, Any]:
    """All that is measured on the two ranks that save."""
    return {
        "saved": first_runs(root, list(VARIANTS)),
        "restored": dict(zip(VARIANTS, later_runs(root, list(VARIANTS.items())), strict=True)),
        "mismatches": mismatches(root),
        "full_disk": full_disk(root / "full disk"),
        "damaged": damaged_history(root / "damaged"),
    }
