"""One chunk of records to one shard of each split: the part of preparation that runs in parallel.

Everything here depends on the chunk and the recipe alone, so it does not matter who does it when.
"""

import errno
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pliant.data.samples import Recipe, Sample, Task, read_samples, too_many_bad_rows
from pliant.data.store import (
    SPLITS,
    piece_lengths,
    piece_targets,
    write_array,
    write_json,
    write_shard,
)
from pliant.data.tokenizer import Tokenizer, open_tokenizer
from pliant.data.tokens import Accounting, Piece, build_pieces, encode_documents
from pliant.errors import DataError, NoSpace
from pliant.files import replacing

SAMPLES_PER_CALL = 1024
"""Enough for the tokenizer's threads to share, and little enough to hold."""
CHUNKS_DIR = "chunks"
STOP_FILE = "stop"


def write_shards(task: Task, recipe: Recipe, directory: Path) -> None:
    """Tokenize a chunk and write its shards; its summary, written last, says that it is done.

    Returns early, without a summary, once another task has failed. Raises `UserError`.
    """
    parts = {name: _Part() for name in SPLITS}
    bad: list[Sample] = []
    tokenizer = _tokenizer(directory / "tokenizer")
    samples = read_samples(task, recipe)
    while batch := list(islice(samples, SAMPLES_PER_CALL)):
        if (directory / STOP_FILE).exists():
            return
        for sample, made, account in _tokenize(batch, recipe, tokenizer):
            parts[sample.split].add(made, account)
            bad += [sample] if sample.problem is not None else []
        if len(bad) > recipe.max_bad_rows:
            raise too_many_bad_rows(bad[0].problem, len(bad), recipe.max_bad_rows)
    try:
        _write_quarantine(quarantine_of(directory) / f"{task.number:05d}.jsonl", bad)
        _write(task, parts, bad, directory)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise NoSpace(
            f"The disk of {directory} is full. Free some space, or set data.store."
        ) from None


@dataclass
class _Part:
    """What a chunk gives to one split."""

    pieces: list[Piece] = field(default_factory=list)
    sample_lengths: list[int] = field(default_factory=list)
    """Before anything is cut."""
    account: Accounting = field(default_factory=Accounting)

    def add(self, pieces: list[Piece], account: Accounting) -> None:
        self.pieces += pieces
        self.account += account
        if account.samples:
            self.sample_lengths.append(account.tokens)


def quarantine_of(directory: Path) -> Path:
    """Where the records are kept that a store leaves out, also when it is not finished."""
    return directory.with_name(f"{directory.name}.quarantine")


def _write_quarantine(path: Path, bad: list[Sample]) -> None:
    """A line for each record: its place, what is wrong with it, and the record itself."""
    path.unlink(missing_ok=True)
    if not bad:
        return
    with replacing(path) as file:
        for sample in bad:
            line = {
                "where": sample.where,
                "problem": sample.problem.message if sample.problem else "",
                "raw": sample.row.quarantined().decode("utf-8", "backslashreplace"),
            }
            file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace"))
            file.write(b"\n")


def summary_path(directory: Path, number: int) -> Path:
    return directory / CHUNKS_DIR / f"{number:05d}.json"


def index_path(directory: Path, split: str, number: int) -> Path:
    """int32 [2, pieces]: length and targets of each piece of one shard."""
    return directory / CHUNKS_DIR / f"{number:05d}.{split}.npy"


def samples_path(directory: Path, split: str, number: int) -> Path:
    """int32 [samples]: tokens of each sample of one chunk, before anything was cut."""
    return directory / CHUNKS_DIR / f"{number:05d}.{split}-samples.npy"


def read_summary(directory: Path, number: int) -> dict[str, Any] | None:
    """What a finished chunk became; None where it is not finished or lost a file since."""
    path = summary_path(directory, number)
    if not path.exists():
        return None
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for split, shard in summary["shards"].items():
        file = directory / split / shard["file"]
        whole = file.exists() and file.stat().st_size == shard["size_bytes"]
        if not whole or not index_path(directory, split, number).exists():
            return None
    if not all(samples_path(directory, split, number).exists() for split in SPLITS):
        return None
    return summary


def _tokenize(
    batch: list[Sample], recipe: Recipe, tokenizer: Tokenizer
) -> Iterator[tuple[Sample, list[Piece], Accounting]]:
    """All turns of the batch go to the tokenizer in one call, which uses all its threads."""
    documents = [sample.document for sample in batch if sample.document is not None]
    ids = iter(encode_documents(documents, tokenizer))
    for sample in batch:
        if sample.document is None:
            is_bad = sample.problem is not None
            yield sample, [], Accounting(bad=1) if is_bad else Accounting(filtered=1)
            continue
        own = next(ids)
        try:
            made = build_pieces(
                sample.document, own, tokenizer, recipe.seq_len, recipe.overlong, sample.where
            )
        except DataError as problem:
            if not recipe.max_bad_rows or recipe.overlong == "error":
                raise
            yield replace(sample, problem=problem), [], Accounting(bad=1)
            continue
        yield sample, *made


def _write(task: Task, parts: dict[str, _Part], bad: list[Sample], directory: Path) -> None:
    shards = {}
    for split, part in parts.items():
        lengths = np.array(part.sample_lengths, dtype=np.int32)
        write_array(samples_path(directory, split, task.number), lengths)
        if part.pieces:
            index = np.stack([piece_lengths(part.pieces), piece_targets(part.pieces)])
            write_array(index_path(directory, split, task.number), index)
            path = directory / split / f"shard-{task.number:05d}.arrow"
            shards[split] = write_shard(path, part.pieces, task.origin)
    summary = {
        "shards": shards,
        "accounting": {split: part.account.as_dict() for split, part in parts.items()},
        "bad": [sample.problem.message for sample in bad[:1] if sample.problem],
    }
    write_json(summary_path(directory, task.number), summary)


@lru_cache(maxsize=2)
def _tokenizer(directory: Path) -> Tokenizer:
    """One worker process prepares many chunks with the same tokenizer."""
    return open_tokenizer(directory)
