"""Settings as MLflow parameters: flat, of text, within MLflow's limits."""

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pliant.tracking.redaction import recordable

MAX_KEY = 250
MAX_VALUE = 6000
_FORBIDDEN = re.compile(r"[^/\w.\- :]")


def flatten_params(tree: Mapping[str, Any]) -> dict[str, str]:
    """`tree` with dotted keys. Text stays as it is; other values are written as JSON.

    Values longer than MLflow's limit end in "... (N characters)"; the values of environment
    variables (below `env`) that look like secrets are left out.
    """
    flat: dict[str, str] = {}
    for key, value in _leaves(tree, ""):
        flat[_unused(clean_name(key), flat)] = shorten(value)
    return flat


def clean_name(name: str) -> str:
    """The nearest name that MLflow accepts for a metric, parameter or tag."""
    cleaned = _FORBIDDEN.sub("_", name)[:MAX_KEY]
    if posixpath.normpath(cleaned) != cleaned or cleaned.startswith("/"):
        cleaned = cleaned.replace("/", "_")
    return f"_{cleaned}"[:MAX_KEY] if cleaned in ("", ".") or cleaned[:2] == ".." else cleaned


def shorten(value: str, limit: int = MAX_VALUE) -> str:
    """`value`, or as much of it as fits into `limit` characters with its length behind it."""
    if len(value) <= limit:
        return value
    ending = f"... ({len(value)} characters)"
    return value[: limit - len(ending)] + ending


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.")
        elif key.startswith("env."):
            yield key, recordable(key.removeprefix("env."), _text(value))
        else:
            yield key, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, default=str, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def _unused(key: str, taken: Mapping[str, str]) -> str:
    """Different keys may become equal once they are cleaned and cut: number the later ones."""
    number, free = 1, key
    while free in taken:
        number += 1
        free = f"{key[: MAX_KEY - 10]}_{number}"
    return free
