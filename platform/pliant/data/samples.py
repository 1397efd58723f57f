"""The records of a chunk as documents: transformed, put on their split, or found unusable.

Everything here depends on the chunk and the recipe alone, so it does not matter who does it when.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pliant.data.document import Document
from pliant.data.records import Reading
from pliant.data.sources import Chunk, Record, Row, read_chunk
from pliant.errors import DataError
from pliant.spec.data import Overlong
from pliant.spec.dotted import load_dotted


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
    max_bad_rows: int
    """So many records that cannot be used are skipped; 0: the first is an error."""


@dataclass(frozen=True)
class Task:
    """One chunk and where it belongs."""

    number: int
    """Of the chunk, and of the shards it becomes."""
    split: str
    """The split whose files the chunk is of; records of "train" may be held out of it."""
    chunk: Chunk
    origin: int
    """Which of the sources that the spec names it belongs to."""


@dataclass(frozen=True)
class Sample:
    """A record on its way, and the split that it goes to."""

    split: str
    row: Row
    document: Document | None
    """None where the transform dropped it, or where it cannot be used."""
    problem: DataError | None = None
    """Why it cannot be used."""

    @property
    def where(self) -> str:
        return self.row.where


def read_samples(task: Task, recipe: Recipe) -> Iterator[Sample]:
    """The samples of a chunk in order. Raises `DataError` at a record that cannot be used where
    none is to be skipped, and wherever the transform fails, which is no fault of the data's."""
    transform = load_dotted(recipe.transform, "data.transform") if recipe.transform else None
    for row in read_chunk(task.chunk):
        sample = _read_sample(row, task, recipe, transform)
        if sample.problem is not None and not recipe.max_bad_rows:
            raise sample.problem
        yield sample


def _read_sample(
    row: Row, task: Task, recipe: Recipe, transform: Callable[[Record], Any] | None
) -> Sample:
    if row.record is None:
        return Sample(task.split, row, None, row.problem)
    held_out = task.split == "train"
    split = choose_split(row.record, recipe.validation, recipe.test) if held_out else task.split
    record = apply_transform(transform, recipe.transform, row.record, row.where)
    if record is None:
        return Sample(split, row, None)
    try:
        return Sample(split, row, recipe.reading.document(record, row.where))
    except DataError as problem:
        return Sample(split, row, None, problem)


def too_many_bad_rows(first: DataError | None, count: int, limit: int) -> DataError:
    return DataError(
        f"{count:,} records or more cannot be used, and data.max_bad_rows allows {limit:,}. The "
        f"first: {first.message if first else ''}",
        count=count,
    )


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
