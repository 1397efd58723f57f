"""Steps that go wrong on purpose; what `test_engine` runs in each rank."""

from collections.abc import Callable
from typing import Any

import torch

from fakes.engines import engine_of, global_batch, here, share, whole_state
from fakes.jobs import tiny_spec
from fakes.own_code import nan_gradient_nll, nan_nll
from pliant.errors import PliantError
from pliant.spec import JobSpec
from pliant.training import deepspeed_adapter as adapter
from pliant.training.digests import digest
from pliant.training.engine import ZeroEngine, nll_sum

FAULTS = {"loss": nan_nll, "gradient": nan_gradient_nll}
WITHHELD = len(FAULTS) + 1
"""The step after those with a fault."""


def _partly(stage: int) -> dict[str, Any]:
    whole = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {"zero_stage": stage, **whole}


def spec_of(stage: int, **training: Any) -> JobSpec:
    settings = {"on_divergence": "skip", "clip_norm": 0.2, **training}
    return tiny_spec({"training": settings, "deepspeed": _partly(stage)})


SKIPS = {
    **{f"fp32, stage {stage}": spec_of(stage) for stage in range(4)},
    **{f"bf16, stage {stage}": spec_of(stage, precision="bf16") for stage in (0, 1, 3)},
    "exact, bf16, stage 2": spec_of(2, exact=True, precision="bf16"),
}


def all_skips() -> dict[str, Any]:
    return {name: _skips(spec) for name, spec in SKIPS.items()} | {"policies": _policies()}


def _skips(spec: JobSpec) -> dict[str, Any]:
    """A step, some that are left out for different reasons, and another step; then only the first
    and the last of them."""
    last = WITHHELD + 1
    with engine_of(spec) as made:
        made.withheld = frozenset({WITHHELD + 1})
        _step(made, 0)
        states = [_state(made)]
        results = []
        for step, loss in enumerate([*FAULTS.values(), nll_sum], start=1):
            results.append(_step(made, step, loss))
            states.append(_state(made))
        results.append(_step(made, last))
        final = _state(made)
    with engine_of(spec) as made:
        _step(made, 0)
        _step(made, last)
        return {
            "skipped": [result.skipped for result in results],
            "reasons": [result.reason for result in results],
            "states": states,
            "final": final,
            "expected": _state(made),
        }


def _policies() -> dict[str, Any]:
    """What is raised, or told, by steps that go wrong one after another."""
    twice, nan = [nan_nll] * 2, [nan_gradient_nll]
    spikes = [nll_sum] * 4 + [_leaping_nll, nll_sum]
    seen = {"spike_factor": 5, "spike_window": 4, "lr": 1e-6}
    return {
        "rewind": _outcome(spec_of(1, on_divergence="rewind"), nan),
        "too many skips": _outcome(spec_of(1, max_skips=1), twice),
        "too many rewinds": _outcome(spec_of(1, on_divergence="rewind", max_skips=0), nan),
        "spike": _outcome(spec_of(1, **seen), spikes),
        "spike, exact": _outcome(spec_of(1, exact=True, **seen), spikes),
        "too large": _outcome(spec_of(1, exact=True), [_steep_nll]),
    }


def _outcome(spec: JobSpec, losses: list[Callable[..., Any]]) -> list[str] | PliantError:
    with engine_of(spec) as made:
        try:
            return [_step(made, step, loss).reason for step, loss in enumerate(losses)]
        except PliantError as error:
            return error


def _leaping_nll(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    return 3 * nll_sum(logits_BTV, labels_BT)


def _steep_nll(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """A loss as usual, with a finite gradient beyond what 2^62 allows."""
    nll = nll_sum(logits_BTV, labels_BT)
    return nll + 1e9 * (nll - nll.detach())


def _step(made: ZeroEngine, step: int, loss: Callable[..., Any] = nll_sum) -> Any:
    made.nll.loss = loss
    return made.step(share(global_batch(step), here()), step, vote=0)


def _state(made: ZeroEngine) -> tuple[int, int, int]:
    """Digests of masters with moments and of what the model computes with; optimizer steps."""
    masters = digest(tensor for _, tensor in sorted(whole_state(made).items()))
    module = digest(p.data for p in made.deepspeed.module.parameters() if p.numel())
    return masters, module, adapter.optimizer_steps(made.deepspeed)
