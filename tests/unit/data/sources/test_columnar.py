"""Parquet and Arrow files: rows across groups and batches, and text that is none."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fakes.source_files import message_of, problems_of, records_of, rows_of, written


def write(path, table):
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return
    make = pa.ipc.new_stream if path.suffix == ".arrow" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, make(file, table.schema) as writer:
        writer.write_table(table)


NESTED = [
    {"messages": [{"role": "user", "content": "hi"}], "input_ids": [1, 2, 3], "score": 0.5},
    {"messages": [], "input_ids": [4], "score": None},
]


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".feather"])
def test_lists_and_structures_become_plain_values(tmp_path, ending):
    assert records_of(written(tmp_path / f"a{ending}", NESTED)) == NESTED


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".feather"])
def test_a_file_without_rows_holds_no_records(tmp_path, ending):
    write(tmp_path / f"a{ending}", pa.table({"text": pa.array([], pa.string())}))
    assert rows_of(tmp_path / f"a{ending}") == []


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".feather"])
def test_a_column_that_is_named_twice_is_refused(tmp_path, ending):
    write(tmp_path / f"a{ending}", pa.table([[1], [2]], names=["n", "n"]))
    assert f"a{ending} names a column twice: n, n" in message_of(tmp_path / f"a{ending}")


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".feather"])
def test_a_column_of_text_that_is_none_is_a_bad_row(tmp_path, ending):
    path = tmp_path / f"a{ending}"
    text = pa.array([b"one", b"caf\xe9", b"three"], pa.binary()).view(pa.string())
    table = pa.table({"text": text, "n": [1, 2, 3]})
    write(path, table)
    (rows,) = rows_of(path)
    assert [row.record for row in rows] == [
        {"text": "one", "n": 1},
        None,
        {"text": "three", "n": 3},
    ]
    assert "row 2 is not UTF-8 text in text" in problems_of(path)[1]
    assert json.loads(rows[1].quarantined()) == {"n": 2}


@pytest.mark.parametrize(
    ("ending", "problem"),
    [
        (".parquet", "is not a readable Parquet file"),
        (".arrow", "is not a readable Arrow file"),
        (".feather", "is not a readable Arrow file"),
    ],
)
def test_a_torn_file_is_an_error_and_no_short_file(tmp_path, ending, problem):
    path = written(tmp_path / f"a{ending}", NESTED * 10)
    whole = path.read_bytes()
    for broken in (b"", b"not a table at all", whole[:-20], whole[: len(whole) // 2]):
        path.write_bytes(broken)
        assert problem in message_of(path)


def test_damage_within_a_parquet_file_is_an_error(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"text {i}" for i in range(2000)]})
    pq.write_table(table, path, write_page_checksum=True, compression="zstd")
    whole = bytearray(path.read_bytes())
    whole[200:220] = bytes(20)
    path.write_bytes(whole)
    assert "is not a readable Parquet file" in message_of(path)
