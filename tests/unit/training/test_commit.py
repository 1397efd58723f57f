"""Who commits a checkpoint, when, and what becomes of one that cannot be stored."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from fakes.checkpoints import a_manifest
from pliant.checkpoints import reader
from pliant.checkpoints.manifest import Manifest, RankFile
from pliant.checkpoints.places import places_of
from pliant.checkpoints.writer import directory_name
from pliant.errors import NoSpace
from pliant.training.commit import Base, Committer, RankSaved

NAME = "step-00000004.attempt-1.ranks-2"


@pytest.fixture
def events():
    return []


@pytest.fixture
def places(tmp_path):
    return places_of(tmp_path, None)


@pytest.fixture
def committer(places, events):
    return Committer(places, lambda manifest: None, events.append, lambda: (3, 60.0))


@pytest.fixture
def report(tmp_path):
    """What a rank stored of a step, and reports."""

    def stored(rank, step=4, attempt=1, error=None, since=0, base=None):
        name = directory_name(step, attempt, 2)
        directory = tmp_path / "checkpoints" / name
        directory.mkdir(parents=True, exist_ok=True)
        file = f"rank-{rank:05d}.safetensors"
        (directory / file).write_bytes(b"tensors")
        return RankSaved(
            rank=rank,
            manifest=a_manifest(step, attempt),
            directory=name,
            base=base or Base(),
            file=None if error else RankFile(file, 7, "", ()),
            error=error,
            entries=[(s, np.array([10 * s + rank])) for s in range(since, step)],
            digests={"fp32/weight": 2**63 + rank},
            stall_s=0.25 * rank,
            saving_s=2.0 + rank,
        )

    return stored


def trained(tmp_path, manifest):
    """(step, pieces) of all its ledger files."""
    tables = [pq.read_table(tmp_path / "ledger" / entry.file) for entry in manifest.ledger]
    return [(row["step"], *row["pieces"]) for table in tables for row in table.to_pylist()]


def test_the_last_rank_has_the_checkpoint_committed(tmp_path, committer, report, events, places):
    first = committer.rank_saved(report(1))
    assert (first.state, first.committed_step) == ("waiting", 0)
    assert reader.committed(places.checkpoints) == []
    last = committer.rank_saved(report(0))
    assert (last.state, last.committed_step) == ("committed", 4)
    assert (last.failures, last.elapsed_s) == (3, 60.0)
    manifest = Manifest.read(places.checkpoints, NAME)
    assert [file.file for file in manifest.files] == [
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
    assert manifest.digests == {"fp32/weight": f"{1:016x}"}
    steps = [(s, 10 * s + rank) for s in range(4) for rank in (0, 1)]
    assert sorted(trained(tmp_path, manifest)) == steps
    (event,) = events
    assert event["kind"] == "checkpoint"
    assert event["metrics"]["checkpoint_stall_s"] == 0.25
    assert event["metrics"]["checkpoint_s"] >= 3.0


def test_each_checkpoint_adds_the_steps_since_the_one_before(tmp_path, committer, report, places):
    """Rank 1 does not know yet that the first is committed, and reports its steps again."""
    for step, since in ((4, (0, 0)), (6, (4, 0)), (7, (6, 4))):
        for rank in (0, 1):
            committer.rank_saved(report(rank, step, since=since[rank]))
    manifest = Manifest.read(places.checkpoints, directory_name(7, 1, 2))
    assert [(entry.first_step, entry.last_step) for entry in manifest.ledger] == [
        (0, 3),
        (4, 5),
        (6, 6),
    ]
    assert sorted(trained(tmp_path, manifest)) == [
        (s, 10 * s + rank) for s in range(7) for rank in (0, 1)
    ]


def test_an_attempt_goes_on_from_the_checkpoint_that_it_was_restored_from(
    tmp_path, committer, report, places
):
    for rank in (0, 1):
        committer.rank_saved(report(rank))
    base = Base(4, NAME, Manifest.read(places.checkpoints, NAME).ledger)
    fresh = Committer(places, lambda manifest: None, lambda event: None)
    for rank in (0, 1):
        fresh.rank_saved(report(rank, step=6, attempt=2, base=base, since=3))
    manifest = Manifest.read(places.checkpoints, directory_name(6, 2, 2))
    assert [step for step, _ in sorted(trained(tmp_path, manifest))[::2]] == list(range(6))


def test_an_earlier_attempt_is_refused(committer, report, places):
    committer.rank_saved(report(0))
    committer.begin(2)
    assert committer.rank_saved(report(1)).state == "refused"
    committer.rank_saved(report(0, step=5, attempt=3))
    assert committer.rank_saved(report(1, step=9, attempt=2)).state == "refused"
    assert reader.committed(places.checkpoints) == []


def test_a_rank_without_room_costs_the_checkpoint_but_not_the_run(
    tmp_path, committer, report, events, places
):
    full = NoSpace("the disk has 0 MiB free", free_bytes=0, needed_bytes=9)
    assert committer.rank_saved(report(0, error=full)).state == "waiting"
    answer = committer.rank_saved(report(1))
    assert (answer.state, answer.error) == ("failed", full)
    assert answer.committed_step == 0
    assert not (tmp_path / "checkpoints" / NAME).exists()
    assert [event["kind"] for event in events] == ["alarm"]
    assert "training goes on: the disk has 0 MiB free" in events[0]["text"]
    for rank in (0, 1):
        answer = committer.rank_saved(report(rank, step=6))
    assert answer.state == "committed"
    assert [event["kind"] for event in events[1:]] == ["checkpoint", "note"]
    assert events[2]["text"] == "checkpoints are saved again"
    manifest = Manifest.read(places.checkpoints, directory_name(6, 1, 2))
    assert sorted({step for step, _ in trained(tmp_path, manifest)}) == list(range(6))


def test_a_disk_that_fills_up_at_the_manifest_costs_no_more(tmp_path, places, report, events):
    class FullAtTheEnd:
        def __getattr__(self, name):
            return getattr(places.checkpoints, name)

        def write(self, name, content):
            raise NoSpace("full", free_bytes=0, needed_bytes=1)

    broken = replace(places, checkpoints=FullAtTheEnd())
    committer = Committer(broken, lambda manifest: None, events.append)
    for rank in (0, 1):
        answer = committer.rank_saved(report(rank))
    assert answer.state == "failed"
    assert isinstance(answer.error, NoSpace)
    assert not (tmp_path / "checkpoints" / NAME).exists()


def test_a_kill_between_the_files_leaves_the_checkpoint_before(tmp_path, committer, report, places):
    """One rank's report never comes; the next attempt finds no manifest."""
    for rank in (0, 1):
        committer.rank_saved(report(rank, step=2))
    committer.rank_saved(report(0, step=4))
    assert reader.committed(places.checkpoints) == [directory_name(2, 1, 2)]


def test_old_checkpoints_that_cannot_be_removed_do_not_undo_a_commit(places, report, events):
    def prune(manifest):
        raise OSError("device is busy")

    committer = Committer(places, prune, events.append)
    for rank in (0, 1):
        answer = committer.rank_saved(report(rank))
    assert answer.state == "committed"
