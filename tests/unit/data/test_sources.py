"""Files are found, cut into the same chunks every time, and read; what is wrong is named."""

import json
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fakes.corpora import write_jsonl
from pliant.data.sources import Chunk, checksum, cut, find_files, read_chunk
from pliant.errors import DataError


def records_of(path, format="auto", text_unit="paragraph", max_records=65536):
    files = find_files(str(path), "data.train", format, path.parent)
    chunks = cut(files, text_unit, max_records)
    return [list(read_chunk(chunk)) for chunk in chunks]


def flat(chunks):
    return [record for chunk in chunks for record, _ in chunk]


def message_of(path, **settings):
    with pytest.raises(DataError) as caught:
        records_of(path, **settings)
    return str(caught.value)


NUMBERS = [{"text": f"record {i}", "n": i} for i in range(10)]


@pytest.mark.parametrize("max_records", [1, 3, 5, 10, 11])
@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet"])
def test_chunks_hold_every_record_once_and_in_order(tmp_path, ending, max_records):
    path = tmp_path / f"data{ending}"
    if ending == ".jsonl":
        write_jsonl(path, NUMBERS)
    elif ending == ".json":
        path.write_text(json.dumps(NUMBERS))
    else:
        pq.write_table(pa.Table.from_pylist(NUMBERS), path, row_group_size=4)
    chunks = records_of(path, max_records=max_records)
    assert flat(chunks) == NUMBERS
    assert [len(chunk) for chunk in chunks[:-1]] == [max_records] * (len(chunks) - 1)
    assert all(f" {i + 1}" in where for i, (_, where) in enumerate(chain(*chunks)))


@pytest.mark.parametrize("max_records", [1, 2, 100])
def test_jsonl_tolerates_what_windows_and_editors_leave(tmp_path, max_records):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n \n{"text": "two"}\r\n{"text": "three"}')
    chunks = records_of(path, max_records=max_records)
    assert [r["text"] for r in flat(chunks)] == ["one", "two", "three"]
    assert [where.split()[-1] for chunk in chunks for _, where in chunk] == ["1", "4", "5"]


def test_a_jsonl_line_ends_at_a_newline_only(tmp_path):
    text = "a\u2028b\u2029c\x85d\x0be\x0cf"
    assert flat(records_of(write_jsonl(tmp_path / "a.jsonl", [{"text": text}]))) == [{"text": text}]


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("line", ["one", "two", "three", "four"]),
        ("paragraph", ["one\ntwo", "three\nfour"]),
        ("file", ["one\ntwo\n\n\nthree\nfour"]),
    ],
)
@pytest.mark.parametrize("max_records", [1, 10])
def test_text_is_cut_by_line_paragraph_or_file(tmp_path, unit, expected, max_records):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n\none\r\ntwo\n\n\nthree\nfour\n\n")
    chunks = records_of(path, text_unit=unit, max_records=max_records)
    assert [record["text"] for record in flat(chunks)] == expected


def test_a_chunk_says_where_its_records_lie(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", NUMBERS[:3])
    files = find_files(str(path), "data.train", "auto", tmp_path)
    line = len(path.read_bytes().splitlines(keepends=True)[0])
    assert cut(files, "line", 2) == [
        Chunk(path, "jsonl", "line", 0, 2 * line, 1, 2),
        Chunk(path, "jsonl", "line", 2 * line, 3 * line, 3, 1),
    ]


def test_files_are_found_by_name_glob_directory_and_list(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "deep/c.txt", ".hidden/d.jsonl", "notes.pdf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")

    def names(source):
        return [file.name for file in find_files(source, "data.train", "auto", tmp_path)]

    assert names(str(tmp_path)) == ["a.jsonl", "b.jsonl", "deep/c.txt"]
    assert names(str(tmp_path / "*.jsonl")) == ["a.jsonl", "b.jsonl"]
    assert names(str(tmp_path / "**" / "*.txt")) == ["deep/c.txt"]
    assert names([str(tmp_path / "b.jsonl"), str(tmp_path / "*.jsonl")]) == ["b.jsonl", "a.jsonl"]


def test_checksums_follow_content_and_not_the_place(tmp_path):
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        write_jsonl(tmp_path / place / "a.jsonl", NUMBERS)
    sums = [
        checksum(find_files(str(tmp_path / place), "data.train", "auto", tmp_path))
        for place in ("here", "there")
    ]
    assert sums[0] == sums[1]
    write_jsonl(tmp_path / "there" / "a.jsonl", NUMBERS[1:])
    changed = checksum(find_files(str(tmp_path / "there"), "data.train", "auto", tmp_path))
    assert changed != sums[0]


def test_missing_files_are_named_with_the_key_that_asked(tmp_path):
    assert "There is no file" in message_of(tmp_path / "none.jsonl")
    assert "data.train" in message_of(tmp_path / "none.jsonl")
    assert "No file matches" in message_of(tmp_path / "*.jsonl")
    (tmp_path / "empty").mkdir()
    assert "holds no data file" in message_of(tmp_path / "empty")
    with pytest.raises(DataError, match=r"data\.train is an empty list"):
        find_files([], "data.train", "auto", tmp_path)


def test_an_unknown_ending_asks_for_a_format(tmp_path):
    path = write_jsonl(tmp_path / "a.data", NUMBERS)
    assert "data.format" in message_of(path)
    assert flat(records_of(path, format="jsonl")) == NUMBERS


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "a.jsonl",
            b'{"text": "x"}\n\n{"text": }\n',
            "a.jsonl line 3 is not JSON: Expecting value",
        ),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', "a.jsonl line 2 is an array"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', "a.jsonl line 2 is not UTF-8"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl line 1 is not JSON: nested too deeply"),
        ("a.json", b'{"text": "x"}', "a.json holds an object"),
        ("a.json", b'[{"text": "x"},\n"y"]', "a.json record 2 is a string"),
        ("a.json", b'[{"text": "x"}\n', "a.json line 2 is not JSON"),
        ("a.json", b'[\n\n{"text": "\xff"}]', "a.json line 3 is not UTF-8"),
        ("a.txt", b"one\n\ntwo\n\xff\n", "a.txt line 4 is not UTF-8"),
        ("a.parquet", b"not parquet at all", "a.parquet is not a readable Parquet file"),
    ],
)
def test_a_bad_file_is_named_with_its_place(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    assert expected in message_of(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf\n"])
def test_a_blank_file_holds_no_records(tmp_path, content):
    (tmp_path / "a.jsonl").write_bytes(content)
    assert records_of(tmp_path / "a.jsonl") == []


def test_a_file_gone_since_it_was_cut_is_named():
    with pytest.raises(DataError, match="cannot be read: No such file"):
        list(read_chunk(Chunk(Path("gone.jsonl"), "jsonl", "line", 0, 10, 1, 1)))
