"""Each rank saves what it owns, or nothing at all where there is no room."""

import resource
import shutil
from collections import namedtuple
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fakes.checkpoints import cut, whole_tensors
from pliant.checkpoints import writer
from pliant.checkpoints.fragments import Fragment
from pliant.checkpoints.manifest import file_digest
from pliant.checkpoints.writer import attempt_directory, write_rank_file
from pliant.errors import NoSpace

Usage = namedtuple("Usage", "total used free")


def test_a_rank_file_holds_the_fragments_and_is_described(tmp_path):
    (_, mine) = cut(whole_tensors(), 2)
    file = write_rank_file(tmp_path / "new", 1, mine)
    path = tmp_path / "new" / file.file
    assert (file.size_bytes, file.sha256) == (path.stat().st_size, file_digest(path))
    saved = load_file(path)
    assert saved.keys() == {chunk.entry for chunk in file.chunks}
    for fragment, chunk in zip(mine, file.chunks, strict=True):
        assert (chunk.key, chunk.start, chunk.length) == (
            fragment.key,
            fragment.start,
            len(fragment.tensor),
        )
        assert torch.equal(saved[chunk.entry], fragment.tensor)


def test_only_what_a_rank_owns_is_saved(tmp_path):
    first, second = cut(whole_tensors(), 1)[0][:2]
    file = write_rank_file(tmp_path, 0, [first, replace(second, is_owner=False)])
    assert [chunk.key for chunk in file.chunks] == [first.key]


def test_a_rank_without_anything_writes_a_file_all_the_same(tmp_path):
    empty = Fragment("fp32", "weight", 60, 60, torch.empty(0))
    file = write_rank_file(tmp_path, 0, [empty])
    assert file.chunks == ()
    assert (tmp_path / file.file).is_file()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([True, False]),
        torch.tensor([1, -(2**62)]),
        torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        torch.tensor([1.5, torch.inf], dtype=torch.float64),
        torch.arange(10.0)[::2],
    ],
)
def test_tensors_of_any_type_are_saved_to_the_bit(tmp_path, tensor):
    file = write_rank_file(tmp_path, 0, [Fragment("buffer", "b", 0, len(tensor), tensor)])
    assert torch.equal(load_file(tmp_path / file.file)["buffer/b:0"], tensor)


def test_what_is_saved_does_not_change_with_the_live_state(tmp_path):
    tensors = whole_tensors()
    file = write_rank_file(tmp_path, 0, cut(tensors, 1)[0])
    before = tensors["fp32/bias"].clone()
    tensors["fp32/bias"].zero_()
    assert torch.equal(load_file(tmp_path / file.file)["fp32/bias:0"], before)


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    fragments = cut(whole_tensors(), 1)[0]
    needed = 4 * sum(len(fragment.tensor) for fragment in fragments)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, needed))
    with pytest.raises(NoSpace, match="Free some space or move --runs-dir") as caught:
        write_rank_file(tmp_path, 0, fragments)
    assert list(tmp_path.iterdir()) == []
    assert (caught.value.free_bytes, caught.value.needed_bytes) == (needed, needed)


@contextmanager
def small_files():
    """The system refuses to write files of more than 100 bytes; pytest's own among them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_the_disk_refuses_is_an_os_error(tmp_path):
    """Of safetensors' own error the other ranks would not be told: they would wait for ever."""
    fragments = cut(whole_tensors(), 1)[0]
    expected = pytest.raises(OSError, match=r"rank-00000\.safetensors could not be written")
    with expected, small_files():
        write_rank_file(tmp_path, 0, fragments)


def test_a_disk_that_fills_up_while_writing_has_no_space(tmp_path, monkeypatch):
    def full(tensors, path):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(writer, "save_file", full)
    with pytest.raises(NoSpace, match="Free some space"):
        write_rank_file(tmp_path, 0, cut(whole_tensors(), 1)[0])


def test_attempts_at_a_step_do_not_share_a_directory(tmp_path):
    names = {
        attempt_directory(tmp_path, step, attempt, ranks).name
        for step in (3, 30)
        for attempt in (1, 2)
        for ranks in (2, 3)
    }
    assert len(names) == 8
