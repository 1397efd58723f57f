"""Builds the model that a spec names, and makes sure that it keeps packed samples apart."""

import copy
import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from pliant.accel import attention
from pliant.accel.attention import PACKED
from pliant.batch import PackedMetadata
from pliant.errors import ModelError
from pliant.spec import JobSpec
from pliant.spec.dotted import load_dotted
from pliant.spec.model import LoraSpec, ModelSpec

_UNUSABLE = (ValueError, TypeError, KeyError, RuntimeError, ArithmeticError)
"""What transformers raises, depending on the field, for a model that it cannot build."""


class ModelFactory(Protocol):
    """Your own model: named by `model.factory`, called on every rank with the same seed set.

    The module is called as `model(input_ids=, position_ids=, packed=, use_cache=False)` and returns
    logits [B, T, vocab], or an object that has them as `.logits`. `packed` holds the segments of
    each row; tokens of one segment must not depend on those of another, which is checked.
    """

    def __call__(self, spec: ModelSpec, vocab_size: int) -> torch.nn.Module: ...


def build_model(spec: JobSpec, vocab_size: int) -> torch.nn.Module:
    """The module in fp32 on the CPU; weights that start random follow from `training.seed`.

    Raises `ModelError` where the model cannot be built or lets packed samples see each other.
    """
    torch.manual_seed(spec.training.seed)
    model = _build(spec.model, vocab_size)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.contiguous()  # state is saved in the order in which it lies
    if spec.training.activation_checkpointing:
        _recompute_activations(model, has_adapters=spec.model.lora is not None)
    if spec.model.lora is not None:
        model = _with_adapters(model, spec.model.lora, spec.training.seed)
    _check_positions(model, spec.data.seq_len)
    check_segments_apart(model, vocab_size)
    return model


def _check_positions(model: torch.nn.Module, seq_len: int) -> None:
    """A learned table of positions must reach to the end of a row, padding included."""
    for name, module in model.named_modules():
        is_table = isinstance(module, torch.nn.Embedding) and (
            "position" in name or name.endswith("wpe")
        )
        if is_table and module.num_embeddings < seq_len:
            raise ModelError(
                f"data.seq_len is {seq_len}, and the model has {module.num_embeddings} learned "
                f"positions ({name}). Set seq_len to {module.num_embeddings} or less.",
                module=name,
            )


def forward(
    model: Any, tokens_BT: torch.Tensor, positions_BT: torch.Tensor, packed: PackedMetadata
) -> torch.Tensor:
    """Logits [B, T, vocab]."""
    output = model(input_ids=tokens_BT, position_ids=positions_BT, packed=packed, use_cache=False)
    return output if isinstance(output, torch.Tensor) else output.logits


