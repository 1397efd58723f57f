"""What a data set is made of: files, chunks of files, rows of chunks."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pliant.data.sources.places import Place
from pliant.errors import DataError

Format = Literal["jsonl", "json", "parquet", "arrow", "csv", "tsv", "text", "tfrecord", "hdf5"]
TextUnit = Literal["line", "paragraph", "file"]
Record = dict[str, Any]

MAX_RECORD_BYTES = 2**30
"""A longer line or record is refused before it is read whole: it is no line of a text."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a data set."""

    place: Place
    name: str
    """Its path within the data set: the same wherever the data lies."""
    format: Format
    size_bytes: int
    """As it is stored, compressed or not."""
    origin: int = 0
    """Which entry of the spec's list named it first."""


@dataclass(frozen=True)
class Chunk:
    """A run of records of one file. It may be pickled and read on another node."""

    place: Place
    format: Format
    text_unit: TextUnit
    """What one record is in plain text; the other formats do not look at it."""
    begin: int
    end: int
    """Offsets in the decompressed bytes where records are stretches of a file, else rows counted
    from 0."""
    first: int
    """The line or row of the first record, counted from 1 as people do."""
    count: int
    """Records, among them those that cannot be used."""


class Row(NamedTuple):
    """A record of a chunk, or what is wrong with it. A tuple, since there are so many."""

    where: str
    """Its place, for people: "data/file.jsonl line 17"."""
    record: Record | None
    problem: DataError | None
    """Why there is no record."""
    raw: bytes
    """The record as the file has it, without its line's end; empty in Parquet, Arrow and HDF5,
    where a record is no stretch of bytes."""

    def record_or_raise(self) -> Record:
        if self.problem is not None:
            raise self.problem
        assert self.record is not None, "a row is a record or a problem"
        return self.record

    def quarantined(self) -> bytes:
        """What to keep of a row that cannot be used: its bytes, else its values as JSON."""
        return self.raw or json.dumps(self.record, default=repr).encode()


class Span(NamedTuple):
    """Where one record lies in a file's decompressed bytes."""

    begin: int
    end: int
    number: int
    """Its line or place in the file, counted from 1."""


def row_of(parse: Callable[[bytes, str], Record], raw: bytes, where: str) -> Row:
    """What `parse` makes of a record's bytes, or the `DataError` that it raises."""
    try:
        return Row(where, parse(raw, where), None, raw)
    except DataError as problem:
        return Row(where, None, problem, raw)


def decoded(raw: bytes, where: str) -> str:
    """The text of `raw`. Raises `DataError` where it is no text."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 text: byte {error.start + 1} is 0x{raw[error.start]:02x}. "
            "Convert the file to UTF-8.",
            where=where,
        ) from None
    if "\0" in text:
        raise DataError(
            f"{where} holds a NUL byte, as UTF-16 text and files torn by a crash do. Convert the "
            "file to UTF-8, or remove the line.",
            where=where,
        )
    return text
