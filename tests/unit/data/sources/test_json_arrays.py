"""A .json file is one array of records, of which a chunk reads its part."""

import json

import pytest

from fakes.source_files import message_of, problems_of, records_of, rows_of


@pytest.mark.parametrize("max_records", [1, 2, 100])
@pytest.mark.parametrize("indent", [None, 2])
def test_elements_may_hold_whatever_arrays_are_built_of(tmp_path, indent, max_records):
    records = [{"a": '], {"'}, {"b": [[1, 2], {}]}, {"c": "naïve 日本\u2028"}, {}]
    path = tmp_path / "a.json"
    text = json.dumps(records, indent=indent, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf \r\n" + text.encode() + b"\r\n")
    assert records_of(path, max_records=max_records) == records


def test_a_bad_element_is_a_bad_row_between_good_ones(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"a": 1}, {"b": "\xff"}, "y", {"c": "\\ud800"}, {"d": 1}]')
    first, bad_text, no_object, half, last = problems_of(path)
    assert (first, last) == (None, None)
    assert "a.json record 2 is not UTF-8 text" in bad_text
    assert "a.json record 3 is a string" in no_object
    assert "a.json record 4 holds half of a surrogate pair" in half
    assert rows_of(path)[0][1].raw == b'{"b": "\xff"}'


@pytest.mark.parametrize("content", [b"[]", b" [ ] \n"])
def test_an_empty_array_holds_no_records(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    assert rows_of(tmp_path / "a.json") == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"version": 2, "data": [{"a": 1}]}', "holds an object with a list below 'data', and an"),
        (b'{"text": "x"}', "holds an object, and an array of objects was needed"),
        (b"3", "holds a number"),
        (b"", "line 1 is not JSON: Expecting value"),
        (b'{"a": 1}\n{"a": 2}\n', "line 2 is not JSON: Extra data"),
        (b'[{"text": "x"}\n', "line 2 is not JSON: Expecting ',' or ']'"),
        (b'[{"text": "x"} {"text": "y"}]', "line 1 is not JSON: Expecting ',' or ']' at column 16"),
        (b'[{"a": 1},]', "line 1 is not JSON"),
        (b'[{"a": 1}] x', "line 1 is not JSON: Extra data at column 12"),
        (b'[\n{"a": 1},\n{"a": "cut o', "line 3 is not JSON: Unterminated string"),
        (b"[" * 100_000, "is not JSON: nested too deeply"),
    ],
)
def test_what_is_no_array_is_refused_with_what_it_is(tmp_path, content, problem):
    (tmp_path / "a.json").write_bytes(content)
    message = message_of(tmp_path / "a.json")
    assert problem in message
    assert "set data.format to jsonl" in message
