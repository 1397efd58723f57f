"""A .json file: one array, whose elements are the records.

It is held in memory while it is cut; a chunk is then a stretch of its bytes, and no more than that
is read.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from pliant.data.sources.json_values import kind_of, parse_object, problem_of
from pliant.data.sources.lines import BOM
from pliant.data.sources.parts import Chunk, Row, SourceFile, Span, TextUnit, row_of
from pliant.data.sources.places import Place, content, reading
from pliant.errors import DataError

_DECODER = json.JSONDecoder()
_BLANK = re.compile(r"[ \t\n\r]*")


def spans(file: SourceFile, text_unit: TextUnit) -> Iterator[Span]:
    with reading(file.place), content(file.place) as source:
        data = source.read()
    text = _as_bytes(data)
    start = _after_blank(text, len(BOM) if data.startswith(BOM) else 0)
    if not text.startswith("[", start):
        raise _no_array(file.place, data[start:])
    try:
        for number, (begin, end) in enumerate(_elements(text, start), 1):
            yield Span(begin, end, number)
    except (ValueError, RecursionError) as error:
        raise _not_json(file.place, error) from None


def read(chunk: Chunk) -> Iterator[Row]:
    with reading(chunk.place), content(chunk.place, chunk.begin) as source:
        data = source.read(chunk.end - chunk.begin)
    name, text, at = str(chunk.place), _as_bytes(data), 0
    for number in range(chunk.first, chunk.first + chunk.count):
        _, end = _DECODER.raw_decode(text, at)
        yield row_of(parse_object, data[at:end], f"{name} record {number}")
        at = _after_blank(text, _after_blank(text, end) + 1)  # the comma


def _elements(text: str, start: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each element of the array at `start`. Raises `ValueError`."""
    at = _after_blank(text, start + 1)
    if not text.startswith("]", at):
        while True:
            _, end = _DECODER.raw_decode(text, at)
            yield at, end
            at = _after_blank(text, end)
            if not text.startswith(",", at):
                break
            at = _after_blank(text, at + 1)
    if not text.startswith("]", at):
        raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
    if (rest := _after_blank(text, at + 1)) != len(text):
        raise json.JSONDecodeError("Extra data", text, rest)


def _as_bytes(data: bytes) -> str:
    """A text with one character for each byte: all that JSON is built of is ASCII, so the parser
    finds the same structure, and its positions are offsets."""
    return data.decode("latin-1")


def _after_blank(text: str, at: int) -> int:
    match = _BLANK.match(text, at)
    assert match is not None, "it matches nothing, too"
    return match.end()


def _no_array(place: Place, data: bytes) -> DataError:
    try:
        value = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        return _not_json(place, error)
    return DataError(
        f"{place} holds {kind_of(value)}{_lists_in(value)}, and an array of objects was needed. "
        "Put the records in [ ] at the top, or set data.format to jsonl where each line is an "
        "object of its own.",
        path=str(place),
    )


def _lists_in(value: Any) -> str:
    if not isinstance(value, dict):
        return ""
    lists = [name for name, inner in value.items() if isinstance(inner, list)]
    return f" with a list below {', '.join(map(repr, lists))}" if lists else ""


def _not_json(place: Place, error: Exception) -> DataError:
    line = f" line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
    return DataError(
        f"{place}{line} is not JSON: {problem_of(error)}. A .json file must be one array of "
        "objects; where each line is an object of its own, set data.format to jsonl.",
        path=str(place),
    )
