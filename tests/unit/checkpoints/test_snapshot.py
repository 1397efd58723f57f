"""A snapshot is whole or has no record, whenever its process ends; the next process reads it."""

import json
import multiprocessing
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from fakes.checkpoints import NUMELS, cut, emptied, whole_tensors
from pliant.checkpoints import reader, snapshot
from pliant.checkpoints.fragments import Fragment
from pliant.checkpoints.slots import MOST_SLOTS, Slots, lay_out, owned
from pliant.checkpoints.snapshot import Copies, Description, Hot, Moment, Roots
from pliant.errors import NoSpace
from pliant.storage.local import LocalStorage

DESCRIPTION = Description(1, NUMELS, "0" * 16, {"data": "key"}, origin="")


def moment(step):
    return Moment(step, {"step": step, "epoch": 0, "pack": 5 * step}, {"steps": step})


def slots_of(root, fragments, rank=0, world_size=1, attempt=1, node="here"):
    layout = lay_out(owned(fragments))
    slots = Slots(root, node, attempt, rank, world_size, layout)
    slots.describe(DESCRIPTION)
    return slots


def take(slots, fragments, step):
    slot = slots.take(owned(fragments), step)
    slots.record(slot, moment(step))
    return slot


def loaded(hot, fragments):
    """The fragments' places, filled from a snapshot."""
    targets = emptied(fragments)
    files = {part.rank: part.file for part in hot.parts}
    reader.load(reader.Checkpoint(LocalStorage(Path("/")), "", hot.manifest(files, ())), targets)
    return targets


def assert_equal(found, expected):
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left.tensor, right.tensor), left.key


def test_a_snapshot_is_a_safetensors_file_of_any_element_types(tmp_path):
    tensors = {
        "fp32/weight": torch.randn(7),
        "buffer/flags": torch.tensor([True, False, True]),
        "buffer/count": torch.arange(3),
        "buffer/half": torch.randn(5).to(torch.bfloat16),
    }
    fragments = cut(tensors, 1)[0]
    slot = take(slots_of(tmp_path, fragments), fragments, 1)
    with safe_open(slot.path, framework="pt") as file:
        for key, tensor in tensors.items():
            assert torch.equal(file.get_tensor(f"{key}:0"), tensor)
    for view in slot.views:
        assert view.data_ptr() % view.element_size() == 0


def test_a_rank_that_owns_nothing_has_an_empty_file(tmp_path):
    slot = take(slots_of(tmp_path, []), [], 1)
    with safe_open(slot.path, framework="pt") as file:
        assert file.get_tensor("nothing").numel() == 0


def test_snapshots_of_several_ranks_are_read_on_any_other_number(tmp_path):
    tensors = whole_tensors()
    for rank, fragments in enumerate(cut(tensors, 3)):
        take(slots_of(tmp_path, fragments, rank, 3), fragments, 4)
    (hot,) = snapshot.complete(snapshot.find([tmp_path]))
    assert hot.age == (1, 4)
    for fragments in cut(tensors, 2):
        assert_equal(loaded(hot, fragments), fragments)


def test_in_the_steady_state_nothing_is_allocated(tmp_path):
    fragments = cut(whole_tensors(), 1)[0]
    slots = slots_of(tmp_path, fragments)
    taken = [take(slots, fragments, step) for step in range(1, 8)]
    places = {view.data_ptr() for slot in taken[:2] for view in slot.views}
    assert {view.data_ptr() for slot in taken for view in slot.views} == places
    assert slots.num_made == 2


def test_ranks_that_are_one_step_apart_have_a_step_in_common(tmp_path):
    """Rank 1 has gone ahead and has begun to write over its older slot."""
    ranks = cut(whole_tensors(), 2)
    slots = [slots_of(tmp_path, part, rank, 2) for rank, part in enumerate(ranks)]
    for step in range(1, 6):
        for rank in (0, 1):
            if (rank, step) != (0, 5):
                take(slots[rank], ranks[rank], step)
    newest, *_ = snapshot.complete(snapshot.find([tmp_path]))
    assert newest.age == (1, 4)


def test_a_later_attempt_comes_before_an_earlier_one_that_got_further(tmp_path):
    fragments = cut(whole_tensors(), 1)[0]
    take(slots_of(tmp_path, fragments, attempt=1), fragments, 9)
    take(slots_of(tmp_path, fragments, attempt=2), fragments, 6)
    ages = [hot.age for hot in snapshot.complete(snapshot.find([tmp_path]))]
    assert ages == [(2, 6), (1, 9)]


def test_a_pinned_slot_is_not_written_over(tmp_path):
    tensors = whole_tensors()
    fragments = cut(tensors, 1)[0]
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    slots = slots_of(tmp_path, fragments)
    pinned = take(slots, fragments, 1)
    slots.pin(pinned)
    for step in range(2, 6):
        for tensor in tensors.values():
            tensor += 1
        assert take(slots, fragments, step) is not pinned
    with safe_open(pinned.path, framework="pt") as file:
        assert torch.equal(file.get_tensor("fp32/weight:0"), before["fp32/weight"])
    slots.release(pinned)
    assert take(slots, fragments, 6) is pinned


