"""Small jobs for tests."""

from typing import Any

from pliant.spec import JobSpec
from pliant.spec.load import build_spec, merge
from pliant.spec.resolve import Facts, resolve

TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
    "vocab_size": 64,
}


def tiny_spec(changes: dict[str, Any] | None = None) -> JobSpec:
    """A resolved spec of a tiny llama on the CPU, with `changes` laid over it."""
    tree: dict[str, Any] = {
        "name": "tiny",
        "model": {"config": TINY_LLAMA},
        "data": {"train": "none", "tokenizer": {"path": "none"}, "seq_len": 16},
        "training": {"global_batch_size": 5, "steps": 10, "lr": 1e-2, "schedule": "constant"},
    }
    spec = build_spec(merge(tree, changes or {}), origin="test")
    return resolve(spec, Facts(num_gpus=0, num_parameters=10_000, vocab_size=64))
