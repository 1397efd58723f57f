"""Digests follow content, and those that come with data are held against it."""

import hashlib
import logging
from pathlib import Path

import pytest

from fakes.corpora import write_jsonl
from pliant.data.sources import checksum, digests, find_files, sha256_of
from pliant.errors import DataError

RECORDS = [{"text": f"record {i}"} for i in range(3)]


def checked(source):
    return checksum(find_files(str(source), "data.train", "auto", Path("unused")))


@pytest.fixture
def data(tmp_path):
    (tmp_path / "sub").mkdir()
    write_jsonl(tmp_path / "a.jsonl", RECORDS)
    write_jsonl(tmp_path / "sub" / "b c.jsonl", RECORDS[1:])
    return tmp_path


def digest(path, algorithm="sha256"):
    return hashlib.new(algorithm, path.read_bytes()).hexdigest()


def test_checksums_follow_content_and_not_the_place(tmp_path):
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        write_jsonl(tmp_path / place / "a.jsonl", RECORDS)
    sums = [checked(tmp_path / place) for place in ("here", "there")]
    assert sums[0] == sums[1] == [("a.jsonl", sha256_of(tmp_path / "here" / "a.jsonl"))]
    assert sums[0][0][1] == digest(tmp_path / "here" / "a.jsonl")
    write_jsonl(tmp_path / "there" / "a.jsonl", RECORDS[1:])
    assert checked(tmp_path / "there") != sums[0]


FORMS = [
    ("MD5SUMS", "md5", "{digest}  {name}\n"),
    ("SHA256SUMS", "sha256", "# made today\n\n{digest} *{name}\r\n"),
    ("md5sum.txt", "md5", "{digest}  ./{name}\n"),
    ("checksums.txt", "sha1", "{upper}\t{name}\n"),
    ("all.sha512", "sha512", "{digest}  {name}"),
    ("CHECKSUMS", "sha256", "SHA256 ({name}) = {digest}\n"),
    ("sha256sums", "sha256", "\ufeff{digest}  other\n{digest}  {name}\n"),
]


@pytest.mark.parametrize(("file", "algorithm", "form"), FORMS)
@pytest.mark.parametrize("name", ["a.jsonl", "sub/b c.jsonl"])
def test_digests_that_come_with_data_are_honoured(data, file, algorithm, form, name):
    right = digest(data / name, algorithm)
    wrong = "0" * len(right)

    def state(value):
        text = form.format(digest=value, upper=value.upper(), name=name)
        (data / file).write_bytes(text.encode())

    state(right)
    assert [stated for stated, _ in checked(data)] == ["a.jsonl", "sub/b c.jsonl"]
    state(wrong)
    with pytest.raises(DataError) as caught:
        checked(data)
    assert str(caught.value) == (
        f"{data / name} has the {algorithm.upper()} digest {right}, and {data / file} states "
        f"{wrong}. Fetch the file again, or correct {data / file}."
    )
    assert (caught.value.found, caught.value.stated) == (right, wrong)


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
@pytest.mark.parametrize("form", ["{}", "{}  a.jsonl\n"])
def test_a_checksum_file_may_be_named_for_one_file(data, algorithm, form):
    path = data / f"a.jsonl.{algorithm}"
    path.write_text(form.format(digest(data / "a.jsonl", algorithm)))
    checked(data / "a.jsonl")
    path.write_text(form.format("f" * len(digest(data / "a.jsonl", algorithm))))
    with pytest.raises(DataError, match=r"a\.jsonl has the"):
        checked(data / "a.jsonl")


def test_names_that_md5sum_escapes_are_understood(tmp_path):
    path = write_jsonl(tmp_path / "a\\b.jsonl", RECORDS)
    (tmp_path / "MD5SUMS").write_text("\\" + digest(path, "md5") + "  a\\\\b.jsonl\n")
    checked(path)
    (tmp_path / "MD5SUMS").write_text("\\" + "0" * 32 + "  a\\\\b.jsonl\n")
    with pytest.raises(DataError, match="MD5 digest"):
        checked(path)


def test_files_that_no_checksum_names_are_fine(data):
    (data / "SHA256SUMS").write_text("0" * 64 + "  gone.jsonl\n")
    (data / "sub" / "MD5SUMS").write_text("0" * 32 + "  a.jsonl\n")
    assert len(checked(data)) == 2


def test_lines_that_are_no_checksums_are_told_and_not_looked_at(data, caplog):
    (data / "checksums.txt").write_text(
        f"{'0' * 8}  a.jsonl\nSHA3-256 (a.jsonl) = {'0' * 64}\nhi\n"
    )
    with caplog.at_level(logging.WARNING):
        checked(data / "a.jsonl")
    assert len(caplog.messages) == 3
    assert all("no checksum of a file" in message for message in caplog.messages)


def test_each_file_is_read_once_for_all_its_digests(data, monkeypatch):
    (data / "MD5SUMS").write_text(digest(data / "a.jsonl", "md5") + "  a.jsonl\n")
    (data / "SHA256SUMS").write_text(digest(data / "a.jsonl") + "  a.jsonl\n")
    read = []
    stored = digests.stored
    monkeypatch.setattr(digests, "stored", lambda place: read.append(place.path) or stored(place))
    path = str(data / "a.jsonl")
    checksum(find_files([path, path], "data.train", "auto", data))
    assert read == [path]


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(DataError, match="gone cannot be read: No such file"):
        sha256_of(tmp_path / "gone")
