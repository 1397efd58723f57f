"""The record of what was trained, and what an audit says of it."""

import numpy as np
import pytest

from fakes.splits import InMemorySplit, some_pieces
from pliant.data.blocks import Rows, assemble_steps
from pliant.data.ledger import Audit, Ledger, audit, write_ledger
from pliant.data.plan import DataPlan, PlanSettings
from pliant.topology import BatchShape, Place

STEPS = 12
SHAPE = BatchShape(global_batch_size=3, micro_batch_size=1, seq_len=16)


@pytest.fixture
def plan(tmp_path):
    lengths = np.random.default_rng(0).integers(2, 10, 40)
    split = InMemorySplit(tmp_path / "split", some_pieces(lengths))
    plan = DataPlan(split, PlanSettings(SHAPE.seq_len, 3, 20, True, True, 0))
    assert plan.steps_in(1) < STEPS  # the run reaches into the second epoch
    return plan


@pytest.fixture
def write(tmp_path):
    """A ledger file of (step, pieces) entries."""
    number = iter(range(100))

    def write(*entries):
        path = tmp_path / "ledger" / f"{next(number)}.parquet"
        write_ledger(path, [[(step, np.array(ids, dtype=np.int64)) for step, ids in entries]])
        return path

    return write


def planned(plan, first=0, last=STEPS):
    return {step: plan.packs_of(step).items.tolist() for step in range(first, last)}


def recorded(plan, world_size, first=0, last=STEPS):
    """What every rank's ledger holds once it has run its share of the steps."""
    ledgers = [Ledger() for _ in range(world_size)]
    for step in range(first, last):
        rows = Rows.of(assemble_steps(plan, step, step + 1, 0), SHAPE.seq_len)
        where = plan.locate(step)
        size = where.last - where.first
        for rank, ledger in enumerate(ledgers):
            place = Place(rank, world_size)
            ledger.record(step, rows.step_batch(0, size, SHAPE, place, where.epoch, where.last))
    return [ledger.take() for ledger in ledgers]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_run_that_followed_the_plan_is_exact(plan, tmp_path, world_size):
    path = tmp_path / "ledger.parquet"
    assert write_ledger(path, recorded(plan, world_size)) == (0, STEPS - 1)
    found = audit([path], plan, STEPS)
    assert found == Audit(steps=STEPS, missing=0, duplicated=0, misplaced=0)
    assert found.is_exact


def test_files_of_several_attempts_of_several_sizes_add_up(plan, tmp_path):
    parts = [(3, 0, 4), (1, 4, 5), (2, 5, STEPS)]
    paths = [tmp_path / f"{first}.parquet" for _, first, _ in parts]
    for path, (world_size, first, last) in zip(paths, parts, strict=True):
        assert write_ledger(path, recorded(plan, world_size, first, last)) == (first, last - 1)
    assert audit(paths, plan, STEPS).is_exact
    assert audit(reversed(paths), plan, STEPS).is_exact
    assert not audit(paths[1:], plan, STEPS).is_exact


def test_taking_what_was_recorded_leaves_nothing(plan):
    ledger = Ledger()
    rows = Rows.of(assemble_steps(plan, 0, 1, 0), SHAPE.seq_len)
    ledger.record(0, rows.step_batch(0, 3, SHAPE, Place(0, 1), 0, 3))
    assert [step for step, _ in ledger.take()] == [0]
    assert ledger.take() == []


def test_the_order_of_pieces_within_a_step_does_not_matter(plan, write):
    path = write(*((step, ids[::-1]) for step, ids in planned(plan).items()))
    assert audit([path], plan, STEPS).is_exact


def test_a_missing_piece_is_counted(plan, write):
    run = planned(plan)
    run[3] = run[3][1:]
    assert audit([write(*run.items())], plan, STEPS) == Audit(STEPS, 1, 0, 0)


def test_a_missing_step_is_counted_by_its_pieces(plan, write):
    run = planned(plan)
    lost = len(run.pop(5))
    found = audit([write(*run.items())], plan, STEPS)
    assert found == Audit(STEPS, missing=lost, duplicated=0, misplaced=0)
    assert not found.is_exact


def test_a_piece_trained_twice_is_counted(plan, write):
    run = planned(plan)
    run[3] = [*run[3], run[3][0]]  # within the step
    run[4] = [*run[4], run[2][0]]  # from another step
    assert audit([write(*run.items())], plan, STEPS) == Audit(STEPS, 0, 2, 0)


def test_a_step_trained_twice_is_counted_by_its_pieces(plan, write):
    run = planned(plan)
    again = write((4, run[4]))
    found = audit([write(*run.items()), again], plan, STEPS)
    assert found == Audit(STEPS, 0, len(run[4]), 0)


def test_a_piece_in_the_wrong_step_is_misplaced_and_neither_missing_nor_duplicated(plan, write):
    run = planned(plan)
    run[0], run[1] = run[0][1:], [*run[1], run[0][0]]
    assert audit([write(*run.items())], plan, STEPS) == Audit(STEPS, 0, 0, 1)


def test_steps_that_changed_places_are_misplaced(plan, write):
    run = planned(plan)
    run[0], run[1] = run[1], run[0]
    assert audit([write(*run.items())], plan, STEPS).misplaced == len(run[0]) + len(run[1])


def test_a_piece_trained_in_the_wrong_epoch_is_missing_from_its_own(plan, write):
    run = planned(plan)
    first_of_second = plan.steps_in(1)
    moved = run[0][0]
    run[0] = run[0][1:]
    run[first_of_second] = [*run[first_of_second], moved]
    assert audit([write(*run.items())], plan, STEPS) == Audit(STEPS, 1, 1, 0)


def test_a_piece_that_the_plan_does_not_know_is_counted(plan, write):
    run = planned(plan)
    run[0] = [*run[0][1:], 10_000]
    assert audit([write(*run.items())], plan, STEPS) == Audit(STEPS, 1, 1, 0)


def test_faults_of_all_kinds_are_told_apart(plan, write):
    run = planned(plan)
    lost, twice, moved = run[0][0], run[1][0], run[2][0]
    run[0] = run[0][1:]
    run[1] = [*run[1], twice]
    run[2], run[3] = run[2][1:], [*run[3], moved]
    assert lost != twice != moved
    assert audit([write(*run.items())], plan, STEPS) == Audit(STEPS, 1, 1, 1)


def test_steps_beyond_the_end_count_as_duplicated(plan, write):
    run = planned(plan, 0, STEPS + 2)
    beyond = len(run[STEPS]) + len(run[STEPS + 1])
    assert audit([write(*run.items())], plan, STEPS) == Audit(STEPS, 0, beyond, 0)


def test_without_a_ledger_everything_is_missing(plan):
    number = sum(map(len, planned(plan).values()))
    assert audit([], plan, STEPS) == Audit(STEPS, number, 0, 0)
    assert audit([], plan, 0) == Audit(0, 0, 0, 0)


def test_a_rank_that_ran_only_dummies_is_recorded_without_pieces(plan, write):
    run = planned(plan)
    idle = write(*((step, []) for step in run))
    assert audit([write(*run.items()), idle], plan, STEPS).is_exact
