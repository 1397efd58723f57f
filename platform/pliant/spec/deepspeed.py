"""How training state is partitioned: `deepspeed:` of a job spec."""

from typing import Any, Literal

from pydantic import Field, model_validator

from pliant.spec.base import Auto, Int, IntOrAuto, Section, ZeroStage


class DeepSpeedSpec(Section):
    """ZeRO stage, buckets and overlap. "auto" is decided from the model's size before DeepSpeed
    sees it."""

    zero_stage: ZeroStage = 1
    """0 replicates, 1 partitions optimizer state, 2 also gradients, 3 also parameters."""
    reduce_bucket_size: IntOrAuto = "auto"
    """Elements per reduction of gradients."""
    allgather_bucket_size: IntOrAuto = "auto"
    """Elements per gathering of updated parameters."""
    overlap_comm: bool | Auto = "auto"
    """Reduce gradients while the backward pass runs (stages 2 and 3); "auto" is false."""
    contiguous_gradients: bool = True
    """Copy gradients into one buffer as they come, against fragmented memory."""
    round_robin_gradients: bool = False
    """Spread the copying of gradients over the ranks (stages 1 and 2, with offload)."""
    stage3_prefetch_bucket_size: IntOrAuto = "auto"
    """Elements of parameters fetched ahead (stage 3)."""
    stage3_max_live_parameters: Int = Field(1_000_000_000, ge=0)
    """Elements of parameters that may be gathered at once (stage 3)."""
    stage3_max_reuse_distance: Int = Field(1_000_000_000, ge=0)
    """A parameter needed again within so many elements is kept (stage 3)."""
    stage3_param_persistence_threshold: IntOrAuto = "auto"
    """Parameters with fewer elements stay whole on every rank (stage 3)."""
    sub_group_size: Int = Field(1_000_000_000, gt=0)
    """Elements that the optimizer updates at a time (stage 3)."""
    offload_optimizer: Literal["none", "cpu"] = "none"
    """Where optimizer state lies; "cpu" frees the device for it (stages 1 to 3)."""
    offload_param: Literal["none", "cpu"] = "none"
    """Where parameters lie while they are not needed (stage 3)."""
    communication_data_type: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of gradients on the wire; "auto" is the precision of training."""
    extra: dict[str, Any] = {}
    """Further keys of DeepSpeed's config, from a whitelist."""

    @model_validator(mode="after")
    def _fits_the_stage(self) -> "DeepSpeedSpec":
        stage = self.zero_stage
        if self.overlap_comm is True and stage < 2:
            raise ValueError(
                f"overlap_comm needs zero_stage 2 or 3, and it is {stage}: below 2, gradients are "
                "reduced once, when the step is complete. Leave it out"
            )
        if self.offload_optimizer == "cpu" and stage == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3, and it is 0")
        if self.offload_param == "cpu" and stage != 3:
            raise ValueError(f"offload_param needs zero_stage 3, and it is {stage}")
        return self

    @model_validator(mode="after")
    def _buckets_hold_something(self) -> "DeepSpeedSpec":
        for name in ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"):
            size = getattr(self, name)
            if size != "auto" and size < 1:
                raise ValueError(f"{name} is {size}, and a bucket holds at least one element")
        return self
