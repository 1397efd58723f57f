"""What can be known of a job before anything is started."""

from pathlib import Path

import torch

from pliant.data.sources import find_files
from pliant.data.tokenizer import load_tokenizer
from pliant.spec import JobSpec
from pliant.spec.resolve import Facts, resolve
from pliant.training.deepspeed_config import check_extra
from pliant.training.model import count_beforehand
from pliant.training.planning import check_plugins


def resolve_beforehand(spec: JobSpec) -> JobSpec:
    """Checks a spec as far as this machine can, and resolves what does not depend on the data.

    Raises `UserError`s: for own code that cannot be imported, data that is not there, a model that
    cannot be built.
    """
    check_plugins(spec)
    check_extra(spec.deepspeed.extra)
    _check_data(spec)
    spec = resolve(spec, Facts(num_gpus=torch.cuda.device_count()))
    vocab_size = _vocab_size(spec)
    if vocab_size is None:
        return spec
    spec = resolve(spec, Facts(vocab_size=vocab_size))
    return resolve(spec, Facts(num_parameters=count_beforehand(spec, vocab_size)))


def _check_data(spec: JobSpec) -> None:
    for key in ("train", "validation", "test"):
        source = getattr(spec.data, key)
        if source is not None and source != "stdlib://":
            find_files(source, f"data.{key}", spec.data.format, Path())


def _vocab_size(spec: JobSpec) -> int | None:
    """None where the tokenizer is trained on data that nobody has read yet."""
    if spec.data.tokenizer.path is None:
        return None
    return load_tokenizer(Path(spec.data.tokenizer.path).expanduser()).vocab_size
