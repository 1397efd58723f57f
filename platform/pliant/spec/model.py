"""The model to train: `model:` of a job spec."""

from typing import Any, Literal

from pydantic import Field, model_validator

from pliant.spec.base import Float, Int, Section


class LoraSpec(Section):
    """Low-rank adapters; the base weights stay frozen."""

    r: Int = Field(8, gt=0)
    """Rank of the update."""
    alpha: Float = Field(16, gt=0)
    """Scale of the update: alpha / r."""
    dropout: Float = Field(0.0, ge=0, lt=1)
    """Of the adapters' inputs."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the modules that get an adapter."""


class ModelSpec(Section):
    """Exactly one of `config`, `path` and `factory` says where the model comes from."""

    config: dict[str, Any] | None = None
    """A Hugging Face config with its `model_type`; the weights start random. A `vocab_size` of
    "auto" (or none) becomes the tokenizer's."""
    path: str | None = None
    """A local Hugging Face directory, or a `.gguf` file."""
    factory: str | None = None
    """Dotted path of a function `(spec, vocab_size) -> torch.nn.Module`."""
    factory_args: dict[str, Any] = {}
    """For the factory to read; pliant does not look at them."""
    lora: LoraSpec | None = None

    @model_validator(mode="after")
    def _one_origin(self) -> "ModelSpec":
        given = [k for k in ("config", "path", "factory") if getattr(self, k) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            raise ValueError(
                f"needs exactly one of config, path and factory, and {found} is set. "
                "Use config for random weights, path for a local model, factory for your own code"
            )
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("config has no model_type. Name the architecture, for example llama")
        return self
