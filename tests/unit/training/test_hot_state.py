"""A run that goes on from a snapshot is the run that was never disturbed, ledger included; and a
checkpoint that cannot be stored in the background costs no more than itself."""

import pytest
import torch

from fakes import hot_runs
from fakes.engines import global_batch
from fakes.hot_runs import HOT, LAST, RUNS, SAVED
from fakes.ranks import run_ranks
from pliant.checkpoints import snapshot


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    yield root
    for run_dir in root.iterdir():
        snapshot.remove(run_dir)


@pytest.fixture(scope="module")
def two(root):
    """What two ranks did and measured."""
    return run_ranks(hot_runs.on_two_ranks, 2, root)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def pieces(steps):
    return sorted(
        (step, piece)
        for step in range(steps)
        for micro in global_batch(step)
        for piece in micro.piece_ids.tolist()
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_number_of_ranks_goes_on_from_the_snapshots_of_two(root, two, world_size):
    name, killed = RUNS[world_size - 1], two[0]["killed"][world_size - 1]
    same = [rank["later"] for rank in two]
    ranks = same if world_size == 2 else run_ranks(hot_runs.later, world_size, root, name)
    for rank in ranks:
        assert rank["progress"] == killed["progress"]
        assert rank["progress"].step == HOT > SAVED
        assert_same(rank["state"], killed["state"])
        assert rank["damage"] == []
        assert rank["ledger"] == pieces(LAST)
        if world_size == 2:
            assert_same(rank["final"], killed["final"])


def test_snapshots_take_turns_in_memory_that_is_there(two):
    for rank in two:
        for killed in rank["killed"]:
            assert killed["pages"] <= 2 * killed["views"]


def test_a_torn_snapshot_is_gone_back_behind_and_counted(two):
    assert [rank["torn"]["step"] for rank in two] == [HOT - 1, HOT - 1]
    (sentence,) = two[0]["torn"]["damage"]
    assert "cannot be read" in sentence


def test_a_snapshot_with_other_numbers_in_it_is_not_trained_on(two):
    assert [rank["altered"]["step"] for rank in two] == [HOT - 1, HOT - 1]
    (sentence,) = two[0]["altered"]["damage"]
    assert "was loaded with the digest" in sentence


def test_a_full_disk_raises_an_alarm_and_saving_resumes(two):
    events = two[0]["full_disk"]["events"]
    assert events == [("alarm", 1), ("checkpoint", 2), ("note", 2), ("checkpoint", 3)]
    for rank in two:
        assert rank["full_disk"]["steps"] == 3
        assert rank["full_disk"]["ledger"] == pieces(3)


def test_an_attempt_that_ends_while_it_saves_leaves_nothing_half_committed(two):
    assert two[1]["closed"]["was_blocked"]
    for rank in two:
        assert rank["closed"]["committed"] == []
        assert rank["closed"]["step"] == 1


def test_before_a_resize_the_state_is_made_safe_in_memory(two):
    for rank in two:
        assert rank["resized"]["step"] == 3
        assert rank["resized"]["committed"] == []
        assert_same(rank["resized"]["loaded"], rank["resized"]["saved"])


def test_state_that_was_put_together_wrongly_is_not_trained_on(two):
    assert [rank["digests"]["step"] for rank in two] == [1, 1]
    (sentence,) = two[0]["digests"]["damage"]
    assert "was saved with 0000000000000000" in sentence
