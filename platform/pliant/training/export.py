"""Writes a checkpoint's weights as Hugging Face reads them: safetensors, a config, a tokenizer.

Tensors are read, converted and written one after another; the optimizer's moments are not touched.
Neither Ray nor DeepSpeed is needed. Where only part of a model was trained, the rest is built as it
was for training, and its digest says whether it is the same.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pliant.accel import attention
from pliant.checkpoints import safetensors_format
from pliant.checkpoints.reader import Checkpoint, check_tensors, whole_tensors
from pliant.data.tokenizer import CONFIG_FILE, MODEL_FILE
from pliant.errors import CheckpointMismatch, ModelError, UserError
from pliant.files import write_atomically
from pliant.spec import JobSpec
from pliant.training.digests import digest
from pliant.training.model import build_model, skeleton

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_TOKENIZER_FILES = (
    MODEL_FILE,
    CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_GENERATION_CONFIG = "generation_config.json"

Read = Callable[[str], torch.Tensor]
"""From a tensor's name to its values, of any shape."""


@dataclass(frozen=True)
class Tensor:
    """What the header of a file says of one."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Run:
    """What is needed of a run beside its checkpoint."""

    spec: JobSpec
    """Resolved."""
    vocab_size: int
    tokenizer: Path | None
    """A directory with the files of its tokenizer; None where it is gone."""
    eos_id: int | None = None
    """As the data was prepared with, and so is `pad_id`."""
    pad_id: int | None = None


def export_model(
    run: Run, checkpoint: Checkpoint, directory: Path, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    """The whole model, adapters merged, for `AutoModelForCausalLM.from_pretrained(directory)`.
    Raises `ModelError` for a model that is not one of Hugging Face's."""
    with _unfinished(directory) as folder, _model_and_weights(run, checkpoint) as (model, read):
        tensors = _tensors(model, dtype)
        _write_shards(folder, tensors, read, max_shard_bytes)
        _write_configs(folder, run, model, dtype)
        _copy_tokenizer(folder, run.tokenizer)


def export_adapter(run: Run, checkpoint: Checkpoint, directory: Path, dtype: torch.dtype) -> None:
    """The adapters alone, for `PeftModel.from_pretrained(base, directory)`. Raises `UserError`
    where the job trained none."""
    if run.spec.model.lora is None:
        raise UserError(f"{run.spec.name} trained no adapters. Leave out --adapter.")
    model: Any = skeleton(run.spec, run.vocab_size)
    shapes = {_adapter_name(n): (n, p.shape) for n, p in model.named_parameters() if "lora_" in n}
    tensors = [Tensor(name, tuple(shape), dtype) for name, (_, shape) in shapes.items()]
    config = model.peft_config["default"]
    config.inference_mode = True
    config.base_model_name_or_path = run.spec.model.path
    with _unfinished(directory) as folder, whole_tensors(checkpoint) as saved:
        path = folder / "adapter_model.safetensors"
        write_safetensors(path, tensors, lambda name: saved(f"fp32/{shapes[name][0]}"))
        config.save_pretrained(str(folder))
        _copy_tokenizer(folder, run.tokenizer)


def plan_shards(tensors: list[Tensor], max_bytes: int) -> list[list[Tensor]]:
    """In order, as many to a shard as fit; a tensor that is larger has one to itself."""
    shards: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.size_bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(tensor)
        room -= tensor.size_bytes
    return shards


