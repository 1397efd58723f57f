"""Files are found by name, glob, directory, list and URI; what their names say is believed."""

from pathlib import Path

import pytest

from fakes.corpora import write_jsonl
from fakes.source_files import message_of, records_of
from pliant.data.sources import find_files
from pliant.errors import DataError

RECORDS = [{"text": f"record {i}"} for i in range(3)]


def found(source, format="auto"):
    return find_files(source, "data.train", format, Path("unused"))


def names(source, format="auto"):
    return [file.name for file in found(source, format)]


@pytest.fixture
def folder(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "deep/c.txt", ".hidden/d.jsonl", "notes.pdf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_files_are_found_by_name_glob_directory_and_list(folder):
    assert names(str(folder)) == ["a.jsonl", "b.jsonl", "deep/c.txt"]
    assert names(str(folder), format="text") == ["deep/c.txt"]
    assert names(str(folder / "*.jsonl")) == ["a.jsonl", "b.jsonl"]
    assert names(str(folder / "**" / "*.txt")) == ["deep/c.txt"]
    assert names([str(folder / "b.jsonl"), str(folder / "*.jsonl")])[0] == "b.jsonl"
    assert names(f"file://{folder}/a.jsonl") == ["a.jsonl"]


def test_a_file_counts_once_whoever_names_it(folder):
    files = found([str(folder / "a.jsonl"), str(folder / "**" / "**" / "[ab].jsonl")])
    assert [(file.name, file.origin) for file in files] == [("a.jsonl", 0), ("b.jsonl", 1)]
    assert files[0].size_bytes == 2


@pytest.mark.parametrize(
    ("name", "format", "compression"),
    [
        ("a.jsonl", "jsonl", None),
        ("a.NDJSON", "jsonl", None),
        ("a.v2.jsonl.gz", "jsonl", "gzip"),
        ("a.json.zst", "json", "zstd"),
        ("a.parquet.zst", "parquet", "zstd"),
        ("a.feather", "arrow", None),
        ("a.arrow", "arrow", None),
        ("a.csv.GZ", "csv", "gzip"),
        ("a.tsv", "tsv", None),
        ("a.md.gz", "text", "gzip"),
        ("a.tfrecords", "tfrecord", None),
        ("a.h5", "hdf5", None),
        ("a.hdf5.zstd", "hdf5", "zstd"),
    ],
)
def test_endings_say_the_format_and_the_compression(tmp_path, name, format, compression):
    (tmp_path / name).write_bytes(b"")
    for source in (tmp_path / name, tmp_path, tmp_path / "*"):
        (file,) = found(str(source))
        assert (file.format, file.place.compression) == (format, compression)


def test_an_unknown_ending_asks_for_a_format(tmp_path):
    path = write_jsonl(tmp_path / "a.data", RECORDS)
    assert "Set data.format to one of jsonl, json, parquet" in message_of(path)
    assert records_of(path, format="jsonl") == RECORDS
    (tmp_path / "gz").write_bytes(b"")
    assert "has no known ending" in message_of(tmp_path / "gz")


def test_a_format_that_is_set_counts_more_than_the_ending(tmp_path):
    path = write_jsonl(tmp_path / "a.json", RECORDS)
    assert records_of(path, format="jsonl") == RECORDS


def test_files_that_describe_a_data_set_are_no_data_unless_they_are_named(tmp_path):
    for name in ("README.md", "dataset_info.json", "sub/state.json", "sub/a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("# About")
    assert names(str(tmp_path)) == ["sub/a.jsonl"]
    assert names(str(tmp_path / "README.md")) == ["README.md"]
    assert names(str(tmp_path / "*.md")) == ["README.md"]


@pytest.mark.parametrize("name", ["MD5SUMS", "checksums.txt", "a.jsonl.sha256", "sha256sum.txt"])
def test_checksum_files_are_never_data(folder, name):
    (folder / name).write_text("0" * 32 + "  other")
    assert names(str(folder)) == ["a.jsonl", "b.jsonl", "deep/c.txt"]
    assert name not in names(str(folder / "*"), format="text")
    assert "is named like a checksum file, which is never data" in message_of(folder / name)
    with pytest.raises(DataError, match="No file matches"):
        found(str(folder / name[:-1]) + "?")


def test_a_name_with_wildcards_in_it_is_a_name_first(tmp_path):
    write_jsonl(tmp_path / "a[1].jsonl", RECORDS)
    write_jsonl(tmp_path / "a1.jsonl", RECORDS)
    assert names(str(tmp_path / "a[1].jsonl")) == ["a[1].jsonl"]


def test_what_is_missing_is_named_with_the_key_that_asked(tmp_path):
    assert "There is no file" in message_of(tmp_path / "none.jsonl")
    assert "data.train" in message_of(tmp_path / "none.jsonl")
    assert "No file matches" in message_of(tmp_path / "*.jsonl")
    (tmp_path / "empty").mkdir()
    assert "holds no data file" in message_of(tmp_path / "empty")
    with pytest.raises(DataError, match=r"data\.train is an empty list"):
        found([])
