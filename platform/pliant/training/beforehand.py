"""What can be known of a job before anything is started."""

from pathlib import Path

import torch

from pliant.data.sources import find_files
from pliant.spec import JobSpec
from pliant.spec.data import paths_of
from pliant.spec.resolve import Facts, resolve
from pliant.training.deepspeed_config import check_extra
from pliant.training.model import count_beforehand
from pliant.training.planning import check_model, check_plugins, guess_vocab_size


def resolve_beforehand(spec: JobSpec) -> JobSpec:
    """Checks a spec as far as this machine can, and resolves what does not depend on the data.

    Raises `UserError`s: for own code that cannot be imported, data that is not there, a model that
    cannot be built.
    """
    check_plugins(spec)
    check_extra(spec.deepspeed.extra)
    formats = _formats(spec)
    one_format = formats.pop() if len(formats) == 1 else None
    spec = resolve(spec, Facts(num_gpus=torch.cuda.device_count(), data_format=one_format))
    check_model(spec)
    if spec.data.tokenizer.path is None:
        return spec  # the tokenizer is still to be trained, and its size follows from the data
    vocab_size = guess_vocab_size(spec)
    spec = resolve(spec, Facts(vocab_size=vocab_size))
    return resolve(spec, Facts(num_parameters=count_beforehand(spec, vocab_size)))


def _formats(spec: JobSpec) -> set[str]:
    """Of all files that the data names; raises `DataError` where one is missing."""
    formats: set[str] = set()
    for key in ("train", "validation", "test"):
        source = getattr(spec.data, key)
        if source == "stdlib://":
            formats.add("jsonl")
        elif source is not None:
            files = find_files(paths_of(source), f"data.{key}", spec.data.format, Path())
            formats |= {file.format for file in files}
    return formats
