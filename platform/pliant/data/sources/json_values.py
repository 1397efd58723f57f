"""One record from its JSON.

NaN, Infinity and -Infinity are numbers, since Python and pandas write them; of a key that comes
twice the last value counts, as everywhere else. A lone half of a surrogate pair is refused: it is
no character, and no tokenizer takes it.
"""

import json
import re
from typing import Any

from pliant.data.sources.parts import Record, decoded
from pliant.errors import DataError

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(raw: bytes, where: str) -> Record:
    """Raises `DataError` where `raw` is not one JSON object."""
    try:
        text = raw.decode("utf-8")
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        decoded(raw, where)  # it may be no text at all, and says so
        raise DataError(
            f"{where} is not JSON: {problem_of(error)}. Every record must be one JSON object; "
            "repair or remove it.",
            where=where,
        ) from None
    if not isinstance(value, dict):
        raise DataError(
            f"{where} is {kind_of(value)}, and every record must be an object with columns. "
            'Write, for example, {"text": ...}.',
            where=where,
        )
    if "\\" in text and _SURROGATE.search(text) and not _is_text(value):
        raise DataError(
            f"{where} holds half of a surrogate pair (\\ud800 to \\udfff by itself), which is no "
            "character. It comes from text cut within an emoji; repair or remove the record.",
            where=where,
        )
    return value


def problem_of(error: Exception) -> str:
    """What a JSON parser found, in words."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def kind_of(value: Any) -> str:
    """A JSON value's type, in words."""
    if value is None:
        return "null"
    words = {bool: "a truth value", str: "a string", list: "an array", dict: "an object"}
    return words.get(type(value), "a number")


def _is_text(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
