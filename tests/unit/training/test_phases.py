"""What a rank tells of itself: phases, times of steps, beats, and its stacks when it is asked."""

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from fakes.ranks import run_ranks
from fakes.waiting import SLEEP_S, steps_beside_a_sleeper
from pliant.elastic.beats import StepTimes
from pliant.training.phases import COLLECTIVES, Heart, Member, Phases, marked_collectives

MEMBER = Member(attempt=4, rank=1, world_size=3, node="some-node")


class Clock:
    """Moves when it is told to."""

    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def phases(clock):
    phases = Phases(MEMBER, clock)
    phases.resumed(7)
    return phases


def spend(phases, clock, **seconds):
    for phase, duration in seconds.items():
        phases.enter(phase)
        clock.now += duration


def test_a_step_is_told_once_with_its_seconds_in_each_phase(phases, clock):
    spend(phases, clock, data=1.0, compute=2.0, collective=0.5)
    spend(phases, clock, compute=2.0, collective=0.25)
    with phases.during("checkpoint"):
        clock.now += 8.0
    clock.now += 0.25
    phases.step_done(8)
    spend(phases, clock, data=1.5)
    beat = phases.beat()
    assert (beat.attempt, beat.rank, beat.world_size, beat.node) == (4, 1, 3, "some-node")
    assert (beat.step, beat.phase, beat.phase_s, beat.collectives) == (8, "data", 1.5, 3)
    seconds = {"data": 1.0, "compute": 4.0, "collective": 1.0, "checkpoint": 8.0}
    assert beat.steps == (StepTimes(8, seconds),)
    assert phases.beat().steps == ()


def test_each_batch_of_an_evaluation_begins_its_phase_anew(phases, clock):
    with phases.during("evaluation"):
        for batch in ("one", "two"):
            clock.now += 40.0
            assert phases.again(batch) == batch
            assert (phases.beat().phase, phases.beat().phase_s) == ("evaluation", 0.0)
    phases.step_done(8)
    assert phases.beat().steps == (StepTimes(8, {"evaluation": 80.0, "data": 0.0}),)


def test_the_start_lasts_until_training_goes_on_and_belongs_to_no_step(clock):
    phases = Phases(MEMBER, clock)
    clock.now += 30.0
    beat = phases.beat()
    assert (beat.step, beat.phase, beat.phase_s) == (0, "start", 30.0)
    phases.resumed(7)
    clock.now += 2.0
    phases.step_done(8)
    assert phases.beat().steps == (StepTimes(8, {"data": 2.0}),)


class Device:
    """An accelerator that is 40 s behind when the first collective begins."""

    def __init__(self):
        self.calls = []

    def begin(self):
        self.calls.append("begin")

    def end(self):
        self.calls.append("end")

    def take_seconds(self):
        return 40.0 if self.calls else None


def test_where_the_host_runs_ahead_the_accelerator_is_timed(clock):
    device = Device()
    phases = Phases(MEMBER, clock, device)
    phases.resumed(0)
    spend(phases, clock, data=1.0)
    phases.step_done(1)
    spend(phases, clock, compute=0.5, collective=41.0)
    phases.step_done(2)
    assert device.calls == ["begin", "end"]
    first, second = phases.beat().steps
    assert first.seconds == {"data": 1.0}
    assert second.seconds == {"data": 0.0, "compute": 40.0, "collective": 41.0}


def test_an_error_within_a_phase_ends_the_phase(phases):
    with pytest.raises(ValueError, match="no"), phases.during("evaluation"):
        raise ValueError("no")
    assert phases.phase == "data"


