"""DeepSpeed's configuration, generated from the spec: nothing in it says "auto"."""

from typing import Any

from pliant.errors import SpecError
from pliant.spec import JobSpec

ALLOWED_EXTRA = {
    "comms_logger",
    "flops_profiler",
    "gradient_predivide_factor",
    "memory_breakdown",
    "prescale_gradients",
    "wall_clock_breakdown",
    "zero_optimization",
}
"""Keys of DeepSpeed's config that `deepspeed.extra` may set."""

ALLOWED_ZERO = {
    "ignore_unused_parameters",
    "load_from_fp32_weights",
    "memory_efficient_linear",
    "module_granularity_threshold",
    "reduce_scatter",
    "use_multi_rank_bucket_allreduce",
    "zero_hpz_partition_size",
}
"""Keys of `zero_optimization` that `deepspeed.extra` may set."""


def deepspeed_config(spec: JobSpec) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize`. `spec` must be resolved.

    The batch arithmetic is pliant's own: DeepSpeed sees one micro-batch at a time and steps when it
    is told to. Learning rates are set by pliant too.
    """
    settings = spec.deepspeed
    check_extra(settings.extra)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": spec.training.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": spec.training.clip_norm if _deepspeed_clips(spec) else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": settings.communication_data_type,
        "bf16": {"enabled": spec.training.precision == "bf16"},
        "fp16": {"enabled": spec.training.precision == "fp16"},
        "zero_optimization": _zero(spec),
    }
    extra = dict(settings.extra)
    config["zero_optimization"] |= extra.pop("zero_optimization", {})
    return config | extra


def clips_by_itself(spec: JobSpec) -> bool:
    """At stage 0 in fp32 DeepSpeed does not tell the gradient's norm, so that pliant clips."""
    return spec.deepspeed.zero_stage == 0 and spec.training.precision == "fp32"


def _deepspeed_clips(spec: JobSpec) -> bool:
    return not spec.training.exact and not clips_by_itself(spec)


def check_extra(extra: dict[str, Any]) -> None:
    """Raises `SpecError` for a key that pliant does not let through."""
    unknown = set(extra) - ALLOWED_EXTRA
    zero = extra.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise SpecError(
            f"deepspeed.extra.zero_optimization is {zero!r}, and a mapping is needed. Write its "
            "keys beneath it, or leave it out."
        )
    unknown |= {f"zero_optimization.{key}" for key in set(zero) - ALLOWED_ZERO}
    if unknown:
        allowed = sorted(ALLOWED_EXTRA | {f"zero_optimization.{key}" for key in ALLOWED_ZERO})
        raise SpecError(
            f"deepspeed.extra has {', '.join(sorted(unknown))}, which pliant does not pass on: it "
            f"may contradict what pliant manages. Allowed: {', '.join(allowed)}.",
            keys=sorted(unknown),
        )


def _zero(spec: JobSpec) -> dict[str, Any]:
    settings = spec.deepspeed
    zero: dict[str, Any] = {
        "stage": settings.zero_stage,
        "reduce_bucket_size": settings.reduce_bucket_size,
        "allgather_bucket_size": settings.allgather_bucket_size,
        "overlap_comm": settings.overlap_comm,
        "contiguous_gradients": settings.contiguous_gradients,
        "round_robin_gradients": settings.round_robin_gradients,
    }
    if settings.offload_optimizer == "cpu":
        zero["offload_optimizer"] = {"device": "cpu"}
    if settings.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": settings.stage3_prefetch_bucket_size,
            "stage3_max_live_parameters": settings.stage3_max_live_parameters,
            "stage3_max_reuse_distance": settings.stage3_max_reuse_distance,
            "stage3_param_persistence_threshold": settings.stage3_param_persistence_threshold,
            "sub_group_size": settings.sub_group_size,
        }
        if settings.offload_param == "cpu":
            zero["offload_param"] = {"device": "cpu"}
    return zero
