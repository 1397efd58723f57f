"""Readies a spare process: everything that is slow the first time is done once, in small."""

import gc
import importlib
import os

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from pliant.accel import attention
from pliant.batch import MicroBatch, StepBatch
from pliant.data.packing import best_fit_decreasing
from pliant.spec import JobSpec
from pliant.topology import Place
from pliant.training import deepspeed_adapter
from pliant.training.engine import build_engine
from pliant.training.model import build_model

SEQ_LEN, VOCAB_SIZE = 8, 8
TINY = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": VOCAB_SIZE,
}
"""A model of its own, so that a spare is ready soon whatever the job trains."""


def prime(spec: JobSpec) -> None:
    """Imports, and on the CPU a process group of one, an engine as the job's and one step; then
    leaves it all. A card is not touched: it may not be this process's yet."""
    importlib.import_module("pliant.training.worker")  # which the train function is unpickled from
    best_fit_decreasing(np.array([1], dtype=np.int32), 1)  # loads compiled code
    if spec.resources.device != "cpu":
        deepspeed_adapter.import_deepspeed(spec.resources.device)
        return
    torch.set_num_threads(spec.resources.threads_per_worker)
    tiny = spec.model_copy(update={"model": spec.model.model_copy(update=_only_config(spec, TINY))})
    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}  # DeepSpeed looks for them
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        _one_step(tiny)
    finally:
        deepspeed_adapter.leave_process_group()
    gc.freeze()


def _one_step(spec: JobSpec) -> None:
    with attention.registered():
        model = build_model(spec, VOCAB_SIZE)
        engine = build_engine(model, spec, Place(0, 1), torch.device("cpu"))
        micro = MicroBatch.dummy(0, 1, SEQ_LEN)
        engine.step(StepBatch((micro,), 1, 1, 1, 1, 0, 1), 0, vote=0)
        engine.deepspeed.destroy()


def _only_config(spec: JobSpec, config: dict[str, object]) -> dict[str, object]:
    """Changes to the job's model section that leave nothing of it but `config`."""
    others = {name: field.default for name, field in type(spec.model).model_fields.items()}
    return {**others, "config": config}
