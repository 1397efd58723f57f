"""An epoch's order is arithmetic: every piece once, and any window or step by itself."""

import errno
import multiprocessing
import queue
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.splits import LengthsOnly, index_epochs, starts_of
from pliant.data import order as ordering
from pliant.data import plan as planning
from pliant.data.order import Mixture, PassOrder
from pliant.data.packing import MAX_AGE, WELL_FILLED
from pliant.data.plan import Cursor, DataPlan, EpochPlan, PlanSettings, StepRange
from pliant.errors import DataError


def plan_settings(**changes):
    usual = {
        "seq_len": 16,
        "global_batch_size": 4,
        "window": 10,
        "packing": True,
        "shuffle": True,
        "seed": 0,
    }
    return PlanSettings(**(usual | changes))


def some_lengths(count, longest=16, seed=0):
    return np.random.default_rng(seed).integers(2, longest + 1, count).astype(np.int32)


def like_sft(count, seed=0):
    """Log-normal, mean about 355, of which a few need a pack of 4096 for themselves."""
    drawn = np.random.default_rng(seed).lognormal(np.log(355) - 0.5, 1.0, count)
    return np.clip(drawn, 2, 4096).astype(np.int32)


def epoch_plan(lengths, shard_sizes, choices, epoch):
    order = PassOrder(starts_of(shard_sizes), choices.window, choices.shuffle, choices.seed, epoch)
    return EpochPlan(lengths, order, choices, epoch)


@pytest.fixture
def make_plan(tmp_path):
    """A plan whose index no other plan of the test has written."""
    number = iter(range(1000))

    def make(lengths, shard_sizes=None, **changes):
        split = LengthsOnly(tmp_path / str(next(number)), lengths, shard_sizes)
        return DataPlan(split, plan_settings(**changes))

    return make


def packs_of_epoch(plan, epoch):
    """All packs of an epoch, as lists of pieces."""
    number = plan.epoch(epoch).num_packs
    return lists(plan.epoch(epoch).packs(0, number)) if number else []


def lists(packing):
    return [part.tolist() for part in np.split(packing.items, packing.starts[1:-1])]


def pieces_of(plan, epoch):
    return [piece for pack in packs_of_epoch(plan, epoch) for piece in pack]


@st.composite
def stores(draw):
    """Lengths and the shards they lie in, of which some may be empty."""
    shard_sizes = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6))
    longest = draw(st.integers(2, 24))
    count = sum(shard_sizes)
    lengths = draw(st.lists(st.integers(2, longest), min_size=count, max_size=count))
    return np.array(lengths, dtype=np.int32), shard_sizes, draw(st.integers(longest, 40))


