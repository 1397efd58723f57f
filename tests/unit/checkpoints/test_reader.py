"""The newest whole checkpoint is found and loaded, however its tensors were cut."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.checkpoints import NUMELS, cut, emptied, whole_tensors
from pliant.checkpoints.fragments import Fragment
from pliant.checkpoints.manifest import MANIFEST
from pliant.checkpoints.reader import check_tensors, committed, load, newest
from pliant.errors import CheckpointMismatch, FilesDamaged


def loaded(checkpoint, num_ranks=1):
    """Whole tensors, loaded by so many ranks."""
    ranks = [emptied(rank) for rank in cut(whole_tensors(), num_ranks)]
    for fragments in ranks:
        load(checkpoint, fragments)
    return joined(ranks)


def joined(ranks):
    tensors = {key: torch.full((numel,), torch.nan) for key, numel in NUMELS.items()}
    for fragment in (fragment for rank in ranks for fragment in rank):
        end = fragment.start + len(fragment.tensor)
        tensors[fragment.key][fragment.start : end] = fragment.tensor
    return tensors


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def test_a_run_without_checkpoints_starts_afresh(root, ledger_root):
    assert newest(root, ledger_root) is None
    root.mkdir()
    assert newest(root, ledger_root) is None


def test_the_newest_checkpoint_is_loaded(commit, root, ledger_root):
    for step in (9, 10, 100):
        commit(step)
    checkpoint = newest(root, ledger_root)
    assert checkpoint.manifest.step == 100
    assert_equal(loaded(checkpoint), whole_tensors(100))


def test_what_was_not_committed_is_not_seen(commit, root, ledger_root):
    commit(5)
    (commit(10) / MANIFEST).unlink()
    assert newest(root, ledger_root).manifest.step == 5


def test_of_two_attempts_at_a_step_the_later_one_counts(commit, root, ledger_root):
    for attempt in (2, 10, 9):
        commit(5, attempt=attempt)
    assert newest(root, ledger_root).manifest.attempt == 10


def test_a_later_attempt_goes_before_what_an_earlier_one_left_ahead_of_it(
    commit, root, ledger_root
):
    """Attempt 2 passed over step 10, which was damaged then, and started from step 5."""
    commit(5, attempt=1)
    commit(10, attempt=1)
    commit(8, attempt=2)
    assert newest(root, ledger_root).manifest.step == 8


def test_foreign_directories_are_not_looked_at(commit, root, ledger_root):
    directory = commit(5)
    for name in ("backup", f"{directory.name} (copy)", f"{directory.name}.old", "step-x.attempt-1"):
        (root / name).mkdir()
        (root / name / MANIFEST).write_bytes((directory / MANIFEST).read_bytes())
    (root / MANIFEST).touch()
    assert committed(root) == [directory.name]
    assert newest(root, ledger_root).directory == str(directory)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "flipped": flip,
    "torn": lambda path: path.write_bytes(
        path.read_bytes()[:100] + bytes(max(path.stat().st_size - 100, 0))
    ),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
@pytest.mark.parametrize("what", ["rank file", "manifest"])
def test_a_damaged_checkpoint_is_passed_over(commit, root, ledger_root, caplog, what, damage):
    commit(5)
    directory = commit(10)
    name = MANIFEST if what == "manifest" else "rank-00001.safetensors"
    DAMAGE[damage](directory / name)
    assert newest(root, ledger_root).manifest.step == 5
    is_visible = (directory / MANIFEST).exists()
    assert ("Falling back to an older checkpoint" in caplog.text) == is_visible
    assert (str(directory / name) in caplog.text) == is_visible


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_a_damaged_ledger_file_is_noticed_as_well(commit, root, ledger_root, caplog, damage):
    commit(5)
    directory = commit(10)
    path = ledger_root / f"{directory.name}.parquet"
    DAMAGE[damage](path)
    assert newest(root, ledger_root).manifest.step == 5
    assert str(path) in caplog.text


def test_where_none_is_whole_nothing_is_started_afresh(commit, root, ledger_root):
    for step in (5, 10):
        flip(commit(step) / "rank-00000.safetensors")
    with pytest.raises(FilesDamaged, match="None of the 2 checkpoints") as caught:
        newest(root, ledger_root)
    assert caught.value.path == str(root)


@st.composite
def cuts(draw):
    """For each tensor the places where it is cut into as many parts as there are ranks."""
    num_ranks = draw(st.integers(1, 5))
    places = {
        key: sorted(
            draw(st.lists(st.integers(0, numel), min_size=num_ranks - 1, max_size=num_ranks - 1))
        )
        for key, numel in NUMELS.items()
    }
    return num_ranks, places


@settings(max_examples=40, deadline=None)
@given(written=cuts(), read=cuts())
def test_tensors_are_the_same_however_they_are_cut(tmp_path_factory, written, read):
    from fakes.checkpoints import commit

    folder = tmp_path_factory.mktemp("cut")
    tensors = whole_tensors(3)
    commit(folder / "checkpoints", folder / "ledger", 3, ranks=cut(tensors, *written))
    checkpoint = newest(folder / "checkpoints", folder / "ledger")
    ranks = [emptied(rank) for rank in cut(whole_tensors(), *read)]
    for fragments in ranks:
        load(checkpoint, fragments)
    assert_equal(joined(ranks), tensors)


def test_loading_writes_into_the_live_state(commit, root, ledger_root):
    commit(5)
    live = whole_tensors(99)
    load(newest(root, ledger_root), cut(live, 2)[0])
    expected = whole_tensors(5)
    assert torch.equal(live["fp32/weight"][:30], expected["fp32/weight"][:30])
    assert torch.equal(live["fp32/weight"][30:], whole_tensors(99)["fp32/weight"][30:])


def test_nothing_is_ever_unpickled(commit, root, ledger_root, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("something was unpickled")

    commit(5)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert_equal(loaded(newest(root, ledger_root), 3), whole_tensors(5))


def test_a_tensor_of_another_size_is_named(commit, root, ledger_root):
    commit(5)
    other = Fragment("fp32", "weight", 0, 80, torch.empty(80))
    with pytest.raises(CheckpointMismatch, match=r"fp32/weight with 60 elements.*80") as caught:
        load(newest(root, ledger_root), [other])
    assert caught.value.key == "fp32/weight"


def test_a_tensor_that_was_not_saved_is_named(commit, root, ledger_root):
    commit(5)
    with pytest.raises(CheckpointMismatch, match="fp32/head nowhere"):
        load(newest(root, ledger_root), [Fragment("fp32", "head", 0, 2, torch.empty(2))])


def test_a_tensor_that_the_model_lacks_is_named(commit, root, ledger_root):
    """A smaller model would load without a sign otherwise."""
    commit(5)
    fewer = {key: numel for key, numel in NUMELS.items() if key != "fp32/bias"}
    with pytest.raises(CheckpointMismatch, match=r"fp32/bias.*this model has not") as caught:
        check_tensors(newest(root, ledger_root), fewer)
    assert caught.value.key == "fp32/bias"


def test_a_gap_between_the_saved_fragments_is_damage(commit, root, ledger_root):
    first, second = cut(whole_tensors(), 2)
    commit(5, ranks=[first, second[:-1]])
    with pytest.raises(FilesDamaged, match="3 of the 7 elements needed of fp32/bias"):
        loaded(newest(root, ledger_root))


def test_fragments_that_overlap_do_not_hide_a_gap(commit, root, ledger_root):
    tensors = whole_tensors()
    bias = tensors["fp32/bias"]
    rest = [f for f in cut(tensors, 1)[0] if f.name != "bias"]
    twice = [Fragment("fp32", "bias", start, 7, bias[start : start + 3]) for start in (0, 1)]
    last = [Fragment("fp32", "bias", 6, 7, bias[6:])]
    commit(5, ranks=[rest, [twice[0]], [twice[1]], last])
    with pytest.raises(FilesDamaged, match="fp32/bias"):
        loaded(newest(root, ledger_root))
