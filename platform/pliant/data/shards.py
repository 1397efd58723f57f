"""One chunk of records to one shard of each split: the part of preparation that runs in parallel.

Everything here depends on the chunk and the recipe alone, so it does not matter who does it when.
"""

import errno
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pliant.data.records import Reading, Turn
from pliant.data.sources import Chunk, Record, read_chunk
from pliant.data.store import (
    SPLITS,
    piece_lengths,
    piece_targets,
    write_json,
    write_shard,
)
from pliant.data.tokenizer import Tokenizer, open_tokenizer
from pliant.data.tokens import Accounting, Overlong, Piece, build_pieces
from pliant.errors import DataError, NoSpace
from pliant.files import replacing
from pliant.spec.dotted import load_dotted

SAMPLES_PER_CALL = 1024
"""Enough for the tokenizer's threads to share, and little enough to hold."""
CHUNKS_DIR = "chunks"
STOP_FILE = "stop"


@dataclass(frozen=True)
class Recipe:
    """How records become pieces: the same for every chunk of a data set."""

    reading: Reading
    transform: str | None
    """Dotted path of a function from a raw record to a record, or None to drop it."""
    validation: float
    """Share of the training files' records that is held out."""
    test: float
    seq_len: int
    overlong: Overlong


@dataclass(frozen=True)
class Task:
    """One chunk and where it belongs."""

    number: int
    """Of the chunk, and of the shards it becomes."""
    split: str
    """The split whose files the chunk is of; records of "train" may be held out of it."""
    chunk: Chunk


@dataclass(frozen=True)
class Sample:
    """A record on its way, and the split that it goes to."""

    split: str
    turns: tuple[Turn, ...] | None
    """None where the transform dropped it."""
    where: str


def write_shards(task: Task, recipe: Recipe, directory: Path) -> None:
    """Tokenize a chunk and write its shards; its summary, written last, says that it is done.

    Returns early, without a summary, once another task has failed. Raises `UserError`.
    """
    pieces: dict[str, list[Piece]] = {name: [] for name in SPLITS}
    accounts = {name: Accounting() for name in SPLITS}
    tokenizer = _tokenizer(directory / "tokenizer")
    samples = read_samples(task, recipe)
    while batch := list(islice(samples, SAMPLES_PER_CALL)):
        if (directory / STOP_FILE).exists():
            return
        for sample, made, account in _tokenize(batch, recipe, tokenizer):
            pieces[sample.split] += made
            accounts[sample.split] += account
    try:
        _write(task, pieces, accounts, directory)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise NoSpace(
            f"The disk of {directory} is full. Free some space, or set data.store."
        ) from None


def read_samples(task: Task, recipe: Recipe) -> Iterator[Sample]:
    """The samples of a chunk in order. Raises `DataError` at a record that cannot be used."""
    transform = load_dotted(recipe.transform, "data.transform") if recipe.transform else None
    for raw, where in read_chunk(task.chunk):
        held_out = task.split == "train"
        split = choose_split(raw, recipe.validation, recipe.test) if held_out else task.split
        record = apply_transform(transform, recipe.transform, raw, where)
        turns = None if record is None else recipe.reading.turns(record, where)
        yield Sample(split, turns, where)


def choose_split(record: Record, validation: float, test: float) -> str:
    """The split of a record, by a hash of its content: the same whatever else is in the data."""
    if not validation and not test:
        return "train"
    content = json.dumps(record, sort_keys=True, default=str).encode()
    digest = hashlib.blake2b(content, digest_size=8).digest()
    share = int.from_bytes(digest, "big") / 2**64
    if share < test:
        return "test"
    return "validation" if share < test + validation else "train"


def apply_transform(
    transform: Callable[[Record], Any] | None, name: str | None, record: Record, where: str
) -> Record | None:
    """What the user's function makes of a record. Its failure is a `DataError` that says where."""
    if transform is None:
        return record
    try:
        changed = transform(record)
    except Exception as error:  # the user's own code may raise anything
        raise DataError(
            f"data.transform {name} failed on {where}: {type(error).__name__}: {error}. Repair the "
            "function or the record.",
            where=where,
        ) from error
    if changed is not None and not isinstance(changed, dict):
        raise DataError(
            f"data.transform {name} returned {type(changed).__name__} for {where}, and a record "
            "(dict) or None was needed.",
            where=where,
        )
    return changed


def summary_path(directory: Path, number: int) -> Path:
    return directory / CHUNKS_DIR / f"{number:05d}.json"


def index_path(directory: Path, split: str, number: int) -> Path:
    """int32 [2, pieces]: length and targets of each piece of one shard."""
    return directory / CHUNKS_DIR / f"{number:05d}.{split}.npy"


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
    return summary


def _tokenize(
    batch: list[Sample], recipe: Recipe, tokenizer: Tokenizer
) -> Iterator[tuple[Sample, list[Piece], Accounting]]:
    """All turns of the batch go to the tokenizer in one call, which uses all its threads."""
    texts = [turn.text for sample in batch for turn in sample.turns or ()]
    ids = iter(tokenizer.encode_batch(texts))
    for sample in batch:
        if sample.turns is None:
            yield sample, [], Accounting(filtered=1)
            continue
        own = list(islice(ids, len(sample.turns)))
        pieces, account = build_pieces(
            sample.turns, own, tokenizer.eos_id, recipe.seq_len, recipe.overlong, sample.where
        )
        yield sample, pieces, account


def _write(
    task: Task,
    pieces: dict[str, list[Piece]],
    accounts: dict[str, Accounting],
    directory: Path,
) -> None:
    shards = {}
    for split in SPLITS:
        if pieces[split]:
            index = np.stack([piece_lengths(pieces[split]), piece_targets(pieces[split])])
            with replacing(index_path(directory, split, task.number)) as file:
                np.save(file, index)
            path = directory / split / f"shard-{task.number:05d}.arrow"
            shards[split] = write_shard(path, pieces[split])
    accounting = {split: accounts[split].as_dict() for split in SPLITS}
    summary = {"shards": shards, "accounting": accounting}
    write_json(summary_path(directory, task.number), summary)


@lru_cache(maxsize=2)
def _tokenizer(directory: Path) -> Tokenizer:
    """One worker process prepares many chunks with the same tokenizer."""
    return open_tokenizer(directory)
