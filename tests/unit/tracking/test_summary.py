import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from pliant.tracking import Summary, loss_plot, summarize, write_summary


def attempt(step: int, cause: str, world_size: int) -> dict[str, Any]:
    return {"kind": "attempt", "time": 0.0, "step": step, "cause": cause, "world_size": world_size}


def steps(first: int, last: int, loss: float) -> list[dict[str, Any]]:
    return [
        {
            "kind": "step",
            "time": 0.0,
            "step": n,
            "samples": 10,
            "tokens": 90,
            "capacity": 120,
            "metrics": {"loss": loss - n, "samples_per_s": float(n), "tokens_per_s": 9.0 * n},
        }
        for n in range(first, last + 1)
    ]


def evaluation(step: int, loss: float) -> dict[str, Any]:
    return {"kind": "evaluation", "time": 0.0, "step": step, "metrics": {"eval_loss": loss}}


@pytest.fixture
def events() -> list[dict[str, Any]]:
    """50 steps and a failure; from 40 to 45 and another; from 40 to 60; then smaller, to 70."""
    return [
        {"kind": "job", "time": 0.0, "pid": 1},
        {"kind": "data", "time": 0.0, "step": 0, "metrics": {"data/tokens": 12.0}},
        attempt(0, "start", 4),
        *steps(1, 50, 1000.0),
        evaluation(50, 9.0),
        attempt(40, "failure", 4),
        *steps(41, 45, 2000.0),
        attempt(40, "failure", 4),
        *steps(41, 60, 3000.0),
        evaluation(55, 7.0),
        attempt(60, "resize", 2),
        *steps(61, 70, 3000.0),
    ]


def test_the_summary_counts_redone_steps_once(events: list[dict[str, Any]]) -> None:
    summary = summarize(
        events, state="finished", samples_missing=1, samples_duplicated=2, mlflow_run_id="r"
    )
    assert summary == Summary(
        steps=70,
        first_loss=999.0,
        last_loss=2930.0,
        eval_loss=7.0,
        samples=700,
        tokens=6300,
        samples_per_s=35.5,
        tokens_per_s=319.5,
        fill_ratio=0.75,
        world_sizes=(4, 2),
        restarts=2,
        resizes=1,
        steps_lost=15,
        seconds_lost=0.0,
        seconds_resizing=0.0,
        steps_skipped=0,
        damages=0,
        data={"tokens": 12},
        samples_missing=1,
        samples_duplicated=2,
        mlflow_run_id="r",
        state="finished",
        reason=None,
    )


def test_time_is_lost_by_failures_and_by_what_is_done_again_and_resizes_count_apart() -> None:
    def step(number: int, time: float) -> dict[str, Any]:
        metrics = {"step_time_s": 2.0, "data_wait_s": 0.5}
        return {"kind": "step", "time": time, "step": number, "metrics": metrics}

    summary = summarize(
        [
            attempt(0, "start", 2),
            step(1, 10.0),
            step(2, 12.0),
            {"kind": "skip", "time": 12.0, "step": 2, "reason": "The loss is nan."},
            {"kind": "restart", "time": 13.0, "step": 2, "reason": "a worker died"},
            {"kind": "damage", "time": 14.0, "text": "a file is missing"},
            {**attempt(1, "failure", 2), "time": 14.5},
            step(2, 17.0),
            {"kind": "resize", "time": 18.0, "step": 2, "from": 2, "to": 1, "reason": "asked"},
            {**attempt(2, "resize", 1), "time": 18.75},
            {"kind": "restart", "time": 20.0, "step": 2, "reason": "the driver died with it"},
            {"kind": "job", "time": 500.0, "pid": 2},
            {**attempt(2, "continued", 1), "time": 510.0},
        ],
        state="FINISHED",
    )
    assert summary.steps_lost == 1
    assert summary.seconds_lost == 1.5 + 2.5
    assert summary.seconds_resizing == 0.75
    assert (summary.steps_skipped, summary.damages) == (1, 1)


def test_a_run_that_ends_right_after_a_restart_stands_at_its_checkpoint() -> None:
    lost = [attempt(0, "start", 2), *steps(1, 9, 50.0), evaluation(9, 3.0)]
    summary = summarize([*lost, attempt(5, "failure", 2)], state="failed", reason="disk full")
    assert (summary.steps, summary.last_loss, summary.steps_lost) == (5, 45.0, 4)
    assert summary.eval_loss is None
    assert (summary.state, summary.reason) == ("failed", "disk full")


def test_a_continued_run_loses_no_steps_and_counts_no_restart() -> None:
    events = [attempt(0, "start", 2), *steps(1, 9, 50.0), attempt(9, "continued", 2)]
    summary = summarize(events, state="finished")
    assert (summary.restarts, summary.resizes, summary.steps_lost) == (0, 0, 0)
    assert summary.world_sizes == (2,)


def test_an_empty_journal_has_a_summary() -> None:
    summary = summarize([], state="failed", reason="no cluster")
    assert (summary.steps, summary.samples, summary.first_loss) == (0, 0, None)
    assert (summary.fill_ratio, summary.samples_per_s, summary.world_sizes) == (None, None, ())


def test_the_file_has_every_field_in_order_and_null_for_what_is_not_finite(tmp_path: Path) -> None:
    events = [attempt(0, "start", 1), *steps(1, 2, float("nan"))]
    write_summary(tmp_path / "new" / "summary.json", summarize(events, state="failed"))
    written = json.loads((tmp_path / "new" / "summary.json").read_text())
    assert list(written) == [field.name for field in dataclasses.fields(Summary)]
    assert written["last_loss"] is None
    assert written["world_sizes"] == [1]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["summary.json"]


@pytest.mark.parametrize("kept", [0, 3, None])
def test_the_plot_is_a_png(tmp_path: Path, events: list[dict[str, Any]], kept: int | None) -> None:
    loss_plot(events[:kept], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
