"""Data sets for tests: small files written on the spot, and the real ones beside the repository."""

import json
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(__file__).parents[2] / ".." / "shared" / "data"


def write_jsonl(path: Path, records: list[Any]) -> Path:
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def real(name: str) -> Path:
    """A real data set; the test is skipped where the machine does not have it."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"the real data set {name} is not on this machine")
    return path.resolve()
