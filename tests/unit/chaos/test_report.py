"""When two runs count as the same, and what a report says of faults."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from chaos.report import Run, cost_table, differences, line_of, weights_digest
from chaos.schedule import KillWorker, LockDisk, LoseNode
from chaos.strikes import Result
from fakes.jobs import tiny_spec
from fakes.runs import save_model, trained_model

WHOLE = {"samples_missing": 0, "samples_duplicated": 0, "state": "FINISHED", "reason": None}
RUN = Run("abc", {1: 2.0, 2: 1.5, 3: 1.25}, WHOLE)
KILLED = Result(KillWorker(1), step=17, back_s=2.5, steps_lost=1, worlds=(3,), facts="rank 1 of 3")


def test_equal_runs_have_no_difference():
    assert differences(RUN, RUN) == []


def test_every_difference_is_named():
    torn = Run(
        "abd",
        {1: 2.0, 2: 1.5000001},
        {"samples_missing": 2, "samples_duplicated": 1, "state": "FAILED", "reason": "no luck"},
    )
    assert differences(torn, RUN) == [
        "2 samples are missing",
        "1 samples are duplicated",
        "the job ended as FAILED: no luck",
        "the loss differs in 2 steps, first in step 2",
        "the final weights differ",
    ]


def test_the_digest_is_of_the_weights_alone(tmp_path: Path):
    spec = tiny_spec()
    for name, seed, step in (("a", 1, 4), ("b", 1, 8), ("c", 2, 4)):
        save_model(tmp_path / name, trained_model(spec, seed), step)
    first, later, other = (weights_digest(tmp_path / name) for name in "abc")
    assert first == later
    assert first != other


def test_a_fault_is_told_in_a_line():
    assert line_of(4, KILLED, "KillWorker rank=1") == (
        "  4  step 17: KillWorker rank=1 (rank 1 of 3), back after 2.5 s, 1 steps lost, "
        "workers -> 3"
    )
    quiet = Result(LockDisk(20), step=30, back_s=None, steps_lost=0, worlds=())
    assert line_of(5, quiet, "LockDisk steps=20") == "  5  step 30: LockDisk steps=20, 0 steps lost"


def test_costs_are_summed_up_by_kind():
    slow = replace(KILLED, back_s=4.5, steps_lost=2)
    lost = Result(LoseNode(0), step=40, back_s=None, steps_lost=0, worlds=(2,))
    console = Console(width=120)
    with console.capture() as shown:
        console.print(cost_table([KILLED, slow, lost]))
    rows = [line.split("  ") for line in shown.get().splitlines()]
    told = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert told[1] == ["KillWorker", "2", "3.5 [2.5 to 4.5]", "3, at most 2 at once"]
    assert told[2] == ["LoseNode", "1", "none needed", "0"]
