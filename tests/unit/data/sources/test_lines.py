"""Lines are what people meant by them: each hazard of text files has its value."""

import tracemalloc

import pytest

from fakes.corpora import write_jsonl
from fakes.source_files import message_of, problems_of, records_of, rows_of
from pliant.data.sources import lines


@pytest.mark.parametrize("max_records", [1, 2, 100])
def test_jsonl_tolerates_what_windows_and_editors_leave(tmp_path, max_records):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n \n{"text": "two"}\r\n{"text": "three"}')
    chunks = rows_of(path, max_records=max_records)
    rows = [row for chunk in chunks for row in chunk]
    assert [row.record["text"] for row in rows] == ["one", "two", "three"]
    assert [row.where.split()[-1] for row in rows] == ["1", "4", "5"]
    assert rows[0].raw == b'{"text": "one"}'


def test_a_line_ends_at_a_newline_only(tmp_path):
    text = "a\u2028b\u2029c\x85d\x0be\x0cf"
    assert records_of(write_jsonl(tmp_path / "a.jsonl", [{"text": text}])) == [{"text": text}]
    (tmp_path / "a.txt").write_bytes(f"{text}\rg\n".encode())
    assert records_of(tmp_path / "a.txt", text_unit="line") == [{"text": f"{text}\rg"}]


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
    path.write_bytes(b"\xef\xbb\xbf\n\none\r\ntwo\n\n\nthree\nfour\n\n")
    records = records_of(path, text_unit=unit, max_records=max_records)
    assert [record["text"] for record in records] == expected


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": }', "line 2 is not JSON: Expecting value at column 10"),
        (b"[1]", "line 2 is an array"),
        (b"null", "line 2 is null"),
        (b'{"a": 1}{"b": 2}', "line 2 is not JSON: Extra data at column 9"),
        (b'{"text": "\xff"}', "line 2 is not UTF-8 text: byte 11 is 0xff"),
        (b'{"text": "\xed\xa0\x80"}', "line 2 is not UTF-8 text"),
        (b'{"text": "a\0b"}', "line 2 holds a NUL byte"),
        (b'{"text": "\\ud83d"}', "line 2 holds half of a surrogate pair"),
        (b'{"\\uDE00": 1}', "line 2 holds half of a surrogate pair"),
        (b'{"a": {"b": ["\\ude00\\ud83d"]}}', "line 2 holds half of a surrogate pair"),
        (b"[" * 100_000, "line 2 is not JSON: nested too deeply"),
        (b'{"n": ' + b"9" * 5000 + b"}", "line 2 is not JSON: Exceeds the limit"),
        (b'{"text": "a', "line 2 is not JSON: Unterminated string"),
    ],
)
def test_a_bad_line_is_a_bad_row_between_good_ones(tmp_path, line, problem):
    (tmp_path / "a.jsonl").write_bytes(b'{"n": 1}\n' + line + b'\n{"n": 3}\n')
    before, found, after = problems_of(tmp_path / "a.jsonl")
    assert before is None
    assert after is None
    assert problem in found


@pytest.mark.parametrize(
    ("line", "record"),
    [
        (b'{"text": "\\ud83d\\ude00"}', {"text": "\U0001f600"}),
        (b'{"text": "\\\\ud83d"}', {"text": "\\ud83d"}),
        (b'{"text": "a\\u0000b"}', {"text": "a\0b"}),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        (b'{"a": Infinity, "b": -Infinity}', {"a": float("inf"), "b": float("-inf")}),
        (b' {"a": 1} \t', {"a": 1}),
        (b"{}", {}),
    ],
)
def test_what_json_allows_or_python_writes_is_data(tmp_path, line, record):
    (tmp_path / "a.jsonl").write_bytes(line + b"\n")
    assert records_of(tmp_path / "a.jsonl") == [record]


def test_nan_is_a_number(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"a": NaN}\n')
    (record,) = records_of(tmp_path / "a.jsonl")
    assert record["a"] != record["a"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"one\n\ntwo\n\xff\n\nthree", "a.txt line 3 is not UTF-8 text: byte 5 is 0xff"),
        (b"one\n\n\0\n\nthree", "a.txt line 3 holds a NUL byte"),
    ],
)
def test_a_bad_paragraph_is_a_bad_row_between_good_ones(tmp_path, text, problem):
    (tmp_path / "a.txt").write_bytes(text)
    before, found, after = problems_of(tmp_path / "a.txt")
    assert before is None
    assert after is None
    assert problem in found


def test_utf_16_text_is_refused_whatever_its_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\n".encode("utf-16"))
    assert "is not UTF-8 text" in message_of(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes("one\n".encode("utf-16-le"))
    assert "NUL byte, as UTF-16 text" in message_of(tmp_path / "a.txt")


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf\n"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_blank_file_holds_no_records(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    assert rows_of(tmp_path / name) == []


def test_a_line_of_many_megabytes_takes_a_few_times_its_length(tmp_path):
    path = tmp_path / "a.jsonl"
    length = 16 * 2**20
    path.write_bytes(b'{"text": "' + b"x" * length + b'"}\n{"text": "short"}\n')
    tracemalloc.start()
    try:
        records = records_of(path, max_records=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [len(record["text"]) for record in records] == [length, 5]
    assert peak < 5 * length


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"a": 1}\n{"text": "' + b"x" * 100 + b'"}\n'),
        ("a.txt", b"one\n" + b"x" * 60 + b"\n" + b"y" * 60 + b"\n"),
    ],
)
def test_a_record_beyond_the_limit_is_refused_before_it_is_held(
    tmp_path, monkeypatch, name, content
):
    monkeypatch.setattr(lines, "MAX_RECORD_BYTES", 100)
    (tmp_path / name).write_bytes(content)
    assert "starts a record of more than 100 bytes" in message_of(tmp_path / name, text_unit="file")
