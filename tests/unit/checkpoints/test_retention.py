"""The newest checkpoints stay; older ones and what dead attempts left go."""

import shutil

import pytest

from pliant.checkpoints.manifest import MANIFEST
from pliant.checkpoints.reader import newest
from pliant.checkpoints.retention import prune
from pliant.checkpoints.writer import attempt_directory


def steps(root):
    return sorted(int(path.name[5:13]) for path in root.iterdir())


def test_the_newest_stay(commit, root):
    for step in (5, 10, 15, 100):
        commit(step)
    removed = prune(root, keep=2)
    assert steps(root) == [15, 100]
    assert len(removed) == 2


def test_nothing_goes_where_there_are_few(commit, root):
    commit(5)
    assert prune(root, keep=2) == []


def test_what_dead_attempts_left_goes(commit, root):
    commit(5)
    orphan = attempt_directory(root, 10, 1, 2)
    orphan.mkdir()
    (orphan / "rank-00000.safetensors").write_bytes(b"half")
    assert prune(root, keep=2) == [orphan]
    assert steps(root) == [5]


def test_what_is_not_ours_stays(commit, root):
    commit(5)
    for name in ("notes", "step-5", "step-00000005.attempt-1.ranks-2.copy"):
        (root / name).mkdir()
    (root / "README").touch()
    assert prune(root, keep=1) == []
    assert len(list(root.iterdir())) == 5


def test_the_checkpoint_just_written_stays_where_an_earlier_attempt_left_one_ahead(
    commit, root, ledger_root
):
    """Attempt 2 passed over the damaged step 10, went on from step 5 and has just saved step 8."""
    commit(5, attempt=1)
    (commit(10, attempt=1) / "rank-00000.safetensors").unlink()
    commit(8, attempt=2)
    prune(root, keep=1)
    assert newest(root, ledger_root).manifest.step == 8


def test_what_was_passed_over_does_not_take_the_place_of_a_good_one(commit, root, ledger_root):
    commit(5, attempt=1)
    (commit(10, attempt=1) / "rank-00000.safetensors").unlink()
    commit(8, attempt=2)
    prune(root, keep=2)
    assert steps(root) == [5, 8]


def test_a_checkpoint_loses_its_manifest_first(commit, root, monkeypatch):
    """Whatever interrupts its removal, it does not look whole."""
    old = commit(5)
    commit(10)

    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prune(root, keep=1)
    assert old.is_dir()
    assert not (old / MANIFEST).exists()
