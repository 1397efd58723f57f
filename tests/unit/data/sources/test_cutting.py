"""Every format, compressed or not, is cut into chunks that hold every record once and in order."""

import json
import pickle
import tracemalloc
from itertools import chain

import pytest

from fakes.corpora import real, write_jsonl
from fakes.source_files import ENDINGS, compressed, message_of, records_of, rows_of, written
from pliant.data.sources import Chunk, Place, cut, find_files, read_chunk
from pliant.errors import DataError

TEXTS = [{"text": f"record {i}", "n": i} for i in range(10)]
SAME = {".csv": str, ".tsv": str, ".tfrecord": lambda n: [n]}
"""What the formats that have no single numbers make of one."""


def as_read(ending):
    number = SAME.get(ending, int)
    return [{"text": record["text"], "n": number(record["n"])} for record in TEXTS]


@pytest.mark.parametrize("max_records", [1, 3, 5, 10, 11])
@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_chunks_hold_every_record_once_and_in_order(tmp_path, ending, compression, max_records):
    path = written(tmp_path / f"data{ending}{compression}", TEXTS)
    chunks = rows_of(path, max_records=max_records)
    assert [row.record for row in chain(*chunks)] == as_read(ending)
    assert [len(chunk) for chunk in chunks[:-1]] == [max_records] * (len(chunks) - 1)
    header = ending in (".csv", ".tsv")
    for i, row in enumerate(chain(*chunks), 2 if header else 1):
        assert row.where.startswith(str(path))
        assert row.where.endswith(f" {i}")


def test_a_chunk_says_where_its_records_lie(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:3])
    files = find_files(str(path), "data.train", "auto", tmp_path)
    line = len(path.read_bytes().splitlines(keepends=True)[0])
    chunks = cut(files, "line", 2)
    place = Place(str(path))
    assert chunks == [
        Chunk(place, "jsonl", "line", 0, 2 * line, 1, 2),
        Chunk(place, "jsonl", "line", 2 * line, 3 * line, 3, 1),
    ]
    assert pickle.loads(pickle.dumps(chunks)) == chunks


def test_a_bad_row_is_counted_and_the_rows_after_it_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": \n[3]\n{"n": 4}\n')
    (rows,) = rows_of(path)
    assert [row.record for row in rows] == [{"n": 1}, None, None, {"n": 4}]
    assert [row.raw for row in rows] == [b'{"n": 1}', b'{"n": ', b"[3]", b'{"n": 4}']
    assert [row.quarantined() for row in rows] == [row.raw for row in rows]
    assert "line 2 is not JSON: Expecting value" in str(rows[1].problem)
    with pytest.raises(DataError, match="line 3 is an array"):
        rows[2].record_or_raise()
    assert len(rows_of(path, max_records=1)) == 4


def test_what_is_kept_of_a_row_without_bytes_is_its_values(tmp_path):
    path = written(tmp_path / "a.parquet", TEXTS)
    row = rows_of(path)[0][1]
    assert row.raw == b""
    assert json.loads(row.quarantined()) == TEXTS[1]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_chunk_of_a_compressed_file_needs_no_memory_for_what_lies_before_it(tmp_path, ending):
    line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(compressed(line * 20_000, ending))
    files = find_files(str(path), "data.train", "auto", tmp_path)
    last = cut(files, "line", 6_000)[-1]
    assert (last.begin, last.first, last.count) == (18_000 * len(line), 18_001, 2_000)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_chunk(last)) == 2_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5 * 2**20 < 18_000 * len(line)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".tfrecord", ".parquet", ".arrow"])
def test_a_broken_compressed_file_is_an_error_and_no_short_file(tmp_path, ending, kind):
    path = written(tmp_path / f"a{kind}{ending}", TEXTS)
    whole = path.read_bytes()
    for broken in (whole[:-1], whole[: len(whole) // 2], b"not compressed"):
        path.write_bytes(broken)
        assert str(path) in message_of(path)


def test_the_error_of_a_broken_compressed_file_says_what_to_do(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b"not compressed")
    assert message_of(path).endswith(
        "a.jsonl.gz cannot be decompressed: zlib inflate failed: incorrect header check. Fetch or "
        "write it again, or rename it if it is not gzip."
    )


def test_files_that_were_compressed_in_parts_are_read_whole(tmp_path):
    for ending in (".gz", ".zst"):
        path = tmp_path / f"a.jsonl{ending}"
        path.write_bytes(compressed(b'{"n": 1}\n', ending) + compressed(b'{"n": 2}\n', ending))
        assert records_of(path) == [{"n": 1}, {"n": 2}]


def test_a_file_gone_since_it_was_cut_is_named():
    for format in ("jsonl", "json", "csv", "parquet", "arrow", "tfrecord", "text"):
        chunk = Chunk(Place("gone"), format, "line", 0, 10, 1, 1)
        with pytest.raises(DataError, match="gone cannot be read: No such file"):
            list(read_chunk(chunk))


REAL = {
    "gsm8k_train.jsonl": 7473,
    "lf_alpaca_en_demo.json": 999,
    "lf_alpaca_zh_demo.json": 1000,
    "lf_c4_demo.jsonl": 300,
    "lf_glaive_toolcall_en_demo.json": 300,
    "lf_identity.json": 91,
}


@pytest.mark.parametrize("name", REAL)
def test_real_files_are_read_as_python_reads_them(name, tmp_path):
    text = real(name).read_text(encoding="utf-8")
    if name.endswith(".json"):
        expected = json.loads(text)
    else:
        expected = [json.loads(line) for line in text.split("\n") if line]
    assert len(expected) == REAL[name]
    assert records_of(real(name), max_records=777) == expected
    for ending in (".jsonl.zst", ".json.gz", ".parquet"):
        assert records_of(written(tmp_path / f"a{ending}", expected), max_records=2500) == expected


def test_a_real_text_is_read_line_by_line():
    path = real("lf_wiki_demo.txt")
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    texts = [record["text"] for record in records_of(path, text_unit="line", max_records=7)]
    assert texts == lines
