"""What is kept and why is decided from names and metrics alone; the rest goes, its marker first."""

import math
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.checkpoints import commit as commit_at
from pliant.checkpoints.manifest import MANIFEST
from pliant.checkpoints.reader import newest
from pliant.checkpoints.retention import Found, Policy, decide, prune
from pliant.checkpoints.writer import directory_name
from pliant.spec.operations import CheckpointSpec
from pliant.storage.opening import open_storage


def found(*steps, attempt=1, metrics=(), is_committed=True):
    measured = dict(zip(steps, metrics, strict=False))
    return [Found(f"{attempt}:{s}", attempt, s, is_committed, measured.get(s)) for s in steps]


def kept(found, policy, **how):
    return sorted(int(name.split(":")[1]) for name in decide(found, policy, **how).kept)


def steps(root):
    return sorted(int(path.name[5:13]) for path in root.iterdir())


def test_the_last_stay():
    decision = decide(found(5, 10, 15, 100), Policy(last=2))
    assert decision.kept == {"1:100": "one of the last 2", "1:15": "one of the last 2"}
    assert decision.doomed == dict.fromkeys(("1:10", "1:5"), "older than what is kept")


def test_the_first_of_every_so_many_steps_stays_for_good():
    saved = found(40, 80, 120, 160, 200, 310, 350, 390)
    assert kept(saved, Policy(last=1, every=100)) == [120, 200, 310, 390]


@settings(deadline=None)
@given(every=st.integers(1, 50), gaps=st.lists(st.integers(1, 30), min_size=1, max_size=30))
def test_what_was_kept_for_good_is_kept_whenever_it_is_looked_at(every, gaps):
    """Deciding after each save comes to the same as deciding once at the end."""
    policy, left, step, saved = Policy(last=1, every=every), [], 0, []
    for gap in gaps:
        step += gap
        saved.append(step)
        left = kept(found(*left, step), policy)
    assert left == kept(found(*saved), policy)
    assert {s // every for s in left} >= {s // every for s in saved} - {0}


def test_the_best_stay_by_their_metric():
    saved = found(1, 2, 3, 4, 5, 6, metrics=[2.0, 1.0, math.nan, 1.5, 1.0])
    assert kept(saved, Policy(last=1, best=1)) == [5, 6]
    assert kept(saved, Policy(last=1, best=3)) == [2, 4, 5, 6]
    assert kept(saved, Policy(last=1, best=1, mode="max")) == [1, 6]
    reasons = decide(saved, Policy(last=1, best=1, metric="accuracy")).kept
    assert reasons == {"1:6": "the last", "1:5": "accuracy 1 is among the best"}


def test_what_is_being_written_stays_and_what_dead_attempts_left_goes():
    """While one checkpoint is committed the next may be under way."""
    half = found(8, 20, is_committed=False)
    assert kept(found(5, 10) + half, Policy(last=5)) == [5, 10, 20]
    assert kept(found(5, 10) + half, Policy(last=5), is_idle=True) == [5, 10]
    assert kept(half, Policy(last=5)) == [8, 20]
    later = found(6, attempt=2)
    assert kept(found(5, 10) + half + later, Policy(last=5)) == [5, 6]


def test_what_a_later_attempt_passed_over_does_not_take_the_place_of_a_good_one():
    """Attempt 2 passed over step 10, went on from step 5 and saved 8; attempt 3 passed that over
    too and saved 7."""
    saved = found(5, 10) + found(8, attempt=2)
    assert kept(saved, Policy(last=2)) == [5, 8]
    assert kept(saved, Policy(last=2, every=10)) == [5, 8]
    assert kept(saved + found(7, attempt=3), Policy(last=3)) == [5, 7]


def test_the_last_whole_one_stays_though_newer_ones_are_there():
    saved = found(5, 10, 15)
    assert kept(saved, Policy(last=1), good="1:5") == [5, 15]


@settings(deadline=None)
@given(
    saved=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 30), st.booleans()), unique=True),
    last=st.integers(1, 3),
    every=st.none() | st.integers(1, 9),
    best=st.integers(0, 2),
    is_idle=st.booleans(),
)
def test_the_newest_committed_one_always_stays_and_nothing_is_forgotten(
    saved, last, every, best, is_idle
):
    all_found = [Found(f"{a}:{s}:{c}", a, s, c) for a, s, c in saved]
    decision = decide(all_found, Policy(last, every, best), is_idle)
    assert decision.kept.keys() | decision.doomed.keys() == {one.name for one in all_found}
    assert not decision.kept.keys() & decision.doomed.keys()
    whole = [one for one in all_found if one.is_committed]
    if whole:
        assert max(whole, key=lambda one: (one.attempt, one.step)).name in decision.kept