def test_training_waits_where_every_slot_is_pinned_and_that_is_counted(tmp_path):
    fragments = cut(whole_tensors(), 1)[0]
    slots = slots_of(tmp_path, fragments)
    taken = [take(slots, fragments, step) for step in range(1, 3)]
    for slot in taken:
        slots.pin(slot)
    while slots.num_made < MOST_SLOTS:
        slots.pin(take(slots, fragments, 9))
    assert slots.waits == 0
    threading.Timer(0.2, slots.release, (taken[0],)).start()
    assert take(slots, fragments, 10) is taken[0]
    assert slots.waits == 1


def killed_while_it_copies(root):
    fragments = owned(cut(whole_tensors(3), 1)[0])
    slots = slots_of(root, fragments)
    for step in (1, 2):
        slots.ledger.append([(step - 1, np.array([10 * step, 10 * step + 1]))])
        take(slots, fragments, step)

    def until_killed():
        for number, fragment in enumerate(fragments):
            if number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield fragment

    slots.take(until_killed(), 3)


def test_another_process_reads_what_a_killed_one_left(tmp_path):
    process = multiprocessing.get_context("fork").Process(
        target=killed_while_it_copies, args=(tmp_path,)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (hot,) = snapshot.complete(snapshot.find([tmp_path]))
    assert hot.age == (1, 2)
    fragments = cut(whole_tensors(3), 1)[0]
    assert_equal(loaded(hot, fragments), fragments)
    (part,) = hot.parts
    entries = snapshot.parse_ledger(Path(part.ledger).read_bytes()[: part.ledger_bytes])
    assert [(step, ids.tolist()) for step, ids in entries] == [(0, [10, 11]), (1, [20, 21])]


@pytest.mark.parametrize("damage", ["file is short", "ledger is short", "record is cut off"])
def test_a_snapshot_that_is_not_whole_is_passed_over(tmp_path, damage):
    fragments = cut(whole_tensors(), 1)[0]
    slots = slots_of(tmp_path, fragments)
    slots.ledger.append([(0, np.array([1, 2, 3]))])
    take(slots, fragments, 1)
    slots.ledger.append([(1, np.array([4]))])
    slot = take(slots, fragments, 2)
    if damage == "file is short":
        os.truncate(slot.path, 100)
    elif damage == "ledger is short":
        os.truncate(slots.ledger.path, slots.ledger.size_bytes - 8)
    else:
        slot.path.with_suffix(".json").write_text(json.dumps({"step": 2})[:-1])
    (hot,) = snapshot.complete(snapshot.find([tmp_path]))
    assert hot.age == (1, 1)


def test_a_record_names_the_ledger_of_its_time(tmp_path):
    """The log begins anew after a checkpoint, and grows; older records stay right."""
    fragments = cut(whole_tensors(), 1)[0]
    slots = slots_of(tmp_path, fragments)
    slots.ledger.append([(0, np.array([1])), (1, np.array([2]))])
    take(slots, fragments, 2)
    slots.ledger.restart([(1, np.array([2]))])
    slots.ledger.append([(2, np.array([], dtype=np.int64))])
    take(slots, fragments, 3)
    slots.ledger.append([(3, np.array([9]))])
    found = {
        hot.age[1]: [
            step
            for part in hot.parts
            for step, _ in snapshot.parse_ledger(
                Path(part.ledger).read_bytes()[: part.ledger_bytes]
            )
        ]
        for hot in snapshot.complete(snapshot.find([tmp_path]))
    }
    assert found == {2: [0, 1], 3: [1, 2]}


def test_pages_of_an_earlier_attempt_are_used_again_but_not_its_only_snapshot(tmp_path):
    fragments = cut(whole_tensors(), 1)[0]
    first = slots_of(tmp_path, fragments, attempt=1)
    old = [take(first, fragments, step) for step in (1, 2)]
    first.close()
    snapshot.forget([tmp_path], kept=(1, 2))
    pages = [path.stat().st_ino for path in (old[0].path, old[1].path)]
    second = slots_of(tmp_path, fragments, attempt=2)
    slot = second.take(owned(fragments), 3)
    assert slot.path.stat().st_ino == pages[0]
    assert [hot.age for hot in snapshot.complete(snapshot.find([tmp_path]))] == [(1, 2)]
    second.record(slot, moment(3))
    second.replaces_earlier = True
    assert take(second, fragments, 4).path.stat().st_ino == pages[1]
    ages = [hot.age for hot in snapshot.complete(snapshot.find([tmp_path]))]
    assert ages == [(2, 4), (2, 3)]


@pytest.mark.parametrize(
    ("kept", "before", "left"),
    [
        (None, None, []),
        ((1, 2), None, [(1, 2)]),
        ((1, 2), 2, [(2, 3), (1, 2)]),
        (None, 2, [(2, 3)]),
        (None, 1, [(2, 3), (1, 2), (1, 1)]),
    ],
)
def test_what_did_not_last_is_forgotten_but_not_what_came_after_it(tmp_path, kept, before, left):
    fragments = cut(whole_tensors(), 1)[0]
    for attempt, steps in ((1, (1, 2)), (2, (3,))):
        slots = slots_of(tmp_path / str(attempt), fragments, attempt=attempt)
        for step in steps:
            take(slots, fragments, step)
        slots.close()
    roots = [tmp_path / "1", tmp_path / "2"]
    snapshot.forget(roots, kept, before)
    assert [hot.age for hot in snapshot.complete(snapshot.find(roots))] == left


def test_the_only_file_of_an_earlier_attempt_is_left_alone_at_first(tmp_path):
    fragments = cut(whole_tensors(), 1)[0]
    first = slots_of(tmp_path, fragments, attempt=1)
    take(first, fragments, 1)
    first.close()
    slots_of(tmp_path, fragments, attempt=2).take(owned(fragments), 2)
    assert [hot.age for hot in snapshot.complete(snapshot.find([tmp_path]))] == [(1, 1)]


def test_copies_on_another_node_take_turns_and_count_once_they_are_whole(tmp_path):
    tensors = whole_tensors()
    fragments = cut(tensors, 1)[0]
    slots = slots_of(tmp_path / "one", fragments)
    copies = Copies(tmp_path / "two" / "other")

    def send(step, finish=True):
        part = snapshot.read_part(take(slots, fragments, step).record)
        content = np.fromfile(part.file, dtype=np.uint8)
        for offset in range(0, len(content), 100):
            copies.write(part, offset, content[offset : offset + 100])
        if finish:
            copies.finish(part, Path(part.ledger).read_bytes())

    def ages():
        return [hot.age[1] for hot in snapshot.complete(snapshot.find([tmp_path / "two"]))]

    slots.ledger.append([(0, np.array([5]))])
    send(1)
    send(2)
    assert ages() == [2, 1]
    tensors["fp32/weight"] += 1
    send(3, finish=False)
    assert ages() == [2]
    send(4)
    assert ages() == [4, 2]
    (hot, _) = snapshot.complete(snapshot.find([tmp_path / "two"]))
    assert_equal(loaded(hot, fragments), fragments)
    (part,) = hot.parts
    assert snapshot.parse_ledger(Path(part.ledger).read_bytes())[0][1].tolist() == [5]


def test_an_incomplete_group_is_no_snapshot(tmp_path):
    ranks = cut(whole_tensors(), 2)
    take(slots_of(tmp_path, ranks[1], 1, 2), ranks[1], 1)
    parts = snapshot.find([tmp_path])
    assert len(parts) == 1
    assert snapshot.complete(parts) == []
    other = replace(parts[0], rank=0, world_size=3)
    assert snapshot.complete([*parts, other]) == []


def test_a_run_of_the_same_name_does_not_find_the_snapshots_of_an_earlier_one(tmp_path):
    run_dir = tmp_path / "run"
    before, now, other = Roots.of(run_dir, "a"), Roots.of(run_dir, "b"), Roots.of(tmp_path, "a")
    try:
        for roots in (before, now, other):
            (roots.paths[0] / "here").mkdir(parents=True)
        snapshot.remove(run_dir, but=now)
        assert [roots.paths[0].exists() for roots in (before, now, other)] == [False, True, True]
        snapshot.remove(run_dir)
        assert not now.paths[0].exists()
    finally:
        for roots in (before, now, other):
            roots.remove()


def test_without_room_in_memory_the_temporary_directory_is_taken_and_told(
    tmp_path, monkeypatch, caplog
):
    roots = Roots("pliant-test-room")
    free = {roots.paths[0].parent: 10, roots.paths[-1].parent: 1000}
    usage = type("usage", (), {})

    def disk_usage(path):
        found = usage()
        found.free = free.get(Path(path), 1000)
        return found

    monkeypatch.setattr(snapshot.shutil, "disk_usage", disk_usage)
    assert roots.choose(5) == roots.paths[0]
    assert roots.choose(100) == roots.paths[-1]
    assert "which is slower" in caplog.text
    with pytest.raises(NoSpace) as caught:
        roots.choose(2000)
    assert caught.value.needed_bytes == 2000


def test_fragments_without_elements_are_not_in_the_file():
    empty = Fragment("fp32", "a", 0, 4, torch.empty(0))
    foreign = Fragment("fp32", "b", 0, 4, torch.zeros(4), is_owner=False)
    assert owned([empty, foreign]) == []


def test_a_hot_manifest_holds_what_a_checkpoint_has(tmp_path):
    fragments = cut(whole_tensors(), 1)[0]
    take(slots_of(tmp_path, fragments), fragments, 3)
    (hot,) = snapshot.complete(snapshot.find([tmp_path]))
    manifest = Hot(hot.parts).manifest({0: hot.parts[0].file}, ())
    assert (manifest.step, manifest.attempt, manifest.pack) == (3, 1, 15)
    assert manifest.tensors == NUMELS
    assert manifest.optimizer == {"steps": 3}
    assert manifest.files[0].sha256 == ""