@given(
    store=stores(),
    group=st.sampled_from([1, 7, 20, 10_000]),
    window=st.integers(1, 40),
    batch=st.integers(1, 9),
    packing=st.booleans(),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_every_piece_is_in_one_pack_and_one_step_of_an_epoch(
    store, group, window, batch, packing, shuffle, epoch
):
    lengths, shard_sizes, seq_len = store
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(ordering, "GROUP_PIECES", group)
        choices = {"window": window, "packing": packing, "shuffle": shuffle, "seq_len": seq_len}
        split = LengthsOnly(Path(folder), lengths, shard_sizes)
        plan = DataPlan(split, plan_settings(global_batch_size=batch, **choices))
        packs = packs_of_epoch(plan, epoch)
        assert sorted(piece for pack in packs for piece in pack) == list(range(len(lengths)))
        assert all(sum(lengths[pack]) <= seq_len for pack in packs)
        assert packing or all(len(pack) == 1 for pack in packs)
        steps = plan.steps_of(epoch)
        if not packs:
            assert steps == 0
            return
        begin = plan.steps_in(epoch)
        in_steps = [lists(plan.packs_of(begin + step)) for step in range(steps)]
        assert [pack for step in in_steps for pack in step] == packs
        assert all(len(step) == batch for step in in_steps[:-1])
        assert 1 <= len(in_steps[-1]) <= batch


@given(store=stores(), group=st.sampled_from([1, 7, 10_000]), window=st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_a_window_planned_from_the_index_is_that_of_the_pass_over_all(store, group, window):
    lengths, shard_sizes, seq_len = store
    choices = plan_settings(window=window, seq_len=seq_len)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(ordering, "GROUP_PIECES", group)
        sequential = epoch_plan(lengths, shard_sizes, choices, 1)
        passed, carried = [], planning._NOTHING
        for number in range(sequential.num_windows):
            packing, carried = sequential._plan(number, carried)
            passed += lists(packing) if packing.num_packs else []
        assert not len(carried.pieces)
        sequential.build_index()
        sequential.save_index(Path(folder) / "index")
        restored = epoch_plan(lengths, shard_sizes, choices, 1)
        restored.load_index(Path(folder) / "index")
        assert restored.num_packs == len(passed)
        for pack in np.random.default_rng(0).permutation(len(passed)):
            assert lists(restored.packs(pack, pack + 1)) == [passed[pack]]


def test_the_same_seed_gives_the_same_plan(make_plan):
    lengths = some_lengths(300)
    first, again = make_plan(lengths, seed=3), make_plan(lengths, seed=3)
    assert [packs_of_epoch(first, n) for n in (0, 1)] == [packs_of_epoch(again, n) for n in (0, 1)]


def test_another_seed_and_another_epoch_give_other_orders(make_plan):
    lengths = some_lengths(300)
    plan = make_plan(lengths)
    orders = [pieces_of(plan, n) for n in range(4)]
    orders += [pieces_of(make_plan(lengths, seed=seed), 0) for seed in (1, 2, 2**63 - 1)]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_without_shuffling_pieces_keep_their_order_and_epochs_are_alike(make_plan):
    plan = make_plan(some_lengths(300), packing=False, shuffle=False)
    assert pieces_of(plan, 0) == pieces_of(plan, 5) == list(range(300))


def test_shuffling_reaches_beyond_a_window(make_plan):
    plan = make_plan(np.full(1000, 2), packing=False, window=10)
    first_window = [piece for pack in packs_of_epoch(plan, 0)[:10] for piece in pack]
    assert max(first_window) - min(first_window) > 300


@pytest.mark.parametrize("shard_sizes", [[300], [100, 100, 100], [1, 0, 298, 1]])
@pytest.mark.parametrize("group", [300, 10_000, ordering.GROUP_PIECES])
def test_within_one_group_the_order_depends_on_neither_shards_nor_group_size(
    make_plan, monkeypatch, shard_sizes, group
):
    lengths = some_lengths(300)
    expected = packs_of_epoch(make_plan(lengths), 0)
    monkeypatch.setattr(ordering, "GROUP_PIECES", group)
    assert packs_of_epoch(make_plan(lengths, shard_sizes), 0) == expected


def test_groups_are_whole_shards_and_are_read_one_after_another(make_plan, monkeypatch):
    monkeypatch.setattr(ordering, "GROUP_PIECES", 50)
    plan = make_plan(np.full(200, 2), [25] * 8, packing=False, window=7)
    for epoch in range(3):
        pieces = np.array(pieces_of(plan, epoch)).reshape(4, 50)
        assert sorted(pieces.min(axis=1)) == [0, 50, 100, 150]
        assert (pieces.max(axis=1) - pieces.min(axis=1)).tolist() == [49] * 4
    orders = {tuple(np.array(pieces_of(plan, n))[::50] // 50) for n in range(8)}
    assert len(orders) > 1


def test_carrying_over_fills_packs_though_windows_are_small(make_plan):
    lengths = like_sft(100_000)
    assert 330 < lengths.mean() < 360
    plan = make_plan(lengths, seq_len=4096, window=1000)
    assert lengths.sum() / (plan.epoch(0).num_packs * 4096) >= 0.999


def test_a_row_of_one_token_more_is_filled_as_well(make_plan):
    """8193 is no multiple of anything that packing works with."""
    lengths = np.random.default_rng(4).integers(20, 600, 3000).astype(np.int32)
    fills = {
        seq_len: lengths.sum()
        / (make_plan(lengths, seq_len=seq_len, window=1000).epoch(0).num_packs * seq_len)
        for seq_len in (8192, 8193)
    }
    assert fills[8193] == pytest.approx(fills[8192], abs=0.01)
    assert min(fills.values()) > 0.97


def test_a_mixture_keeps_its_shares_and_repeats_itself_exactly(make_plan):
    lengths = np.full(120, 4)
    mixture = Mixture("samples", (1.0, 3.0))
    plan, again = (make_plan(lengths, [60, 60], mixture=mixture) for _ in range(2))
    for epoch in (0, 1):
        pieces = np.array(pieces_of(plan, epoch))
        assert [(pieces < 60).sum(), (pieces >= 60).sum()] == [30, 90]
        assert packs_of_epoch(again, epoch) == packs_of_epoch(plan, epoch)
    seen = np.bincount(pieces_of(plan, 0) + pieces_of(plan, 1), minlength=120)
    assert seen[:60].tolist() == [1] * 60
    assert seen[60:].tolist() == [3] * 60
    late = plan.steps_in(1) + 5
    assert lists(again.packs_of(late)) == lists(plan.packs_of(late))


def test_no_piece_is_carried_for_ever():
    """Pieces of just over half a pack go together with nothing, and still come to their turn."""
    lengths = np.full(400, 9, dtype=np.int32)
    plan = epoch_plan(lengths, [400], plan_settings(window=10), 0)
    plan.build_index()
    _, pieces, ages = plan._carried
    assert ages.max() == MAX_AGE
    assert np.bincount(pieces).max() == MAX_AGE
    assert plan.num_packs == 400
    first = {window: int(plan._first_pack[window]) for window in range(plan.num_windows + 1)}
    assert first[MAX_AGE] == 0
    assert first[MAX_AGE + 1] == 10


def test_the_age_cap_holds_for_ordinary_lengths():
    plan = epoch_plan(like_sft(20_000), [20_000], plan_settings(seq_len=4096), 0)
    plan.build_index()
    _, pieces, ages = plan._carried
    assert 0 < ages.max() <= MAX_AGE
    assert np.bincount(pieces).max() <= MAX_AGE


def test_packs_before_the_last_window_are_well_filled_or_old():
    lengths = like_sft(5000)
    plan = epoch_plan(lengths, [5000], plan_settings(seq_len=4096, window=500), 0)
    plan.build_index()
    bounds, pieces, ages = plan._carried
    for window in range(plan.num_windows - 1):
        part = slice(bounds[window], bounds[window + 1])
        old = set(pieces[part][ages[part] == MAX_AGE].tolist())
        for pack in lists(plan._window(window)):
            assert lengths[pack].sum() >= WELL_FILLED * 4096 or old & set(pack)


def test_a_step_is_found_over_several_epochs_with_short_last_batches(make_plan):
    plan = make_plan(np.full(10, 16), window=3)
    assert [plan.steps_of(n) for n in range(3)] == [3, 3, 3]
    assert [plan.steps_in(n) for n in range(4)] == [0, 3, 6, 9]
    assert [plan.locate(step) for step in (0, 2, 3, 5, 6)] == [
        StepRange(0, 0, 4),
        StepRange(0, 8, 10),
        StepRange(1, 0, 4),
        StepRange(1, 8, 10),
        StepRange(2, 0, 4),
    ]
    assert [plan.cursor(done) for done in (0, 1, 2, 3, 4, 6)] == [
        Cursor(0, 0),
        Cursor(0, 4),
        Cursor(0, 8),
        Cursor(0, 10),
        Cursor(1, 4),
        Cursor(1, 10),
    ]


def test_a_fresh_plan_finds_a_late_step_and_then_an_early_one(make_plan):
    lengths = some_lengths(90)
    plan, other = make_plan(lengths), make_plan(lengths)
    places = [plan.locate(step) for step in range(60)]
    for step in (59, 0, 31, 30, 58, 1):
        assert other.locate(step) == places[step]
    assert {place.epoch for place in places} >= {0, 1, 2, 3}


def test_epochs_may_differ_in_their_number_of_packs(make_plan):
    plan = make_plan(some_lengths(400), window=20, global_batch_size=1)
    numbers = {plan.epoch(n).num_packs for n in range(6)}
    assert len(numbers) > 1
    ends = [plan.steps_in(n) for n in range(1, 7)]
    for epoch, end in enumerate(ends):
        assert plan.locate(end - 1).epoch == epoch
        assert plan.locate(end - 1).last == plan.epoch(epoch).num_packs
        assert plan.locate(end) == StepRange(epoch + 1, 0, 1)


def test_the_last_batch_of_an_epoch_is_short_and_is_not_dropped(make_plan):
    plan = make_plan(np.full(9, 16))
    sizes = [plan.packs_of(step).num_packs for step in range(6)]
    assert sizes == [4, 4, 1, 4, 4, 1]
    assert sorted(np.concatenate([plan.packs_of(step).items for step in range(3)])) == [*range(9)]


def test_a_batch_larger_than_the_epoch_is_the_epoch(make_plan):
    plan = make_plan(some_lengths(5), global_batch_size=100)
    assert [plan.steps_in(n) for n in (1, 2, 3)] == [1, 2, 3]
    assert sorted(plan.packs_of(1).items) == [0, 1, 2, 3, 4]


def test_a_step_may_reach_over_more_windows_than_are_kept(make_plan):
    plan = make_plan(some_lengths(500), window=3, global_batch_size=300)
    read = [pack for step in range(plan.steps_of(0)) for pack in lists(plan.packs_of(step))]
    assert read == packs_of_epoch(plan, 0)


def test_reading_at_random_gives_what_reading_in_order_gives(make_plan):
    lengths = some_lengths(500)
    plan, other = make_plan(lengths, window=7), make_plan(lengths, window=7)
    in_order = {step: lists(packing) for step, packing in plan.steps(0, 150)}
    for step in np.random.default_rng(1).permutation(150).tolist():
        assert lists(other.packs_of(step)) == in_order[step]


@pytest.mark.parametrize("shard_sizes", [[0], [0, 0]])
def test_a_training_set_without_pieces_is_refused(make_plan, shard_sizes):
    plan = make_plan(np.empty(0), shard_sizes)
    assert plan.steps_of(0) == 0
    for ask in (lambda: plan.steps_in(1), lambda: plan.locate(0)):
        with pytest.raises(DataError, match="holds no pack"):
            ask()


def test_the_index_is_written_once_and_read_by_the_next(make_plan, monkeypatch):
    plan = make_plan(some_lengths(50))
    packs = packs_of_epoch(plan, 0)
    monkeypatch.setattr(EpochPlan, "build_index", None)
    assert packs_of_epoch(DataPlan(plan.split, plan.settings), 0) == packs


def test_plans_of_other_settings_do_not_share_an_index(make_plan):
    plan = make_plan(some_lengths(50))
    packs_of_epoch(plan, 0)
    changes = {"seq_len": 17, "window": 5, "packing": False, "shuffle": False, "seed": 1}
    for name, value in changes.items():
        other = DataPlan(plan.split, plan_settings(**{name: value}))
        assert sorted(pieces_of(other, 0)) == list(range(50))
        assert packs_of_epoch(other, 0) != packs_of_epoch(plan, 0)


def test_a_writer_that_died_before_does_not_stop_the_next(make_plan, monkeypatch):
    """In containers a process started again often has the same id."""
    plan = make_plan(some_lengths(50))
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            plan.epoch(0)
    assert sorted(pieces_of(DataPlan(plan.split, plan.settings), 0)) == list(range(50))


def test_an_index_that_a_full_disk_does_not_take_is_kept_in_memory(make_plan, monkeypatch):
    plan = make_plan(some_lengths(50))
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", no_space)
        packs = packs_of_epoch(plan, 0)
    assert written(plan.split.workspace) == []
    assert packs_of_epoch(DataPlan(plan.split, plan.settings), 0) == packs
    assert written(plan.split.workspace) == ["epoch-00000"]


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupted(*_):
    raise KeyboardInterrupt


def test_two_processes_that_index_at_once_do_not_clash(tmp_path):
    split = LengthsOnly(tmp_path, some_lengths(200))
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    arguments = (split, plan_settings(), 20, barrier, results)
    processes = [context.Process(target=index_epochs, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    plan = DataPlan(split, plan_settings())
    assert found == [[plan.steps_of(n) for n in range(20)]] * 2
    assert written(tmp_path) == [f"epoch-{number:05d}" for number in range(20)]


def test_two_threads_that_index_at_once_do_not_clash(tmp_path):
    split = LengthsOnly(tmp_path, some_lengths(200))
    barrier, results = threading.Barrier(2), queue.Queue()
    arguments = (split, plan_settings(), 20, barrier, results)
    threads = [threading.Thread(target=index_epochs, args=arguments) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.get_nowait() == results.get_nowait()
    assert written(tmp_path) == [f"epoch-{number:05d}" for number in range(20)]


def written(path):
    return sorted(found.name for found in (path / "orders").glob("*/*"))
