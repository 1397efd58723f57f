"""Fills in what a spec leaves to "auto": before anything starts, from what is known by then."""

from dataclasses import dataclass
from typing import Any

from pliant.errors import SpecError
from pliant.spec.data import DataSpec, Overlong
from pliant.spec.job import JobSpec

BLOCK_BYTES = 4 * 2**20
BYTES_PER_TOKEN = 5
"""Of a packed row in a block: an int32 token and a mask byte."""
MAX_BUCKET = 500_000_000
MIN_BUCKET = 1_000_000
PREFETCH_SHARE = 10
"""One part in so many of the parameters is fetched ahead at stage 3."""
WHILE_TRAINING = ("checkpoint.every", "checkpoint.hot_every")
"""Decided again and again from what is measured."""


@dataclass(frozen=True)
class Facts:
    """What "auto" is decided from; None is not known yet."""

    num_gpus: int | None = None
    """GPUs of the cluster."""
    num_parameters: int | None = None
    """Trainable parameters of the model."""
    vocab_size: int | None = None
    num_training_steps: int | None = None
    data_shape: str | None = None
    data_format: str | None = None
    """Of all files, where they have one in common."""


def resolve(spec: JobSpec, facts: Facts) -> JobSpec:
    """`spec` with every "auto" replaced that `facts` decide; the others stay."""
    changes: dict[str, dict[str, Any]] = {"data": {}, "deepspeed": {}, "resources": {}}
    changes["training"] = {"accelerator": spec.training.accelerator.model_copy(update=_off(spec))}
    if spec.data.block_steps == "auto":
        changes["data"]["block_steps"] = _block_steps(spec)
    for key, found in (("shape", facts.data_shape), ("format", facts.data_format)):
        if found is not None:
            changes["data"][key] = found
    changes["data"]["overlong"] = overlong_of(spec.data, facts.data_shape or spec.data.shape)
    if spec.data.eval_packing == "auto":
        changes["data"]["eval_packing"] = spec.data.packing
    if facts.num_gpus is not None and spec.resources.device == "auto":
        changes["resources"]["device"] = "cuda" if facts.num_gpus else "cpu"
    device = changes["resources"].get("device", spec.resources.device)
    if spec.elastic.spares == "auto" and device != "auto":
        changes["elastic"] = {"spares": 1 if device == "cpu" else 0}
    if facts.num_parameters is not None:
        changes["deepspeed"] = _buckets(spec, facts.num_parameters)
    if spec.deepspeed.communication_data_type == "auto":
        changes["deepspeed"]["communication_data_type"] = spec.training.precision
    if spec.deepspeed.overlap_comm == "auto":
        changes["deepspeed"]["overlap_comm"] = False
    if facts.num_training_steps is not None:
        changes["training"] |= {"steps": facts.num_training_steps, "epochs": None}
    sections = {
        name: getattr(spec, name).model_copy(update=update) for name, update in changes.items()
    }
    if facts.vocab_size is not None and spec.model.config is not None:
        config = {**spec.model.config, "vocab_size": _vocab_size(spec, facts.vocab_size)}
        sections["model"] = spec.model.model_copy(update={"config": config})
    return spec.model_copy(update=sections)


def unresolved(spec: JobSpec) -> list[str]:
    """The dotted keys that still say "auto", but for what only training can tell."""
    found = flatten(spec.model_dump()).items()
    return [key for key, value in found if value == "auto" and key not in WHILE_TRAINING]


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def overlong_of(data: DataSpec, shape: str) -> Overlong:
    """What happens to overlong samples, once their shape is known. Records of token ids decide it
    one by one: it stays "auto"."""
    if data.overlong != "auto" or shape in ("auto", "input_ids"):
        return data.overlong
    return "split" if shape == "text" else "truncate"


def _block_steps(spec: JobSpec) -> int:
    step_bytes = spec.training.global_batch_size * spec.data.seq_len * BYTES_PER_TOKEN
    return max(1, BLOCK_BYTES // step_bytes)


def _buckets(spec: JobSpec, num_parameters: int) -> dict[str, Any]:
    """DeepSpeed fails on a bucket of 0 and on one far larger than the model; a bucket of the
    model's size, within bounds, is one reduction for a small model."""
    whole = min(max(num_parameters, MIN_BUCKET), MAX_BUCKET)
    choices = {
        "reduce_bucket_size": whole,
        "allgather_bucket_size": whole,
        "stage3_prefetch_bucket_size": max(whole // PREFETCH_SHARE, 1),
        "stage3_param_persistence_threshold": 100_000,
    }
    return {key: value for key, value in choices.items() if getattr(spec.deepspeed, key) == "auto"}


def _off(spec: JobSpec) -> dict[str, bool]:
    """The accelerator's optimisations are not part of this version: "auto" means off."""
    settings = spec.training.accelerator
    switches = [name for name in type(settings).model_fields if name.startswith("enable_")]
    asked = [name for name in switches if getattr(settings, name) is True]
    if asked:
        raise SpecError(
            f"training.accelerator.{asked[0]} is true, and this version of pliant does not have "
            "that optimisation. Use false or auto.",
            keys=asked,
        )
    return dict.fromkeys(switches, False)


def _vocab_size(spec: JobSpec, tokenizer_size: int) -> int:
    asked = (spec.model.config or {}).get("vocab_size", "auto")
    if asked in ("auto", None):
        return tokenizer_size
    if not str(asked).isdecimal():
        raise SpecError(
            f"model.config.vocab_size is {asked!r}, which is no number of tokens. Use "
            f"{tokenizer_size} or more, or auto.",
            vocab_size=asked,
        )
    if int(asked) < tokenizer_size:
        raise SpecError(
            f"model.config.vocab_size is {asked}, but the tokenizer has {tokenizer_size} tokens. "
            f"Use {tokenizer_size} or more, or auto.",
            vocab_size=asked,
        )
    return int(asked)