def test_the_spec_is_what_is_kept():
    spec = CheckpointSpec(keep=3, keep_every=100, keep_best=2, best_metric="f1", best_mode="max")
    assert Policy.of(spec) == Policy(3, 100, 2, "f1", "max")


def test_pruning_follows_the_metrics_in_the_manifests(commit, root):
    for step, loss in ((5, 3.0), (10, 1.0), (15, 2.0), (20, 2.5)):
        commit(step, metrics={"eval_loss": loss})
    assert len(prune(root, Policy(last=1, best=1))) == 2
    assert steps(root) == [10, 20]


def test_what_is_not_ours_stays(commit, root):
    commit(5)
    for name in ("notes", "step-5", "step-00000005.attempt-1.ranks-2.copy"):
        (root / name).mkdir()
    (root / "README").touch()
    assert prune(root, Policy(last=1)) == []
    assert len(list(root.iterdir())) == 5


def test_half_a_checkpoint_goes(commit, root):
    commit(15)
    orphan = root / directory_name(10, 1, 2)
    orphan.mkdir()
    (orphan / "rank-00000.safetensors").write_bytes(b"half")
    assert prune(root, Policy(last=2)) == [orphan.name]
    assert steps(root) == [15]


def test_the_checkpoint_just_written_stays_where_an_earlier_attempt_left_one_ahead(
    commit, root, ledger_root
):
    commit(5, attempt=1)
    (commit(10, attempt=1) / "rank-00000.safetensors").unlink()
    commit(8, attempt=2)
    prune(root, Policy(last=1))
    assert newest(root, ledger_root).manifest.step == 8


def test_a_ledger_file_that_no_manifest_names_goes(commit, root, ledger_root):
    """Those of removed checkpoints are named by the later ones."""
    entries = []
    for step in (5, 10):
        entries += newest(root, ledger_root).manifest.ledger if step > 5 else []
        commit(step)
    name = commit(15, attempt=2).name
    dead = ledger_root / "step-00000012.attempt-1.ranks-2.parquet"
    under_way = ledger_root / "step-00000020.attempt-2.ranks-2.parquet"
    for path in (dead, under_way, ledger_root / "notes.parquet"):
        path.touch()
    prune(root, Policy(last=2), open_storage(ledger_root))
    left = {path.name for path in ledger_root.iterdir()}
    assert left == {
        "notes.parquet",
        under_way.name,
        f"{name}.parquet",
        "step-00000010.attempt-1.ranks-2.parquet",
    }
    assert newest(root, ledger_root).manifest.step == 15


def test_no_ledger_file_goes_while_a_manifest_cannot_be_read(commit, root, ledger_root):
    commit(5)
    (commit(10) / MANIFEST).write_text("{")
    commit(15)
    (ledger_root / "step-00000001.attempt-1.ranks-2.parquet").touch()
    prune(root, Policy(last=3), open_storage(ledger_root))
    assert len(list(ledger_root.iterdir())) == 4


def test_a_checkpoint_loses_its_manifest_first(commit, root, monkeypatch):
    """Whatever interrupts its removal, it does not look whole."""
    old = commit(5)
    commit(10)

    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prune(root, Policy(last=1))
    assert old.is_dir()
    assert not (old / MANIFEST).exists()


def test_pruning_works_in_an_object_store():
    store = open_storage("memory://pruned/run")
    for step in (5, 10, 15):
        commit_at(store.below("checkpoints"), store.below("ledger"), step)
    prune(store.below("checkpoints"), Policy(last=1), store.below("ledger"))
    assert [name[:13] for name in store.names("checkpoints")] == ["step-00000015"]
    assert [name[:13] for name in store.names("ledger")] == ["step-00000015"]
    assert newest(store.below("checkpoints"), store.below("ledger")).manifest.step == 15
