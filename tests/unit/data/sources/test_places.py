"""Remote file systems are searched and read like the disk."""

import errno
import io
import pickle

import fsspec
import pytest

from fakes.source_files import ENDINGS, message_of, records_of, written
from pliant.data.sources import Chunk, checksum, find_files, places, read_chunk
from pliant.data.sources.places import Place
from pliant.errors import DataError, NoSpace, UserError

RECORDS = [{"text": f"record {i}"} for i in range(10)]


@pytest.fixture
def bucket(tmp_path):
    """`memory://bucket`, with files of each format below data/."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for ending in (*ENDINGS, ".jsonl.gz", ".parquet.zst"):
        if ending != ".hdf5":
            path = written(tmp_path / f"a{ending}", RECORDS)
            memory.pipe_file(f"/bucket/data/{path.name}", path.read_bytes())
    memory.pipe_file("/bucket/data/deep/b 1.jsonl", b'{"text": "deep"}\n')
    memory.pipe_file("/bucket/data/.hidden/c.jsonl", b'{"text": "hidden"}\n')
    yield memory
    memory.store.clear()


def names(source, format="auto"):
    return [file.name for file in find_files(source, "data.train", format, None)]


@pytest.mark.parametrize("max_records", [3, 100])
def test_every_format_is_read_from_a_uri(bucket, max_records):
    for path in bucket.ls("/bucket/data", detail=False):
        if "/a." in path:
            assert records_of(f"memory:/{path}", max_records=max_records) == RECORDS, path


def test_uris_may_be_directories_and_globs(bucket):
    assert names("memory://bucket/data", "jsonl") == ["a.jsonl", "a.jsonl.gz", "deep/b 1.jsonl"]
    assert names("memory://bucket/data/", "csv") == ["a.csv"]
    assert names("memory://bucket/data/*.jsonl*") == ["a.jsonl", "a.jsonl.gz"]
    assert names("memory://bucket/data/a.?sv") == ["a.csv", "a.tsv"]
    assert names("memory://bucket/**/*.jsonl") == ["data/a.jsonl", "data/deep/b 1.jsonl"]
    assert names("memory://bucket/*/*/*.jsonl") == ["data/deep/b 1.jsonl"]
    assert records_of("memory://bucket/data/deep/b 1.jsonl") == [{"text": "deep"}]


def test_a_remote_file_is_shown_by_its_uri(bucket):
    (file,) = find_files("memory://bucket/data/a.csv", "data.train", "auto", None)
    assert str(file.place) == "memory://bucket/data/a.csv"
    assert str(Place("/data/a.csv")) == "/data/a.csv"
    assert str(Place("bucket/a.csv", "s3://bucket?region=x")) == "s3://bucket/a.csv"
    assert pickle.loads(pickle.dumps(file)) == file


def test_what_is_not_there_is_named(bucket):
    assert "There is no file memory://bucket/none.jsonl" in message_of("memory://bucket/none.jsonl")
    assert "No file matches memory://bucket/*.jsonl" in message_of("memory://bucket/*.jsonl")
    with pytest.raises(UserError, match=r"nonsense://a names a file system that cannot be opened"):
        find_files("nonsense://a", "data.train", "auto", None)


def test_remote_checksums_are_honoured(bucket):
    bucket.pipe_file("/bucket/data/SHA256SUMS", b"0" * 64 + b"  a.csv\n")
    files = find_files("memory://bucket/data/a.tsv", "data.train", "auto", None)
    assert checksum(files)[0][0] == "a.tsv"
    files = find_files("memory://bucket/data/a.csv", "data.train", "auto", None)
    with pytest.raises(DataError, match="memory://bucket/data/SHA256SUMS states 0000"):
        checksum(files)


def test_a_disk_that_is_full_of_what_is_decompressed_is_told(tmp_path, monkeypatch):
    class Full(io.BytesIO):
        def write(self, content):
            raise OSError(errno.ENOSPC, "No space left on device")

    path = written(tmp_path / "a.parquet.gz", RECORDS)
    monkeypatch.setattr(places.tempfile, "TemporaryFile", Full)
    with pytest.raises(NoSpace, match=r"a\.parquet\.gz must be decompressed to .* disk is full"):
        records_of(path)


def test_what_the_system_refuses_is_told_in_its_words(tmp_path):
    chunk = Chunk(Place(str(tmp_path), compression="gzip"), "jsonl", "line", 0, 1, 1, 1)
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        list(read_chunk(chunk))
