"""Records that are lines of a file, or runs of lines: JSON Lines and plain text.

A line ends at a newline only: the other characters at which Python would split a text, U+2028 and
its like, are legal inside JSON strings. A carriage return before it, and a byte order mark at the
start of the file, are taken away. Blank lines are no records.
"""

import sys
from collections.abc import Iterable, Iterator

from pliant.data.sources.json_values import parse_object
from pliant.data.sources.parts import (
    MAX_RECORD_BYTES,
    Chunk,
    Record,
    Row,
    SourceFile,
    Span,
    TextUnit,
    decoded,
    row_of,
)
from pliant.data.sources.places import Place, content, reading
from pliant.errors import DataError

BOM = b"\xef\xbb\xbf"


Line = tuple[int, int, int, bytes]
"""Begin, end and number of a line, and its bytes with the newline at their end."""


def lines(place: Place, begin: int = 0, end: int = sys.maxsize, number: int = 1) -> Iterator[Line]:
    """The lines between two offsets at which lines start; the first has the number `number`."""
    with reading(place), content(place, begin) as file:
        while begin < end and (raw := file.readline(MAX_RECORD_BYTES + 1)):
            after = begin + len(raw)
            if len(raw) > MAX_RECORD_BYTES:
                raise too_long(place, number)
            yield begin, after, number, raw if begin else raw.removeprefix(BOM)
            begin = after
            number += 1


def jsonl_spans(file: SourceFile, text_unit: TextUnit) -> Iterator[Span]:
    for begin, end, number, raw in lines(file.place):
        if raw.strip():
            yield Span(begin, end, number)


def read_jsonl(chunk: Chunk) -> Iterator[Row]:
    name = str(chunk.place)
    for _, _, number, raw in lines(chunk.place, chunk.begin, chunk.end, chunk.first):
        if raw.strip():
            yield row_of(parse_object, _bare(raw), f"{name} line {number}")


def text_spans(file: SourceFile, text_unit: TextUnit) -> Iterator[Span]:
    for span, _ in _units(lines(file.place), text_unit, file.place):
        yield span


def read_text(chunk: Chunk) -> Iterator[Row]:
    """Plain text becomes `{"text": ...}`, without the newlines at its end."""
    name = str(chunk.place)
    read = lines(chunk.place, chunk.begin, chunk.end, chunk.first)
    for span, unit in _units(read, chunk.text_unit, chunk.place):
        raw = b"\n".join([_bare(line) for line in unit]).rstrip(b"\n")
        yield row_of(_text_record, raw, f"{name} line {span.number}")


def too_long(place: Place, number: int) -> DataError:
    return DataError(
        f"{place} line {number} starts a record of more than {MAX_RECORD_BYTES:,} bytes, the most "
        "that is read at once. Cut it into several, or set data.format to what the file is.",
        path=str(place),
        line=number,
    )


def _units(
    read: Iterable[Line], text_unit: TextUnit, place: Place
) -> Iterator[tuple[Span, list[bytes]]]:
    """Lines gathered into records.

    Blank lines part paragraphs and are no record themselves; within a whole file they stay.
    """
    unit: list[bytes] = []
    first = last = first_number = 0
    for begin, end, number, raw in read:
        blank = not raw.strip()
        if unit and (text_unit == "line" or (blank and text_unit == "paragraph")):
            yield Span(first, last, first_number), unit
            unit = []
        if not unit:
            first, first_number = begin, number
        if unit or not blank:
            unit.append(raw)
            last = end
        if last - first > MAX_RECORD_BYTES:
            raise too_long(place, first_number)
    if unit:
        yield Span(first, last, first_number), unit


def _text_record(raw: bytes, where: str) -> Record:
    return {"text": decoded(raw, where)}


def _bare(raw: bytes) -> bytes:
    return raw.removesuffix(b"\n").removesuffix(b"\r")