def count_parameters(model: torch.nn.Module) -> int:
    """Trainable ones; tied weights count once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def count_beforehand(spec: JobSpec, vocab_size: int) -> int:
    """Trainable parameters, counted without their memory. Raises `ModelError`."""
    return count_parameters(skeleton(spec, vocab_size))


def skeleton(spec: JobSpec, vocab_size: int) -> torch.nn.Module:
    """The model with names and shapes, but without the memory of its weights. Raises
    `ModelError`."""
    with attention.registered(), torch.device("meta"):
        if spec.model.path is not None:
            model = _skeleton(Path(spec.model.path))
        else:
            model = _build(spec.model, vocab_size)
        if spec.model.lora is not None:
            model = _with_adapters(model, spec.model.lora, spec.training.seed)
    return model


@torch.no_grad()
def check_segments_apart(model: torch.nn.Module, vocab_size: int) -> None:
    """Runs two samples packed and one by one; the logits must agree.

    It is the one check that no architecture can slip past: state that leaks over a boundary changes
    the second sample's logits.
    """
    first, second = 7, 9
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (1, first + second), generator=generator)
    was_training = model.training
    model.eval()
    together = _logits(model, tokens, (first, second))
    alone = [
        _logits(model, part, (part.shape[1],))
        for part in torch.split(tokens, [first, second], dim=1)
    ]
    model.train(was_training)
    difference = (together - torch.cat(alone, dim=1)).abs().max().item()
    scale = max(together.abs().max().item(), 1e-3)
    if not difference <= 1e-3 * scale:
        raise ModelError(
            f"{type(model).__name__} mixes samples that are packed into one row: logits differ by "
            f"{difference:.2g} from the same samples one by one. Use an architecture whose layers "
            "keep segments apart.",
            difference=difference,
        )


def _logits(
    model: torch.nn.Module, tokens_BT: torch.Tensor, lengths: tuple[int, ...]
) -> torch.Tensor:
    packed = PackedMetadata(segments=(lengths,))
    return forward(model, tokens_BT, packed.positions_BT(), packed)


def _build(spec: ModelSpec, vocab_size: int) -> torch.nn.Module:
    if spec.factory is not None:
        model = load_dotted(spec.factory, "model.factory")(spec, vocab_size)
        if not isinstance(model, torch.nn.Module):
            raise ModelError(
                f"model.factory {spec.factory} returned {type(model).__name__}, and a "
                "torch.nn.Module is needed."
            )
        return model
    if spec.config is not None:
        return _from_config(spec.config)
    assert spec.path is not None
    return _from_path(Path(spec.path), vocab_size)


def _recompute_activations(model: Any, has_adapters: bool) -> None:
    try:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    except (AttributeError, ValueError) as error:
        raise ModelError(
            f"training.activation_checkpointing is true, and {type(model).__name__} does not "
            f"recompute activations: {error}. Set it to false."
        ) from None
    if has_adapters:
        model.enable_input_require_grads()


def _from_config(fields: dict[str, Any]) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    # Building a model writes into its config, so that it gets one of its own.
    fields = copy.deepcopy(fields) | {"use_cache": False}
    model_type = fields.pop("model_type")
    if model_type not in CONFIG_MAPPING_NAMES:
        close = difflib.get_close_matches(str(model_type), CONFIG_MAPPING_NAMES, n=3)
        hint = f"Did you mean {' or '.join(close)}?" if close else "One that is: llama."
        raise ModelError(f"model.config.model_type {model_type} is not known. {hint}")
    try:
        config = AutoConfig.for_model(model_type, **fields)
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=PACKED, dtype=torch.float32
        )
    except (*_UNUSABLE, StrictDataclassError) as error:
        raise ModelError(
            f"model.config does not describe a causal language model: {error}"
        ) from None


def _skeleton(path: Path) -> torch.nn.Module:
    """The architecture at `path`, without its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with _loading(path) as place:
        config = AutoConfig.from_pretrained(**place, local_files_only=True)
        return AutoModelForCausalLM.from_config(config)


def _from_path(path: Path, vocab_size: int) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with _loading(path) as place:
        model, report = AutoModelForCausalLM.from_pretrained(
            **place,
            attn_implementation=PACKED,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{path} lacks {len(missing)} of the model's weights, {missing[0]} for one. They would "
            "start at random. Use a complete model.",
            path=str(path),
        )
    rows = model.get_input_embeddings().num_embeddings
    if rows < vocab_size:
        raise ModelError(
            f"The tokenizer has {vocab_size} tokens, but the model at {path} has embeddings for "
            f"{rows}. Use the tokenizer that belongs to the model.",
            path=str(path),
        )
    model.config.use_cache = False
    return model


@contextmanager
def _loading(path: Path) -> Iterator[dict[str, Any]]:
    """How transformers names what lies at `path`; its errors become `ModelError`s."""
    if not path.exists():
        raise ModelError(
            f"model.path is {path}, and nothing is there. Name a Hugging Face directory or a .gguf "
            "file.",
            path=str(path),
        )
    is_gguf = path.suffix == ".gguf"
    folder = path.parent if is_gguf else path
    try:
        yield {
            "pretrained_model_name_or_path": folder,
            "gguf_file": path.name if is_gguf else None,
        }
    except (*_UNUSABLE, OSError, SafetensorError, StrictDataclassError) as error:
        raise ModelError(f"{path} cannot be loaded as a causal language model: {error}") from None


def _with_adapters(model: Any, spec: LoraSpec, seed: int) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed + 1)
    config = LoraConfig(
        r=spec.r,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=spec.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise ModelError(f"model.lora does not fit this model: {error}") from None
