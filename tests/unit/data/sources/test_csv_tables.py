"""Tables of text: the first row names the columns, and a bad row costs itself alone."""

import csv

import pytest

from fakes.source_files import message_of, problems_of, records_of, rows_of
from pliant.data.sources import csv_tables


@pytest.mark.parametrize("max_records", [1, 2, 100])
def test_quoted_fields_hold_separators_newlines_and_quotes(tmp_path, max_records):
    path = tmp_path / "a.csv"
    path.write_bytes(
        b'\xef\xbb\xbfprompt,answer\r\n"one\n\r\ntwo","a,b"\r\n\r\n"say ""hi""",007\r\n'
        b",\xe2\x80\xa8\n  spaced ,last"
    )
    chunks = rows_of(path, max_records=max_records)
    rows = [row for chunk in chunks for row in chunk]
    assert [row.record for row in rows] == [
        {"prompt": "one\n\r\ntwo", "answer": "a,b"},
        {"prompt": 'say "hi"', "answer": "007"},
        {"prompt": "", "answer": "\u2028"},
        {"prompt": "  spaced ", "answer": "last"},
    ]
    assert [row.where.split()[-1] for row in rows] == ["2", "6", "7", "8"]
    assert rows[0].raw == b'"one\n\r\ntwo","a,b"'


def test_tabs_part_the_fields_of_a_tsv_file(tmp_path):
    (tmp_path / "a.tsv").write_bytes(b'a\tb\n1,5\t"x\ty"\n')
    assert records_of(tmp_path / "a.tsv") == [{"a": "1,5", "b": "x\ty"}]
    (tmp_path / "a.data").write_bytes(b"a\tb\n1\t2\n")
    assert records_of(tmp_path / "a.data", format="tsv") == [{"a": "1", "b": "2"}]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (b"only", "line 3 has 1 field(s), and the first row names 2 columns (a, b)"),
        (b"1,2,3", "line 3 has 3 field(s)"),
        (b'"bad"q,3', "line 3 is no row of a table: ',' expected after '\"'"),
        (b"x\ry,3", "line 3 is no row of a table: new-line character seen in unquoted field"),
        (b"\xff,3", "line 3 is not UTF-8 text: byte 1 is 0xff"),
        (b"\0,3", "line 3 holds a NUL byte"),
    ],
)
@pytest.mark.parametrize("max_records", [1, 100])
def test_a_bad_row_lies_between_good_ones(tmp_path, row, problem, max_records):
    (tmp_path / "a.csv").write_bytes(b"a,b\n1,1\n" + row + b"\n2,2\n")
    before, found, after = problems_of(tmp_path / "a.csv", max_records=max_records)
    assert before is None
    assert after is None
    assert problem in found


def test_a_quote_that_is_never_closed_takes_the_rest_as_one_bad_row(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'a,b\n1,1\n"open,2\n3,3\n')
    (good, bad) = rows_of(tmp_path / "a.csv")[0]
    assert good.record == {"a": "1", "b": "1"}
    assert bad.raw == b'"open,2\n3,3'
    assert "line 3 is no row of a table: unexpected end of data" in str(bad.problem)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a,a\n1,2\n", "line 1 must name the columns, and names one twice: a, a"),
        (b'"a"x,b\n1,2\n', "line 1 is no row of a table"),
        (b"\xff,b\n1,2\n", "line 1 is not UTF-8"),
    ],
)
def test_a_bad_first_row_spoils_the_file(tmp_path, content, problem):
    (tmp_path / "a.csv").write_bytes(content)
    assert problem in message_of(tmp_path / "a.csv")


@pytest.mark.parametrize("content", [b"", b"\n", b"a,b\n", b"a,b\r\n\r\n"])
def test_a_table_without_rows_holds_no_records(tmp_path, content):
    (tmp_path / "a.csv").write_bytes(content)
    assert rows_of(tmp_path / "a.csv") == []


def test_long_fields_are_read_and_the_limit_of_the_process_stays(tmp_path, monkeypatch):
    limit = csv.field_size_limit()
    path = tmp_path / "a.csv"
    path.write_bytes(b"a\n" + b"x" * (limit + 1) + b"\n")
    assert [len(record["a"]) for record in records_of(path)] == [limit + 1]
    monkeypatch.setattr(csv_tables, "MAX_RECORD_BYTES", 100)
    assert "field larger than field limit (100)" in problems_of(path)[0]
    assert csv.field_size_limit() == limit