def test_collectives_are_marked_whoever_calls_them_and_restored(phases, clock):
    def reduce(x, factor):
        clock.now += 3.0
        return phases.phase, x * factor

    def gather():
        return fake.all_reduce(1, factor=1)

    fake = SimpleNamespace(**dict.fromkeys(COLLECTIVES, reduce))
    fake.all_gather = gather
    phases.enter("compute")
    with marked_collectives(phases, fake):
        assert fake.all_reduce(4, factor=2) == ("collective", 8)
        assert fake.all_gather() == ("collective", 1)  # consists of another, and is one
        assert phases.phase == "compute"
    assert fake.all_reduce is reduce
    assert fake.all_gather is gather
    phases.step_done(8)
    (times,) = phases.beat().steps
    assert times.seconds["collective"] == 6.0
    assert phases.beat().collectives == 2


def test_all_marked_collectives_exist():
    import torch.distributed as dist

    assert all(callable(getattr(dist, name)) for name in COLLECTIVES)


def test_a_mark_costs_next_to_nothing():
    phases = Phases(MEMBER)

    def thousand_marks():
        began = time.perf_counter()
        for _ in range(500):
            phases.enter("compute")
            phases.enter("collective")
        return time.perf_counter() - began

    def thousand_calls():
        began = time.perf_counter()
        for _ in range(1000):
            time.monotonic()
            {}.get("compute", 0.0)
        return time.perf_counter() - began

    ratio = min(thousand_marks() for _ in range(9)) / min(thousand_calls() for _ in range(9))
    assert ratio < 30  # a few dictionary and clock calls; no lock, no file, no message


class Recorder:
    """Hears beats; asks for a dump after the second, and fails at times."""

    def __init__(self):
        self.beats = []
        self.heard_dump = threading.Event()

    def __call__(self, beat):
        self.beats.append(beat)
        if len(self.beats) == 1:
            raise ConnectionError("away")
        if beat.dumps:
            self.heard_dump.set()
        return beat.dumps == 0


def test_a_heart_beats_survives_a_lost_recorder_and_writes_the_stacks(tmp_path):
    def sleeping_soundly():
        asleep.wait(30.0)

    asleep = threading.Event()
    sleeper = threading.Thread(target=sleeping_soundly, daemon=True)
    sleeper.start()
    recorder, stacks = Recorder(), tmp_path / "stacks" / "rank-1.txt"
    heart = Heart(Phases(MEMBER), recorder, stacks, every_s=0.01).start()
    assert recorder.heard_dump.wait(30.0)
    heart.close()
    asleep.set()
    text = stacks.read_text()
    assert "rank 1 of 3" in text
    assert "phase start of step 1" in text
    assert "sleeping_soundly" in text
    assert text.count("===") == 1
    assert recorder.beats[-1].phase == "end"
    count = len(recorder.beats)
    time.sleep(0.05)
    assert len(recorder.beats) == count, "it beats no more"


STUCK = """
import sys, time
from pathlib import Path
from pliant.training.phases import Heart, Member, Phases

def holding_on(text):  # a regular expression that backtracks keeps the interpreter to itself
    import re
    return re.match(r"(a+)+$", text)

phases = Phases(Member(1, 0, 1, "n"))
Heart(phases, lambda beat: False, Path(sys.argv[1]), every_s=0.1, silent_s=0.5).start()
time.sleep(0.3)
began = time.monotonic()
length = 20
while time.monotonic() - began < 2.0:
    holding_on("a" * length + "b")
    length += 1
"""


def test_a_process_ends_with_its_heart_and_one_that_holds_the_interpreter_is_seen(tmp_path):
    path = tmp_path / "rank-0.txt"
    subprocess.run([sys.executable, "-c", STUCK, str(path)], check=True, timeout=60)
    assert "holding_on" in path.with_suffix(".silent.txt").read_text()


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_waiting_within_deepspeed_is_told_from_computing(stage):
    (count, waiter), (other_count, sleeper) = run_ranks(steps_beside_a_sleeper, 2, stage)
    assert count == other_count > 0, "all ranks enter the same collectives"
    assert sleeper["compute"] > SLEEP_S > waiter["compute"]
    assert waiter["collective"] > SLEEP_S / 2
