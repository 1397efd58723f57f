"""Exact training, to the bit; what `test_exact` runs in each rank."""

import math
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fakes.engines import engine_of, global_batch, here, share, whole_state
from fakes.jobs import TINY_LLAMA, tiny_spec
from fakes.restarts import run_of, scramble
from pliant.spec import JobSpec
from pliant.training import deepspeed_adapter as adapter
from pliant.training.digests import digest
from pliant.training.engine import ZeroEngine
from pliant.training.exact import CHUNK, FixedPoint

STEPS = 8
SAVED_STEP = 3
CLIP = 0.2
PLAIN = "not exact"


def spec_of(
    stage: int, training: dict[str, Any] | None = None, model: Any = None, **deepspeed: Any
) -> JobSpec:
    settings = {"exact": True, "clip_norm": CLIP, "weight_decay": 0.1, **(training or {})}
    changes = {"training": settings, "deepspeed": {"zero_stage": stage, **deepspeed}}
    return tiny_spec(changes | ({"model": model} if model else {}))


TIED = {"config": {**TINY_LLAMA, "tie_word_embeddings": True}}
VARIANTS = {
    **{
        f"{precision}, stage {stage}": spec_of(stage, {"precision": precision})
        for precision in ("fp32", "bf16")
        for stage in range(3)
    },
    "lora, checkpointed": spec_of(1, {"activation_checkpointing": True}, {"lora": {"r": 4}}),
    "tied, unclipped, offloaded": spec_of(
        1, {"clip_norm": 0.0}, TIED, round_robin_gradients=True, offload_optimizer="cpu"
    ),
}


WORLDS = [2, 1, 3, 4]
"""Two ranks save a run, which the others go on from."""


def everything(root: Path) -> dict[int, dict[str, Any]]:
    """On the four ranks of a group, which form one smaller group after another: processes are what
    takes long to start. A rank knows of the groups that it was in."""
    warnings.simplefilter("ignore")
    rank, all_ranks = here().rank, here().world_size
    results = {}
    for world_size in WORLDS:
        if rank < world_size:
            _join(root, rank, world_size, f"{world_size}")
            results[world_size] = _measured(root)
    _join(root, rank, all_ranks, "last")
    return results


def _join(root: Path, rank: int, world_size: int, name: str) -> None:
    adapter.leave_process_group()
    store = f"file://{root}/group-{name}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)


def _measured(root: Path) -> dict[str, Any]:
    results: dict[str, Any] = {name: _curve(spec) for name, spec in VARIANTS.items()}
    results[PLAIN] = _curve(spec_of(1, {"exact": False}))
    results["resumed"] = {name: _resumed(root, name) for name in RESUMED}
    results["fixed point"] = _fixed_point()
    return results


RESUMED = ["bf16, stage 1"]


def _curve(spec: JobSpec) -> dict[str, Any]:
    with engine_of(spec) as made:
        results = [_step(made, step) for step in range(STEPS)]
        return {
            "losses": [result.loss for result in results],
            "norms": [result.grad_norm for result in results],
            "votes": [result.votes for result in results],
            "evaluation": made.evaluate([share(global_batch(9), here())]),
            "digest": _digest(made),
        }


def _step(made: ZeroEngine, step: int) -> Any:
    return made.step(share(global_batch(step), here(), step), step, vote=step)


def _digest(made: ZeroEngine) -> int:
    """Of master weights and moments."""
    return digest(tensor for _, tensor in sorted(whole_state(made).items()))


def _resumed(root: Path, name: str) -> int:
    if here().world_size == WORLDS[0]:
        with run_of(VARIANTS[name], root / name) as run:
            run.train(SAVED_STEP)
            run.state.save(run.progress, wait=True)
    with run_of(VARIANTS[name], root / name, change=scramble) as run:
        assert run.progress.step == SAVED_STEP
        run.train(STEPS)
        return _digest(run.engine)


def _fixed_point() -> dict[str, Any]:
    """Each rank adds gradients and losses of its own; the first is longer than a chunk."""
    sizes = {"long": CHUNK + 3, "absent": 2, "short": 4}
    sums = FixedPoint(sizes, torch.device("cpu"))
    place = here()
    generator = torch.Generator().manual_seed(place.rank)
    long = torch.randn(sizes["long"], generator=generator)
    short = torch.tensor([1.5, -(2.0**-41) * 1.1, 2.0**-42, 3.0 * 2.0**-40], dtype=torch.float32)

    def reduced(*gradients: torch.Tensor, loss: float = 0.5) -> list[Any]:
        sums.clear()
        for gradient in gradients:
            sums.add_gradients([long, None, gradient])
        sums.add_loss(torch.tensor(loss))
        sums.reduce(num_terms=4, vote=place.rank)
        return [sums.loss(), sums.votes, sums.not_finite, sums.too_large]

    plain = reduced(short, short)
    short_sum, long_tail = torch.zeros(3), torch.zeros(5)
    sums.copy("short", 1, 1.0, short_sum)
    sums.copy("long", CHUNK - 2, 0.5, long_tail)
    norm = sums.norm()
    last = place.rank == place.world_size - 1
    bad = torch.full((4,), math.nan if last else 0.0)
    steep = torch.full((4,), 2.0**20 if last else 0.0)
    almost = torch.full((4,), -(2.0**20) * 0.999 if last else 0.0)
    return {
        "plain": plain,
        "short": short_sum.tolist(),
        "long": long_tail,
        "added": long,
        "norm": norm,
        "nan": reduced(bad)[2:],
        "steep": reduced(steep)[2:],
        "almost": reduced(almost)[2:],
        "bad loss": reduced(short, loss=math.inf if last else 1.0)[0],
        "huge loss": reduced(short, loss=1e12 if last else 1.0)[0],
    }
