"""What the tests of the engine measure in each rank of a process group."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fakes.engines import (
    V,
    engine_of,
    global_batch,
    here,
    num_targets,
    share,
    train_steps,
    whole_state,
)
from fakes.jobs import TINY_LLAMA, tiny_spec
from fakes.skips import all_skips
from pliant.accel import attention
from pliant.batch import MicroBatch
from pliant.errors import RanksDisagree, TrainingDiverged
from pliant.spec import JobSpec
from pliant.training import deepspeed_adapter as adapter
from pliant.training.digests import agree
from pliant.training.engine import ZeroEngine, parameter_groups
from pliant.training.model import build_model
from pliant.training.progress import Progress

STEPS = 5
LR = 1e-2
CLIP = 0.2


def zero(stage: int, **changes: Any) -> dict[str, Any]:
    """A `deepspeed` section; at stage 3 really partitioned, small as the tensors are."""
    whole = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {"zero_stage": stage, **whole, **changes}


CURVES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"deepspeed": zero(stage)} for stage in range(4)},
    **{
        f"bf16 stage {stage}": {"deepspeed": zero(stage), "training": {"precision": "bf16"}}
        for stage in range(4)
    },
    "stage 1, small buckets, round robin": {
        "deepspeed": zero(
            1, reduce_bucket_size=700, allgather_bucket_size=900, round_robin_gradients=True
        )
    },
    "stage 2, small buckets, checkpointed": {
        "deepspeed": zero(2, reduce_bucket_size=700, allgather_bucket_size=900),
        "training": {"activation_checkpointing": True},
    },
    "stage 3, whole parameters": {"deepspeed": {"zero_stage": 3}},
    "stage 3, small sub-groups, checkpointed": {
        "deepspeed": zero(3, sub_group_size=3000, reduce_bucket_size=5000),
        "training": {"activation_checkpointing": True},
    },
    "stage 3, offloaded": {
        "deepspeed": zero(3, offload_optimizer="cpu", offload_param="cpu"),
    },
}


def engine() -> dict[str, Any]:
    """Everything that `test_engine` asks about; on every rank."""
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {
        "curves": {name: _curve(changes) for name, changes in CURVES.items()},
        "first_step": {
            **{stage: _first_step(zero(stage)) for stage in range(4)},
            "round robin": _first_step(zero(1, round_robin_gradients=True)),
        },
        "votes": _votes(),
        "disagreement": _disagreement(),
        "own_loss": _own_loss(),
        "skips": all_skips() if here().world_size == 2 else None,
        "diverged": {
            (what, stage): _diverges(f"fakes.own_code.{loss}", stage)
            for what, loss in (("loss", "nan_nll"), ("gradient", "nan_gradient_nll"))
            for stage in range(4)
        },
    }
    if here().world_size == 1:
        results["plain"] = _plain_step()
    return results


def _curve(changes: dict[str, Any]) -> list[float]:
    with engine_of(tiny_spec(changes)) as made:
        return train_steps(made, Progress(), STEPS)[1]


def _first_step_spec(deepspeed: dict[str, Any]) -> JobSpec:
    """Without dropout, so that it can be repeated sample by sample; a large eps keeps AdamW from
    blowing up the rounding of gradients that are nearly zero."""
    config = {**TINY_LLAMA, "attention_dropout": 0.0}
    training = {"lr": LR, "warmup_steps": 2, "clip_norm": CLIP, "eps": 1e-3, "weight_decay": 0.1}
    return tiny_spec({"model": {"config": config}, "training": training, "deepspeed": deepspeed})


def _first_step(deepspeed: dict[str, Any]) -> dict[str, Any]:
    with engine_of(_first_step_spec(deepspeed)) as made:
        batches = [share(global_batch(step), here()) for step in (7, 8, 9)]
        evaluation = made.evaluate(batches)
        again = made.evaluate(batches)
        nothing = made.evaluate([])
        result = made.step(share(global_batch(0), here()), 0, vote=False)
        groups = adapter.parameter_groups(made.deepspeed)
        return {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "group_lrs": [group["lr"] for group in groups],
            "group_decays": [group["weight_decay"] for group in groups],
            "state": whole_state(made),
            "evaluation": evaluation,
            "evaluation_again": again,
            "evaluation_of_nothing": nothing,
            "empty": _empty_step(made),
        }


def _empty_step(made: ZeroEngine) -> dict[str, Any]:
    empty = made.step(share(global_batch(1, without_targets=True), here()), 1, vote=False)
    weights = whole_state(made).values()
    following = made.step(share(global_batch(2), here()), 2, vote=False)
    return {
        "loss": empty.loss,
        "grad_norm": empty.grad_norm,
        "weights_are_finite": all(bool(tensor.isfinite().all()) for tensor in weights),
        "next_loss": following.loss,
    }


def _votes() -> list[int]:
    """Nobody, the last rank, everybody; then rank 0 alone, with a vote of 2."""
    place = here()
    batch = share(global_batch(0), place)
    votes = [False, place.rank == place.world_size - 1, True, 2 if place.rank == 0 else 0]
    with engine_of(tiny_spec()) as made:
        return [made.step(batch, step, vote=vote).votes for step, vote in enumerate(votes)]


def _disagreement() -> RanksDisagree | None:
    """All ranks hold the same, then the last one holds something else."""
    place = here()
    agree("first words", 7)
    try:
        agree("last words", 8 if place.rank == place.world_size - 1 else 7)
    except RanksDisagree as error:
        return error
    return None


def _own_loss() -> float:
    changes = {"training": {"loss": "fakes.own_code.doubled_nll"}}
    with engine_of(tiny_spec(changes)) as made:
        return train_steps(made, Progress(), 1)[1][0]


def _diverges(loss: str, stage: int) -> TrainingDiverged | None:
    changes = {"training": {"loss": loss}, "deepspeed": zero(stage)}
    with engine_of(tiny_spec(changes)) as made:
        try:
            made.step(share(global_batch(0), here()), 0, vote=False)
        except TrainingDiverged as error:
            return error
    return None


def _plain_step() -> dict[str, Any]:
    """The first step in plain torch: a stock model, every sample by itself, one big batch."""
    spec = _first_step_spec(zero(0))
    model = _stock_model(spec)
    with torch.no_grad():
        model.eval()
        micros = [micro for step in (7, 8, 9) for micro in global_batch(step)]
        evaluation = _nll(model, micros) / num_targets(micros)
        model.train()
    settings = spec.training
    optimizer = torch.optim.AdamW(
        parameter_groups(model, settings.weight_decay),
        lr=LR / 2,
        betas=settings.betas,
        eps=settings.eps,
    )
    micros = global_batch(0)
    loss = _nll(model, micros) / num_targets(micros)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    state = {
        f"{kind}/{name}": tensor.detach().reshape(-1)
        for name, parameter in model.named_parameters()
        for kind, tensor in {"fp32": parameter, **optimizer.state[parameter]}.items()
        if kind != "step"
    }
    return {
        "loss": loss.item(),
        "grad_norm": norm.item(),
        "evaluation": evaluation.item(),
        "state": state,
    }


def _stock_model(spec: JobSpec) -> torch.nn.Module:
    """The model of a spec, with the attention that comes with transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with attention.registered():
        weights = build_model(spec, V).state_dict()
    fields = dict(spec.model.config or {})
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.load_state_dict(weights)
    return model


def _nll(model: Callable[..., Any], micros: list[MicroBatch]) -> torch.Tensor:
    """Summed over the samples, each run by itself."""
    total = torch.zeros(())
    for micro in micros:
        lengths = list(micro.packed.segments[0])
        tokens = torch.split(micro.tokens_BT, lengths, dim=1)
        labels = torch.split(micro.labels_BT, lengths, dim=1)
        for sample, wanted in zip(tokens, labels, strict=True):
            logits = model(input_ids=sample).logits
            total = total + F.cross_entropy(
                logits[0, :-1], wanted[0, 1:], ignore_index=-100, reduction="sum"
            )
    return total
