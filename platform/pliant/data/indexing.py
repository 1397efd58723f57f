"""Finished chunks to a store: the index over all shards, and the manifest, written last."""

from pathlib import Path
from typing import Any

import numpy as np

from pliant.data.samples import Task, too_many_bad_rows
from pliant.data.shards import index_path, read_summary, samples_path
from pliant.data.store import (
    SPLITS,
    STORE_VERSION,
    TOKENIZER,
    Manifest,
    fingerprint,
    write_index,
    write_manifest,
)
from pliant.data.tokenizer import Tokenizer
from pliant.data.tokens import Accounting
from pliant.errors import DataError


def commit(
    path: Path,
    key: str,
    made_from: dict[str, Any],
    tasks: list[Task],
    tokenizer: Tokenizer,
    max_bad_rows: int,
    max_untrained: float,
) -> None:
    """Makes a store of the finished chunks at `path`. Raises `DataError` where they leave nothing
    to train on, or where too many records could not be used."""
    summaries = [read_summary(path, task.number) for task in tasks]
    accounting = {split: _total(summaries, split) for split in SPLITS}
    assert all(account.adds_up for account in accounting.values()), "a token was not counted"
    num_bad = sum(account.bad for account in accounting.values())
    if num_bad > max_bad_rows:
        first = next(problem for summary in summaries if summary for problem in summary["bad"])
        raise too_many_bad_rows(DataError(first), num_bad, max_bad_rows)
    if not accounting["train"].pieces:
        raise DataError(
            "data.train leaves nothing to train on: of "
            f"{accounting['train'].samples} samples, none has a target token left. Check "
            "data.train_on, data.overlong, data.split and data.columns.",
            accounting=accounting["train"].as_dict(),
        )
    _check_trained(accounting["train"], max_untrained)
    splits = {
        split: _index_split(path, split, tasks, summaries)
        for split in SPLITS
        if accounting[split].pieces
    }
    manifest: Manifest = {
        "version": STORE_VERSION,
        "key": key,
        "made_from": made_from,
        "splits": splits,
        "accounting": {split: account.as_dict() for split, account in accounting.items()},
        TOKENIZER: [
            {"file": file.name, **fingerprint(file)}
            for file in sorted((path / TOKENIZER).iterdir())
        ],
        "tokenizer_sha256": tokenizer.digest,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "pad_id": tokenizer.pad_id,
    }
    write_manifest(path, manifest)


def _check_trained(account: Accounting, max_untrained: float) -> None:
    if account.samples_untrained > max_untrained * account.samples:
        raise DataError(
            f"{account.samples_untrained:,} of {account.samples:,} training samples have nothing "
            f"to train on, and data.max_untrained allows {max_untrained:.0%}. Check data.train_on, "
            "data.chat_template and data.columns; `pliant data show` shows what is trained.",
            accounting=account.as_dict(),
        )


def _total(summaries: list[dict[str, Any] | None], split: str) -> Accounting:
    total = Accounting()
    for summary in summaries:
        assert summary is not None, "every chunk is finished by now"
        total += Accounting(**summary["accounting"][split])
    return total


def _index_split(
    path: Path, split: str, tasks: list[Task], summaries: list[dict[str, Any] | None]
) -> dict[str, Any]:
    """Put the chunks' parts of a split together; its part of the manifest."""
    shards, parts = [], []
    samples = [np.load(samples_path(path, split, task.number)) for task in tasks]
    for task, summary in zip(tasks, summaries, strict=True):
        if summary and split in summary["shards"]:
            shards.append(summary["shards"][split])
            parts.append(np.load(index_path(path, split, task.number)))
    lengths, targets = np.concatenate(parts, axis=1)
    return write_index(path / split, shards, lengths, targets, np.concatenate(samples))
