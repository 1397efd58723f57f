"""A manifest is read back as it was written, and any change to it is noticed."""

import json
import os
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.checkpoints import a_manifest
from pliant.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    Chunk,
    LedgerFile,
    Manifest,
    RankFile,
    _digest,
)
from pliant.errors import FilesDamaged
from pliant.files import write_atomically
from pliant.storage.opening import open_storage


@pytest.fixture
def manifest():
    chunks = (Chunk("fp32/weight", 0, 30), Chunk("buffer/steps", 0, 1))
    return a_manifest(
        files=(RankFile("rank-00000.safetensors", 1234, "ab" * 32, chunks),),
        ledger=(LedgerFile("step.parquet", 99, "cd" * 32, 0, 4),),
    )


def test_what_was_written_is_read(tmp_path, manifest):
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ('"step": 1', '"step": 2'),
        ('"start": 0', '"start": 1'),
        ('"data": "key"', '"data": "kex"'),
        ('"ledger": [', '"more": 1, "ledger": ['),
        ('"attempt": 1,', ""),
    ],
)
def test_an_altered_manifest_is_damaged(tmp_path, manifest, was, becomes):
    manifest.write(tmp_path)
    text = (tmp_path / MANIFEST).read_text()
    assert was in text
    (tmp_path / MANIFEST).write_text(text.replace(was, becomes))
    with pytest.raises(FilesDamaged, match="was altered") as caught:
        Manifest.read(tmp_path)
    assert caught.value.path == str(tmp_path / MANIFEST)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"{}", b"[]", b'["sha256"]', b"null", b"7", b'"sha256"', b"\xff\xfe", b"\0" * 99],
)
def test_what_is_no_manifest_is_damaged(tmp_path, content):
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(FilesDamaged, match="cannot be read"):
        Manifest.read(tmp_path)


def test_a_missing_manifest_is_damaged(tmp_path):
    with pytest.raises(FilesDamaged, match="cannot be read"):
        Manifest.read(tmp_path)


@settings(deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_goes_unnoticed(tmp_path_factory, place, bit):
    folder = tmp_path_factory.mktemp("flipped")
    a_manifest().write(folder)
    content = bytearray((folder / MANIFEST).read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    (folder / MANIFEST).write_bytes(content)
    try:
        found = Manifest.read(folder)
    except FilesDamaged:
        return
    assert found == a_manifest(), "only white space may change"


def test_a_manifest_from_before_there_were_metrics_is_read(tmp_path, manifest):
    """Its digest was taken of what it held then."""
    body = {k: v for k, v in asdict(manifest).items() if k not in ("metrics", "digests")}
    write_atomically(tmp_path / MANIFEST, json.dumps({**body, "sha256": _digest(body)}).encode())
    found = Manifest.read(tmp_path)
    assert found == manifest
    assert (found.metrics, found.digests) == ({}, {})


def test_a_later_format_is_refused(tmp_path, manifest):
    a_manifest(format=FORMAT + 1).write(tmp_path)
    with pytest.raises(FilesDamaged, match=f"has the format {FORMAT + 1}"):
        Manifest.read(tmp_path)


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / MANIFEST
    path.write_bytes(b"before")

    def power_cut(descriptor):
        raise OSError("power cut")

    monkeypatch.setattr(os, "fsync", power_cut)
    with pytest.raises(OSError, match="power cut"):
        write_atomically(path, b"after")
    assert path.read_bytes() == b"before"


def test_a_committed_checkpoint_outlives_a_power_cut(tmp_path, manifest, monkeypatch):
    """The manifest, its entry in its directory and the directory's own entry are synced."""
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(os.path.realpath(f"/proc/self/fd/{fd}"))
    )
    directory = tmp_path / "step"
    manifest.write(open_storage(tmp_path), "step")
    assert str(directory) in synced
    assert synced[-1] == str(tmp_path)
    assert json.loads((directory / MANIFEST).read_text())["format"] == FORMAT
