"""How the model is trained: `training:` of a job spec."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pliant.spec.base import Float, Int, Section

Switch = bool | Literal["auto"]
Decay = Annotated[Float, Field(ge=0, lt=1)]


class AcceleratorSpec(Section):
    """Optimisations of the training step. This version has none of them yet: "auto" is off, and
    true is refused."""

    enable_metadata_cache: Switch = "auto"
    """Build the metadata of a packed batch once, not once per layer."""
    cache_scope: Literal["per_device", "per_process"] = "per_device"
    """Where the cache is kept."""
    enable_double_buffer: Switch = "auto"
    """Offload checkpointed activations and bring them back ahead of need."""
    buffer_size_mb: Int = Field(256, gt=0)
    """Device memory for activations on their way back."""
    enable_grouped_index: Switch = "auto"
    """Route tokens to experts with one grouped count."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Of the accelerator's own log."""


class TrainingSpec(Section):
    """Optimisation, batches, precision, evaluation and checks."""

    global_batch_size: Int = Field(gt=0)
    """Packed rows per optimizer step over all ranks; constant through every resize."""
    micro_batch_size: Int = Field(1, gt=0)
    """Packed rows per forward pass; constant through every resize."""
    steps: Int | None = Field(None, gt=0)
    """Optimizer steps; give this or `epochs`."""
    epochs: Int | None = Field(None, gt=0)
    """Passes over the training data; give this or `steps`."""
    lr: Float = Field(3e-4, gt=0)
    """The highest learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate falls after the warm-up, by step."""
    warmup_steps: Int = Field(0, ge=0)
    """Steps of linear growth from 0 to lr."""
    min_lr_ratio: Float = Field(0.1, ge=0, le=1)
    """Where linear and cosine end, as a share of lr."""
    weight_decay: Float = Field(0.01, ge=0)
    """Applied to matrices only; biases and norms have none."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    eps: Float = Field(1e-8, gt=0)
    """Added to the root of AdamW's second moment."""
    clip_norm: Float = Field(1.0, ge=0)
    """Largest norm of the gradient; 0 turns clipping off."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the forward and backward pass; master weights are always fp32."""
    exact: bool = False
    """Add gradients up as whole numbers: the final weights are then the same to the bit, whatever
    the number of workers, a resize or a crash in between. Slower; ZeRO 0 to 2, fp32 or bf16."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    seed: Int = Field(0, ge=0, lt=2**63)
    """Of the initial weights, the order of the data and dropout."""
    eval_every: Int | None = Field(None, gt=0)
    """Steps between evaluations; one at the end is made whenever there is a validation set."""
    digest_every: Int = Field(100, ge=0)
    """Steps between comparisons of the parameters across ranks; 0 compares at the start only."""
    on_divergence: Literal["stop", "skip", "rewind"] = "stop"
    """After a loss or gradient that is not finite, or a spike: end the job; leave the step's update
    out; or go back to the last checkpoint and leave it out on the way."""
    spike_factor: Float = Field(0.0, ge=0)
    """A loss this many typical deviations above the median of the last ones is a spike; 0 looks for
    none. 10 is careful."""
    spike_window: Int = Field(32, ge=4)
    """How many of the last losses a spike is measured by; before there are as many, none is seen.
    """
    max_skips: Int = Field(10, ge=0)
    """Updates in a row that may be left out; one more ends the job."""
    loss: str | None = None
    """Dotted path of a function `(logits_BTV, labels_BT) -> nll_sum`; labels are unshifted."""
    callbacks: list[str] = []
    """Dotted paths of `Callback` classes, made without arguments on every rank."""
    accelerator: AcceleratorSpec = AcceleratorSpec()

    @model_validator(mode="after")
    def _length_and_batches(self) -> "TrainingSpec":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("needs exactly one of steps and epochs")
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of "
                f"micro_batch_size {self.micro_batch_size}. Choose one that is"
            )
        return self

    @model_validator(mode="after")
    def _exact_needs_no_loss_scale(self) -> "TrainingSpec":
        if self.exact and self.precision == "fp16":
            raise ValueError(
                "exact is true and precision is fp16, whose changing loss scale rounds gradients "
                "differently from run to run. Use bf16 or fp32"
            )
        return self
