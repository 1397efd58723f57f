"""HDF5 files: each dataset is a column."""

import sys

import numpy as np
import pytest

from fakes.source_files import message_of, problems_of, records_of, rows_of


@pytest.fixture
def h5py():
    return pytest.importorskip("h5py", reason="h5py, which reads HDF5 files, is not installed")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.h5"


def test_datasets_of_every_kind_become_columns(h5py, path):
    with h5py.File(path, "w") as file:
        file.create_dataset("text", data=["naïve", "b", ""], dtype=h5py.string_dtype())
        file.create_dataset("fixed", data=np.array([b"x", b"yy", b"zzz"]))
        file.create_dataset("n", data=np.arange(3, dtype=np.uint16))
        file.create_dataset("good", data=np.array([True, False, True]))
        file.create_dataset("deep/pair", data=np.arange(6.0).reshape(3, 2))
        file.create_dataset("names", data=[["a", "b"]] * 3, dtype=h5py.string_dtype())
        ids = file.create_dataset("ids", (3,), dtype=h5py.vlen_dtype(np.int32))
        ids[0], ids[1], ids[2] = [1, 2, 3], [], [7]
        file.create_dataset("version", data=2)
    records = records_of(path, max_records=2)
    assert records == [
        {
            "text": text,
            "fixed": fixed,
            "n": n,
            "good": n != 1,
            "deep/pair": [2.0 * n, 2.0 * n + 1],
            "names": ["a", "b"],
            "ids": ids,
        }
        for n, (text, fixed, ids) in enumerate(
            [("naïve", "x", [1, 2, 3]), ("b", "yy", []), ("", "zzz", [7])]
        )
    ]
    assert type(records[0]["n"]) is int
    assert type(records[0]["ids"][0]) is int


def test_text_that_is_none_is_a_bad_row(h5py, path):
    with h5py.File(path, "w") as file:
        file.create_dataset("text", data=np.array([b"a", b"caf\xe9"]))
        file.create_dataset("n", data=[1, 2])
    first, second = problems_of(path)
    assert first is None
    assert "row 2 is not UTF-8 text in text" in second
    assert rows_of(path)[0][1].quarantined() == b'{"n": 2}'


def test_datasets_of_several_lengths_are_refused(h5py, path):
    with h5py.File(path, "w") as file:
        file.create_dataset("a", data=[1, 2])
        file.create_dataset("b", data=[1, 2, 3])
    assert "datasets of several lengths (a 2, b 3)" in message_of(path)


def test_a_type_that_cannot_be_read_is_named(h5py, path):
    with h5py.File(path, "w") as file:
        file.create_dataset("a", data=np.zeros(2, dtype=[("x", int), ("y", int)]))
    assert "a.h5 dataset a has the type" in message_of(path)


def test_what_is_no_hdf5_file_is_named(h5py, path):
    path.write_bytes(b"no HDF5")
    assert "a.h5 is not a readable HDF5 file" in message_of(path)


def test_a_missing_library_is_asked_for_in_words(path, monkeypatch):
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert message_of(path).endswith("is not installed. Install it: pip install 'pliant[hdf5]'.")
