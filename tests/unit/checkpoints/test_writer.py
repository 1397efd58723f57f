"""A rank's file is copied into a checkpoint whole, or not at all where there is no room."""

import shutil
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from fakes.checkpoints import cut, put_fragments, whole_tensors
from pliant.checkpoints.manifest import Chunk
from pliant.checkpoints.writer import age, directory_name, store_rank_file
from pliant.errors import NoSpace
from pliant.storage.local import LocalStorage, file_digest

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def local(tmp_path):
    path = tmp_path / "slot.safetensors"
    save_file({"fp32/weight:0": torch.arange(1000.0)}, path)
    return path


CHUNKS = (Chunk("fp32/weight", 0, 1000),)


def test_a_rank_file_is_copied_and_described(tmp_path, local):
    storage = LocalStorage(tmp_path / "checkpoints")
    file = store_rank_file(storage, "new", 1, local, CHUNKS)
    path = tmp_path / "checkpoints" / "new" / "rank-00001.safetensors"
    assert (file.file, file.chunks) == (path.name, CHUNKS)
    assert (file.size_bytes, file.sha256) == (path.stat().st_size, file_digest(local))
    assert path.read_bytes() == local.read_bytes()


def test_what_is_saved_does_not_change_with_the_live_state(tmp_path):
    tensors = whole_tensors()
    file = put_fragments(LocalStorage(tmp_path), "new", 0, cut(tensors, 1)[0])
    before = tensors["fp32/bias"].clone()
    tensors["fp32/bias"].zero_()
    assert torch.equal(load_file(tmp_path / "new" / file.file)["fp32/bias:0"], before)


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path, local, monkeypatch):
    needed = local.stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, needed))
    with pytest.raises(NoSpace, match="Free some space, or keep it elsewhere") as caught:
        store_rank_file(LocalStorage(tmp_path / "checkpoints"), "new", 0, local, CHUNKS)
    assert not (tmp_path / "checkpoints").exists()
    assert (caught.value.free_bytes, caught.value.needed_bytes) == (needed, needed)


def test_attempts_at_a_step_do_not_share_a_directory():
    names = {
        directory_name(step, attempt, ranks): (attempt, step)
        for step in (3, 30, 10**9)
        for attempt in (1, 2)
        for ranks in (2, 3)
    }
    assert len(names) == 12
    assert {name: age(name) for name in names} == names
