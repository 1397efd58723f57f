"""CSV and TSV: the first row names the columns, and every field is text as it stands in the file.

Fields may be quoted and then hold separators, newlines and doubled quotes. Blank rows are no
records. A row with too few or too many fields, or with a quote that is never closed, is a bad row;
the rows after it are read.
"""

import csv
from collections.abc import Iterable, Iterator
from functools import partial

from pliant.data.sources.lines import Line, lines
from pliant.data.sources.parts import (
    MAX_RECORD_BYTES,
    Chunk,
    Format,
    Record,
    Row,
    SourceFile,
    Span,
    TextUnit,
    decoded,
    row_of,
)
from pliant.data.sources.places import Place
from pliant.errors import DataError

SEPARATORS: dict[Format, str] = {"csv": ",", "tsv": "\t"}


Fields = list[str] | csv.Error
"""Of a row, or why it has none."""


def spans(file: SourceFile, text_unit: TextUnit) -> Iterator[Span]:
    rows = _rows(lines(file.place), file.format)
    next(rows, None)  # the names of the columns
    for span, _, _ in rows:
        yield span


def read(chunk: Chunk) -> Iterator[Row]:
    name, columns = str(chunk.place), _columns(chunk.place, chunk.format)
    read = lines(chunk.place, chunk.begin, chunk.end, chunk.first)
    for span, raw, fields in _rows(read, chunk.format):
        yield row_of(partial(_record, columns, fields), raw, f"{name} line {span.number}")


def _rows(read: Iterable[Line], format: Format) -> Iterator[tuple[Span, bytes, Fields]]:
    """The rows that are not blank. Where one ends follows from its own lines alone, so that a chunk
    may be read by itself."""
    taken: list[Line] = []

    def feed() -> Iterator[str]:
        for line in read:
            taken.append(line)
            yield line[-1].decode("utf-8", "surrogateescape")

    reader = csv.reader(feed(), delimiter=SEPARATORS[format], strict=True)
    while True:
        taken.clear()
        fields = _next(reader)
        if fields is None:
            return
        if fields:
            (begin, _, number, _), (_, end, _, _) = taken[0], taken[-1]
            raw = b"".join([line for *_, line in taken])
            bare = raw.removesuffix(b"\n").removesuffix(b"\r")
            yield Span(begin, end, number), bare, fields


def _next(reader: Iterator[list[str]]) -> Fields | None:
    """The next row, what is wrong with it, or None at the end. The library's limit on the length of
    a field is the process's, so it is put back at once."""
    limit = csv.field_size_limit(MAX_RECORD_BYTES)
    try:
        return next(reader, None)
    except csv.Error as error:
        return error
    finally:
        csv.field_size_limit(limit)


def _columns(place: Place, format: Format) -> list[str]:
    span, raw, columns = next(_rows(lines(place), format))
    where = f"{place} line {span.number}"
    decoded(raw, where)
    if isinstance(columns, csv.Error):
        raise _broken(columns, where)
    if len(set(columns)) < len(columns):
        raise DataError(
            f"{where} must name the columns, and names one twice: {', '.join(columns)}. "
            "Give every column a name of its own.",
            where=where,
        )
    return columns


def _record(columns: list[str], fields: Fields, raw: bytes, where: str) -> Record:
    decoded(raw, where)
    if isinstance(fields, csv.Error):
        raise _broken(fields, where)
    if len(fields) != len(columns):
        raise DataError(
            f"{where} has {len(fields)} field(s), and the first row names {len(columns)} columns "
            f"({', '.join(columns)}). Repair or remove the row; a field that holds a separator or "
            "a newline needs quotes.",
            where=where,
        )
    return dict(zip(columns, fields, strict=True))


def _broken(error: csv.Error, where: str) -> DataError:
    return DataError(
        f"{where} is no row of a table: {error}. Quotes must enclose a whole field and be doubled "
        "within it; repair or remove the row.",
        where=where,
    )
