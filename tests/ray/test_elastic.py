"""Jobs on an embedded Ray that lose workers, change their size, hang and diverge."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.faults import Faults
from fakes.watched import NEWS_S, STEPS, WatchedJob, check, losses
from pliant.checkpoints.reader import committed
from pliant.checkpoints.writer import age
from pliant.errors import Interrupted, UserError
from pliant.files import write_atomically
from pliant.training import wanted

pytestmark = pytest.mark.usefixtures("embedded_ray")

Start = Callable[..., WatchedJob]


def test_killed_workers_cost_no_step_and_the_survivor_is_used_again(
    start: Start, undisturbed: dict[int, float]
) -> None:
    drills = [{"rank": 0, "step": 3}, {"rank": 1, "step": 9}]
    job = start("killed", {"elastic": {"spares": 1, "drills": drills}})
    check(job.outcome(), restarts=2, resizes=0, world_sizes=(2,))
    assert losses(job.run_dir) == pytest.approx(undisturbed, rel=1e-5)
    first, second, third = ({*pids.values()} for pids in job.pids())
    assert len(first & second) == len(second & third) == 1
    parked = job.events("timeline", what="parked")
    assert [(event["kept"], event["of"]) for event in parked[:2]] == [(1, 2), (1, 2)]
    for step, rank in ((3, 0), (9, 1)):
        assert f"step {step}: the worker of rank {rank} died" in job.lines
        assert f"training goes on from step {step} with 2 workers" in job.lines


def test_a_job_that_is_resized_goes_on_where_it_was_whatever_happens_meanwhile(
    start: Start, runs_dir: Path, faults: Faults, undisturbed: dict[int, float]
) -> None:
    elastic = {"max_workers": 4, "allowed_workers": [1, 2, 3], "handshake_timeout_s": 3.0}
    (runs_dir / "resized").mkdir()
    write_atomically(runs_dir / "resized" / wanted.FILE, b'{"workers": 2}')
    job = start("resized", {"elastic": elastic}, faults.spec(hold=[2, 5, 8, 11]))

    # As it should be: 2 -> 1 -> 3.
    ask_for(job, 1, faults, held_at=2)
    faults.release(2)
    job.wait_for_workers(1)
    with pytest.raises(UserError, match=r"4 workers were asked for, and resized may have 1, 2, 3"):
        wanted.resize(job.run_dir, 4, wait_s=0)
    ask_for(job, 3, faults, held_at=5)
    faults.release(5)
    job.wait_for_workers(3)
    assert not job.events("restart")

    # A worker dies before it could answer.
    ask_for(job, 2, faults, held_at=8)
    os.kill(job.pids()[-1][2], signal.SIGKILL)
    faults.release(8)
    job.wait_for_workers(2)
    assert [event["step"] for event in job.events("restart")] == [8]

    # The workers do not answer in time.
    ask_for(job, 1, faults, held_at=11)
    job.wait_for_workers(1)
    faults.release(11)

    # The two crashes struck while the workers were held, before the snapshots of steps 8 and 11.
    check(job.outcome(), restarts=2, resizes=2, steps_lost=2, world_sizes=(2, 1, 3, 2, 1))
    assert losses(job.run_dir) == pytest.approx(undisturbed, rel=1e-5)
    assert "step 2: resizing from 2 to 1 workers: 1 worker was asked for" in job.lines
    assert "step 5: resizing from 1 to 3 workers: 3 workers were asked for" in job.lines
    assert "step 8: the worker of rank 2 died" in job.lines
    assert any("the workers did not end within 3 s" in line for line in job.lines)
    assert "step 11: the workers did not answer a resize in time" in job.lines
    # Newcomers join the process that is there; two are left when the third is killed.
    first, alone, three, two, last = ({*pids.values()} for pids in job.pids())
    assert alone < first
    assert alone < three
    assert two < three
    assert not last & two


def test_a_worker_that_is_killed_while_it_saves_leaves_no_checkpoint_of_that_step(
    start: Start, faults: Faults, undisturbed: dict[int, float]
) -> None:
    job = start("saving", faults.spec(kill_saving=(0, 8)))
    outcome = job.outcome()
    check(outcome, restarts=1, steps_lost=outcome.summary.steps_lost, world_sizes=(2,))
    assert outcome.summary.steps_lost <= 1
    assert "the worker of rank 0 died" in " ".join(job.lines)
    assert losses(job.run_dir) == pytest.approx(undisturbed, rel=1e-5)
    saved = [age(name) for name in committed(job.run_dir / "checkpoints")]
    assert (1, 8) not in saved
    assert (2, STEPS) in saved
    assert not list((job.run_dir / "checkpoints").rglob("*.tmp"))


def ask_for(job: WatchedJob, num_workers: int, faults: Faults, held_at: int) -> None:
    """Returns when the workers, which are held after that step, know that they are to end."""
    job.wait_for(f"hold at step {held_at}", lambda: faults.is_held(held_at))
    job.wait_for("all of them", lambda: faults.is_held(held_at, len(job.pids()[-1])))
    said = wanted.resize(job.run_dir, num_workers, wait_s=0)
    assert said.startswith(f"resized was asked for {num_workers} worker")
    job.wait_for("resize", lambda: job.events("resize", step=held_at, to=num_workers))
    time.sleep(NEWS_S)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_ended_and_the_job_goes_on(
    start: Start, faults: Faults, undisturbed: dict[int, float]
) -> None:
    elastic = {"hang_floor_s": 5.0, "alarm_after_s": 6.0, "reuse_workers": False}
    job = start("hung", {"elastic": elastic}, faults.spec(pace_s=0.5, freeze=(1, 7)))
    check(job.outcome(), restarts=1, world_sizes=(2,))
    assert losses(job.run_dir) == pytest.approx(undisturbed, rel=1e-5)
    told = [event["text"] for event in job.events("alarm", what="hang")]
    hangs = r"The group hangs: rank 1 (is in phase \w+ of step|gives no sign of life for) \d+.*"
    assert len(told) == 2
    assert re.fullmatch(f"{hangs} The ranks are asked for their stacks.", told[0])
    assert re.fullmatch(f"the worker of rank 1 is ended: {hangs}", told[1])
    assert "step 7: the worker of rank 1 died" in job.lines
    stacks = (job.run_dir / "stacks" / "rank-00000.txt").read_text()
    assert "rank 0 of 2" in stacks
    assert "phase collective of step 8" in stacks
    assert not (job.run_dir / "stacks" / "rank-00001.txt").exists()
    standstill = [event["text"] for event in job.events("alarm", what="no progress")]
    assert any(text.startswith("There has been no new step after step ") for text in standstill)
    # Without reuse the next group consists of new processes.
    first, second = ({*pids.values()} for pids in job.pids())
    assert not first & second
    assert job.events("timeline", what="parked")[0]["kept"] == 0


@pytest.mark.slow
def test_a_straggler_is_named_and_replaced_where_that_is_wanted(
    start: Start, faults: Faults, undisturbed: dict[int, float]
) -> None:
    elastic = {"straggler_factor": 2.0, "straggler_steps": 4, "replace_stragglers": True}
    job = start("slow", {"elastic": elastic}, faults.spec(slow=(1, 0.3)))
    outcome = job.outcome()
    check(outcome, restarts=1, steps_lost=outcome.summary.steps_lost, world_sizes=(2,))
    assert outcome.summary.steps_lost <= 1
    assert losses(job.run_dir) == pytest.approx(undisturbed, rel=1e-5)
    (named,) = job.events("alarm", what="straggler")
    assert re.match(r"Rank 1 on node \w+ is a straggler: .* in the last 4 steps", named["text"])
    first, second = job.pids()
    assert first[1] not in second.values()
    assert first[0] in second.values()


@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_the_update_of_a_step_that_is_not_a_number_is_left_out(
    policy: str, start: Start, faults: Faults, undisturbed: dict[int, float]
) -> None:
    changes = {"training": {"on_divergence": policy}, "elastic": {"max_workers": 1}}
    job = start(policy, changes, faults.spec(nan=7))
    lost = {"skip": 0, "rewind": 2}[policy]  # done were 6, saved 4
    check(job.outcome(), restarts=lost > 0, steps_lost=lost)
    skips = job.events("skip")
    assert [event["step"] for event in skips] == [7]
    found = losses(job.run_dir)
    before, after = range(1, 7), range(9, STEPS + 1)
    assert [found[n] for n in before] == pytest.approx([undisturbed[n] for n in before], rel=1e-5)
    # One update less: the steps from then on are other ones, by more than rounding.
    assert all(abs(found[n] - undisturbed[n]) > 1e-4 for n in after)
    if policy == "skip":
        assert skips[0]["reason"] == "The loss of step 7 is nan."
    else:
        assert found[7] == pytest.approx(undisturbed[7], rel=1e-5)
        assert "training goes on from step 4 with 1 worker, 2 done again" in job.lines


def test_an_error_that_comes_again_and_again_ends_the_job_with_that_diagnosis(
    start: Start, faults: Faults
) -> None:
    changes = {"elastic": {"max_workers": 1, "max_restarts": 10}}
    job = start("unlucky", changes, faults.spec(fail=3))
    outcome = job.outcome()
    check(outcome, state="FAILED", steps=2, restarts=2)
    assert outcome.error is not None
    assert outcome.error.exit_code == 3
    assert (
        "Step 2 failed 3 times in a row in the same way: "
        "rank 0 failed: ArithmeticError: no luck in step 3, "
    ) in outcome.error.message


@pytest.mark.slow
def test_a_job_is_stopped_at_any_time_and_goes_on_when_it_is_started_again(
    start: Start, faults: Faults, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    changes = [
        {"elastic": {"max_workers": 1}},
        {"training": {"eval_every": 3}},
        faults.spec(hold_evaluation=True),
    ]
    while_preparing = start("stopped", *changes, runs_dir=tmp_path)
    while_preparing.stop.set()
    with pytest.raises(Interrupted, match="the finished chunks are kept"):
        while_preparing.outcome()
    assert not while_preparing.run_dir.exists()

    while_starting = start("stopped", *changes, runs_dir=tmp_path)
    while_starting.wait_for("start", lambda: while_starting.events("job"))
    while_starting.stop.set()
    check(while_starting.outcome(), state="INTERRUPTED", steps=0)

    while_evaluating = start("stopped", *changes, runs_dir=tmp_path)
    while_evaluating.wait_for("evaluation", lambda: faults.is_held("evaluation"))
    while_evaluating.stop.set()
    while_evaluating.wait_for_line("stopping after this step, with a checkpoint")
    time.sleep(NEWS_S)
    faults.release("evaluation")
    outcome = while_evaluating.outcome()
    stopped_at = outcome.summary.steps
    assert stopped_at in (4, 5)
    check(outcome, state="INTERRUPTED", steps=stopped_at)

    last = start("stopped", *changes, runs_dir=tmp_path)
    check(last.outcome(), restarts=0, world_sizes=(1,))
    assert f"training goes on from step {stopped_at} with 1 worker" in last.lines
    assert losses(last.run_dir) == pytest.approx(undisturbed, rel=1e-5)
