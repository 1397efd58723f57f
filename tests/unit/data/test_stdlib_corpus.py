"""The standard library's own documentation is a data set that every machine has."""

import json

import pytest

from pliant.data import stdlib_corpus
from pliant.errors import DataError

MODULE = '''
"""Not a definition."""
class Stack(list, metaclass=type):
    """A stack.

    Plain.
        Indented.
    """
    def push(self, item: int = 0, *, quiet=True):
        """Put one on."""
        def inner():
            """Local, left out."""
    def silent(self): ...
try:
    import fast
except ImportError:
    async def slow(*args, **kwargs):
        "Fallback."
'''


def test_documented_definitions_become_records_in_order(tmp_path):
    for name in ("b/__init__.py", "a.py", "test/test_a.py", "b/broken.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(MODULE if name != "b/broken.py" else "def (")
    made = list(stdlib_corpus.records(tmp_path))
    assert [record["prompt"] for record in made] == [
        f"{module}.{signature}\n"
        for module in ("a", "b")
        for signature in (
            "Stack(list, metaclass=type)",
            "Stack.push(self, item: int=0, *, quiet=True)",
            "slow(*args, **kwargs)",
        )
    ]
    assert made[0]["completion"] == "A stack.\n\nPlain.\n    Indented."


def test_the_corpus_of_this_python_is_written_once(tmp_path):
    path = stdlib_corpus.write(tmp_path)
    written = path.stat().st_mtime_ns
    assert stdlib_corpus.write(tmp_path) == path
    assert path.stat().st_mtime_ns == written
    records = [json.loads(line) for line in path.open(encoding="utf-8")]
    assert len(records) > 5000
    assert any(record["prompt"].startswith("json.dumps(obj, *") for record in records)
    assert all(record["completion"].strip() for record in records)
    assert list(tmp_path.iterdir()) == [path]


def test_a_python_without_sources_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(stdlib_corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="needs the sources"):
        stdlib_corpus.write(tmp_path / "corpora")