def write_safetensors(path: Path, tensors: list[Tensor], read: Read) -> None:
    """A safetensors file, one tensor in memory at a time. What `read` gives is converted."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.size_bytes
        entries[tensor.name] = safetensors_format.entry(tensor.dtype, tensor.shape, begin, end)
    with path.open("wb") as file:
        file.write(safetensors_format.head(entries))
        for tensor in tensors:
            values = read(tensor.name).detach().reshape(-1).to(tensor.dtype).contiguous()
            assert values.nbytes == tensor.size_bytes, tensor.name
            file.write(values.view(torch.uint8).numpy().data)


@contextmanager
def _model_and_weights(run: Run, checkpoint: Checkpoint) -> Iterator[tuple[Any, Read]]:
    """The bare model, with its memory or without, and where its values come from."""
    model = skeleton(run.spec, run.vocab_size)
    _check_is_hugging_face(model)
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    check_tensors(checkpoint, _saved(model, trained))
    with whole_tensors(checkpoint) as saved:
        if len(trained) == len(list(model.parameters())):
            buffers = {name for name, _ in model.named_buffers()}
            yield model, lambda name: saved(f"{'buffer' if name in buffers else 'fp32'}/{name}")
        else:
            whole = _partly_trained(run, checkpoint, saved, set(trained))
            yield whole, whole.state_dict().__getitem__


def _saved(model: torch.nn.Module, trained: Mapping[str, int]) -> dict[str, int]:
    """kind/name -> elements of all that a checkpoint of this model holds."""
    kinds = ("fp32", "exp_avg", "exp_avg_sq")
    tensors = {f"{kind}/{name}": n for name, n in trained.items() for kind in kinds}
    buffers = {f"buffer/{name}": buffer.numel() for name, buffer in _buffers(model)}
    return tensors | buffers


def _partly_trained(run: Run, checkpoint: Checkpoint, saved: Read, trained: set[str]) -> Any:
    """The model in memory, with what was trained loaded and adapters merged into the rest."""
    with attention.registered():
        model: Any = build_model(run.spec, run.vocab_size)
        frozen = digest(p for p in model.parameters() if not p.requires_grad)
        if checkpoint.manifest.frozen_digest != f"{frozen:016x}":
            raise CheckpointMismatch(
                f"The frozen weights are not those that {checkpoint.directory} was trained on. "
                "Restore them, or export the adapters alone with --adapter.",
                key="model",
            )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in trained:
                    parameter.view(-1).copy_(saved(f"fp32/{name}"))
            for name, buffer in _buffers(model):
                buffer.view(-1).copy_(saved(f"buffer/{name}"))
        return model if run.spec.model.lora is None else model.merge_and_unload()


def _tensors(model: torch.nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """Parameters in the type wanted, tied ones once, and persistent buffers as they are. The names
    are those of the modules, which transformers reads whatever it renames in older files."""
    parameters = [Tensor(name, tuple(p.shape), dtype) for name, p in model.named_parameters()]
    return parameters + [Tensor(name, tuple(b.shape), b.dtype) for name, b in _buffers(model)]


def _buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    persistent = model.state_dict(keep_vars=True)
    return [(name, buffer) for name, buffer in model.named_buffers() if name in persistent]


def _write_shards(folder: Path, tensors: list[Tensor], read: Read, max_bytes: int) -> None:
    shards = plan_shards(tensors, max_bytes)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        is_only = len(shards) == 1
        part = "" if is_only else f"-{number:05d}-of-{len(shards):05d}"
        write_safetensors(folder / f"model{part}.safetensors", shard, read)
        places |= {tensor.name: f"model{part}.safetensors" for tensor in shard}
    if len(shards) > 1:
        total = sum(tensor.size_bytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_atomically(
            folder / "model.safetensors.index.json", json.dumps(index, indent=2).encode()
        )


def _write_configs(folder: Path, run: Run, model: Any, dtype: torch.dtype) -> None:
    from transformers import GenerationConfig

    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    config.use_cache = True  # training did without
    config.save_pretrained(folder)
    given = Path(run.spec.model.path) / _GENERATION_CONFIG if run.spec.model.path else None
    if given is not None and given.is_file():
        shutil.copyfile(given, folder / _GENERATION_CONFIG)
        return
    generation = GenerationConfig.from_model_config(config)
    if run.spec.model.path is None and run.eos_id is not None:
        # The architecture's defaults are of another tokenizer.
        generation.eos_token_id, generation.pad_token_id = run.eos_id, run.pad_id
        generation.bos_token_id = None
    generation.save_pretrained(folder)


def _copy_tokenizer(folder: Path, tokenizer: Path | None) -> None:
    for name in _TOKENIZER_FILES:
        if tokenizer is not None and (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)


def _adapter_name(name: str) -> str:
    """PEFT's files leave out the adapter's own name."""
    return re.sub(r"(\.lora_\w+)\.default\b", r"\1", name)


def _check_is_hugging_face(model: Any) -> None:
    from transformers import PreTrainedModel

    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(bare, PreTrainedModel):
        raise ModelError(
            f"The model is a {type(bare).__name__} of your own, and Hugging Face's format is for "
            "models of transformers. Load its checkpoint with pliant.checkpoints.reader instead."
        )


@contextmanager
def _unfinished(directory: Path) -> Iterator[Path]:
    """A folder to fill that becomes `directory` once it is complete."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists already. Name another directory with --to.")
    folder = directory.with_name(f".{directory.name}.unfinished")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
        if directory.exists():
            directory.rmdir()
        folder.rename(directory)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
