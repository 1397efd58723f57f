"""Small data sets to prepare, on Ray or in this process."""

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pliant.data import prepare as preparing
from pliant.data.tokenizer import open_tokenizer, save_tokenizer, train_tokenizer
from pliant.spec.load import build_spec


def prepare_here(patch: pytest.MonkeyPatch) -> None:
    """From now on chunks are tokenized in this process, one after the other: Ray is not needed."""

    def rows(unfinished: list[Any], recipe: Any, path: Any) -> Iterator[dict[str, Any]]:
        for task in unfinished:
            yield preparing._run_task({"task": pickle.dumps(task)}, recipe, path)

    patch.setattr(preparing, "_rows", rows)


def spec(train, **data):
    settings = {
        "train": str(train),
        "tokenizer": {"train_vocab_size": 300},
        "seq_len": 64,
        "shard_samples": 20,
    }
    tree = {
        "name": "job",
        "model": {"config": {"model_type": "llama"}},
        "training": {"global_batch_size": 8, "steps": 1},
        "data": settings | data,
    }
    return build_spec(tree, origin="a test")


def some_records(count, first=0):
    return [
        {"prompt": f"What is {i} + {i}?\n", "completion": f"{i} + {i} = {2 * i}"}
        for i in range(first, first + count)
    ]


def contents(store):
    root = store.store.root
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def texts(store, name):
    """The pieces of a split as text."""
    split, tokenizer = store.split(name), open_tokenizer(store.tokenizer_path())
    return [
        tokenizer.decode(split.gather(np.array([i]))[0].tolist()) for i in range(split.num_pieces)
    ]


def stores_in(root):
    return [path for path in root.iterdir() if path.name not in (".locks", "corpora")]


def saved_tokenizer(tmp_path):
    save_tokenizer(train_tokenizer(["What is 1 + 1?"], 270), tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")
