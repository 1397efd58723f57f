"""From a fault, or a wish, to the next optimizer step: pliant beside plain Ray Train, by stage.

One local cluster of several nodes, with every wait of Ray's turned down. In each round pliant and
the hand-written loop of `plain_ray` take turns on it: the same model size, the same number of
workers, the same faults. Each round gives one ratio for each case; the median and the spread over
the rounds are what counts, since the machine's speed drifts.

    kill rank 0, kill rank 1    SIGKILL to a worker, a step after a checkpoint
    lost node                   a node's processes get SIGKILL; training goes on with a worker less
    new node                    a node joins; training goes on with a worker more
    resize                      pliant is asked for one worker less and one more; plain Ray Train
                                cannot be asked, and a new node is what it is compared with

After a fault the time to the next step counts; of a change that was planned, the longest time
without a step, since training goes on while it is prepared. Plain Ray Train uses ZeRO stage 0, the
one whose checkpoints load on another number of workers without a conversion.

With --defaults, rounds of lost nodes follow on a cluster with the settings that Ray comes with.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import figures
import plain_ray
import ray
from pace import PACE_S
from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "runs" / "bench"
NUM_NODES = 2
CPUS_PER_WORKER = 2
"""A node has as many, so that it holds one worker; reading data has the head's CPU."""
SAVE_EVERY = 10
SEQ_LEN, ROWS = plain_ray.SEQ_LEN, plain_ray.GLOBAL_BATCH
"""A step takes a fraction of a second, so that what is compared is the recovery."""
SETTLE_S, SETTLE_STEPS = 25.0, SAVE_EVERY + 1
"""Faults are so far apart: spares have been filled up again, and a checkpoint was made."""
START_LIMIT_S, FAULT_LIMIT_S = 240.0, 240.0

STAGES = {
    "detected": "detection",
    "decided": "decision",
    "process started": "process start",
    "group up": "group set-up",
    "imports done": "imports",
    "engine ready": "engine",
    "loaded": "load",
    "step": "first step",
}
"""Moments in their order, and the stage that each one ends. A side that does not tell a moment has
its time counted in the next stage."""


@dataclass(frozen=True)
class Moment:
    """Something that a side wrote down."""

    time: float
    """Unix seconds."""
    what: str
    rank: int | None = None
    pid: int | None = None
    world: int | None = None
    step: int = 0


@dataclass(frozen=True)
class Recovery:
    """From a fault to the next optimizer step."""

    total_s: float
    pause_s: float
    """The longest time without a step on the way: what a change that was planned costs."""
    stages: dict[str, float]


def recovery(moments: list[Moment], since: float, world: int | None) -> Recovery | None:
    """What happened after `since` until the first step of a group, of size `world` where that is
    given; None where it has not come to that yet. A moment that every rank tells, or that comes
    again because an attempt failed, counts when it comes last; a fault is detected once."""
    after = sorted((m for m in moments if m.time > since), key=lambda moment: moment.time)
    loaded = [m for m in after if m.what == "loaded" and world in (None, m.world)]
    steps = [m for m in after if loaded and m.what == "step" and m.time >= loaded[0].time]
    if not steps:
        return None
    end = steps[0].time
    ends = {moment.what: moment.time for moment in after if moment.time <= end}
    detected = [moment.time for moment in after if moment.what == "detected"]
    ends |= {"detected": detected[0]} if detected else {}
    stages, before = {}, since
    for what, stage in STAGES.items():
        if what in ends:
            stages[stage] = max(0.0, ends[what] - before)
            before = max(before, ends[what])
    return Recovery(end - since, longest_pause(moments, since, end), stages)


def longest_pause(moments: list[Moment], since: float, end: float) -> float:
    """Between two steps, of which the second came after `since`."""
    steps = sorted({m.time for m in moments if m.what == "step" and m.time <= end})
    return max(b - a for a, b in pairwise(steps) if b > since)


class Side(Protocol):
    """A way to train, in a process of its own."""

    name: str

    def command(self, address: str, folder: Path) -> list[str]: ...

    def moments(self, folder: Path) -> list[Moment]: ...


@dataclass
class Plain:
    """`plain_ray`."""

    zero_stage: int
    tuned: bool = True
    name: str = "plain"

    def command(self, address: str, folder: Path) -> list[str]:
        return [
            *(sys.executable, str(ROOT / "benchmarks" / "plain_ray.py"), "--address", address),
            *("--workers", str(NUM_NODES - 1), str(NUM_NODES), "--save-every", str(SAVE_EVERY)),
            *("--events", str(folder / "events.jsonl"), "--storage", str(folder / "storage")),
            *("--zero-stage", str(self.zero_stage), "--cpus-per-worker", str(CPUS_PER_WORKER)),
            *([] if self.tuned else ["--defaults"]),
        ]

    def moments(self, folder: Path) -> list[Moment]:
        keep = ("time", "what", "rank", "pid", "world", "step")
        return [
            Moment(**{key: event[key] for key in keep if key in event})
            for event in read_lines(folder / "events.jsonl")
        ]


@dataclass
class Pliant:
    """`pliant run` with the demo's model."""

    name: str = "pliant"
    job: str = "bench-elastic"

    TIMELINE = {  # noqa: RUF012 - constant
        "decided": "decided",
        "workers are there": "process started",
        "process group is set up": "group up",
        "worker begins": "imports done",
        "engine is ready": "engine ready",
    }
    """pliant's words and ours."""

    def command(self, address: str, folder: Path) -> list[str]:
        settings = (
            f"name={self.job}",
            "training.steps=100000",
            "training.eval_every=100000",
            f"checkpoint.every={SAVE_EVERY}",
            f"data.seq_len={SEQ_LEN}",
            f"training.global_batch_size={ROWS}",
            "training.callbacks=[pace.Pace]",
            "elastic.drills=[]",
            f"elastic.min_workers={NUM_NODES - 1}",
            f"elastic.max_workers={NUM_NODES}",
            "elastic.max_restarts=100",
            "elastic.max_node_failures=100",
            f"resources.cpus_per_worker={CPUS_PER_WORKER}",
        )
        return [
            *(sys.executable, "-m", "pliant", "run", str(ROOT / "jobs" / "specs" / "demo.yaml")),
            *("--address", address, "--runs-dir", str(folder)),
            *(part for setting in settings for part in ("--set", setting)),
        ]

    def moments(self, folder: Path) -> list[Moment]:
        events = read_lines(folder / self.job / "events.jsonl")
        return [moment for event in events if (moment := self._moment(event)) is not None]

    def _moment(self, event: dict[str, Any]) -> Moment | None:
        what = {
            "restart": "detected",
            "resize": "detected",
            "attempt": "loaded",
            "step": "step",
            "timeline": self.TIMELINE.get(event.get("what", ""), ""),
        }.get(event["kind"], "")
        if not what:
            return None
        return Moment(
            time=event["time"],
            what=what,
            rank=event.get("rank"),
            pid=event.get("pid"),
            world=event.get("world_size"),
            step=event.get("step", 0),
        )

    def ask(self, num_workers: int) -> None:
        """What `pliant resize` does once its interpreter is up."""
        recorder = ray.get_actor(f"recorder-{self.job}", namespace="pliant")
        ray.get(recorder.want_workers.remote(num_workers))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file that is being written to."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines if line]


@dataclass
class Nodes:
    """A cluster on this machine."""

    cluster: Cluster
    nodes: list[Any] = field(default_factory=list)

    def add(self) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=CPUS_PER_WORKER))

    def lose(self) -> None:
        """The newest node's processes get SIGKILL."""
        self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)

    def fill_up(self) -> None:
        while len(self.nodes) < NUM_NODES:
            self.add()

    def wait_until_free(self) -> None:
        """Nothing of the job before is left."""
        wait_for(lambda: ray.available_resources().get("CPU") == NUM_NODES * CPUS_PER_WORKER + 1)


@contextmanager
def nodes_of(tuned: bool) -> Iterator[Nodes]:
    # Ray insists on its own temporary folder, whatever folder it is given.
    Path("/tmp/ray").mkdir(exist_ok=True)
    folder = tempfile.mkdtemp(prefix="bench-", dir="/tmp")
    niceness = "0" if tuned else "15"
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RAY_AUTH_MODE": "disabled",
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "RAY_worker_niceness": niceness,
    }
    head = {"num_cpus": 1, "include_dashboard": False, "temp_dir": folder}
    if tuned:
        head["_system_config"] = plain_ray.TUNED_CLUSTER
    cluster = Cluster(initialize_head=True, head_node_args=head)
    Path("/tmp/ray/ray_current_cluster").unlink(missing_ok=True)
    # Ray prints a page for every node that is lost.
    with redirect_stdout(StringIO()):
        try:
            ray.init(address=cluster.address, namespace="pliant", log_to_driver=False)
            nodes = Nodes(cluster)
            nodes.fill_up()
            yield nodes
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Running:
    """A side that trains."""

    side: Side
    nodes: Nodes
    folder: Path
    process: subprocess.Popen[bytes]

    def moments(self) -> list[Moment]:
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.side.name} ended early; see {self.folder / 'output.txt'}")
        return self.side.moments(self.folder)

    def settle(self, since: float) -> None:
        """Trains for a while, and on to the step after a checkpoint."""

        def is_settled() -> bool:
            steps = [m for m in self.moments() if m.what == "step" and m.time > since]
            is_after_save = bool(steps) and steps[-1].step % SAVE_EVERY == 1
            is_long_enough = len(steps) > SETTLE_STEPS and time.time() - since > SETTLE_S
            return is_after_save and is_long_enough

        wait_for(is_settled, START_LIMIT_S)
        time.sleep(PACE_S + 0.1)  # the snapshot of that step is there, too

    def measure(self, act: Callable[[], None], world: int | None = None) -> Recovery:
        """From the act to the next step."""
        since = time.time()
        act()
        wait_for(lambda: recovery(self.moments(), since, world) is not None, FAULT_LIMIT_S)
        found = recovery(self.moments(), since, world)
        assert found is not None
        self.settle(time.time())
        return found

    def kill(self, rank: int) -> None:
        pids = [m.pid for m in self.moments() if m.rank == rank and m.what == "engine ready"]
        assert pids[-1] is not None
        os.kill(pids[-1], signal.SIGKILL)


@contextmanager
def running(side: Side, nodes: Nodes) -> Iterator[Running]:
    """Starts the side and waits until it trains; ends it, and waits until it is gone."""
    nodes.fill_up()
    nodes.wait_until_free()
    folder = BENCH / "elastic" / f"{side.name}-{time.time_ns()}"
    folder.mkdir(parents=True)
    command = side.command(nodes.cluster.address, folder)
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        run = Running(side, nodes, folder, process)
        run.settle(time.time())
        yield run
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    nodes.fill_up()
    shutil.rmtree(folder)


def kills(run: Running) -> dict[str, Recovery]:
    return {f"kill rank {rank}": run.measure(lambda rank=rank: run.kill(rank)) for rank in (0, 1)}


def changes(run: Running) -> dict[str, Recovery]:
    """Of the cluster, and on demand where the side can be asked."""
    found = {}
    if isinstance(run.side, Pliant):
        ask = run.side.ask
        found["resize down"] = run.measure(lambda: ask(NUM_NODES - 1), world=NUM_NODES - 1)
        found["resize up"] = run.measure(lambda: ask(NUM_NODES), world=NUM_NODES)
    found["lost node"] = run.measure(run.nodes.lose, world=NUM_NODES - 1)
    found["new node"] = run.measure(run.nodes.add, world=NUM_NODES)
    return found


Found = dict[str, list[Recovery]]
"""By "side: case"."""


def take_turns(nodes: Nodes, rounds: int) -> Found:
    found: Found = {}
    turns: list[tuple[Side, list[Callable[[Running], dict[str, Recovery]]]]] = [
        (Plain(zero_stage=0), [kills, changes]),
        (Pliant(), [kills, changes]),
    ]
    for number in range(rounds):
        for side, cases in turns if number % 2 == 0 else reversed(turns):
            with running(side, nodes) as run:
                for case in cases:
                    collect(found, side.name, case(run))
    return found


def with_defaults(rounds: int) -> Found:
    """Nodes lost on a cluster as it comes, under a loop as it comes."""
    found: Found = {}
    for _ in range(rounds):
        with nodes_of(tuned=False) as nodes:
            for side in (Plain(zero_stage=0, tuned=False), Pliant()):
                with running(side, nodes) as run:
                    lost = run.measure(nodes.lose, world=NUM_NODES - 1)
                    collect(found, side.name, {"lost node, defaults": lost})
    return found


def collect(found: Found, side: str, recoveries: dict[str, Recovery]) -> None:
    for case, one in recoveries.items():
        found.setdefault(f"{side}: {case}", []).append(one)
        print(
            f"{side}: {case}: {one.total_s:.2f} s, longest pause {one.pause_s:.2f} s",
            file=sys.stderr,
        )


PLANNED = ("resize down", "resize up", "new node")
"""Cases in which training goes on until everything is ready: the pause is what they cost."""

COMPARED = {
    "killed rank 0": ("kill rank 0", "kill rank 0", 0.1),
    "killed rank 1": ("kill rank 1", "kill rank 1", 0.1),
    "resize down": ("resize down", "new node", 0.15),
    "resize up": ("resize up", "new node", 0.15),
    "new node": ("new node", "new node", 0.15),
    "lost node": ("lost node", "lost node", 0.3),
    "lost node, defaults": ("lost node, defaults", "lost node, defaults", 0.1),
}
"""Figure: pliant's case, the plain loop's case, the goal of their ratio."""


def ratios(found: Found) -> dict[str, figures.Figure]:
    answer = {}
    for name, (own, other, goal) in COMPARED.items():
        pairs = zip(found.get(f"pliant: {own}", []), found.get(f"plain: {other}", []), strict=False)
        if own in PLANNED:
            values = [mine.pause_s / plain.pause_s for mine, plain in pairs]
        else:
            values = [mine.total_s / plain.total_s for mine, plain in pairs]
        if values:
            answer[name.replace(",", "").replace(" ", "_")] = figures.Figure(values, goal, "ratio")
    return answer


def stage_table(found: Found) -> Table:
    """Median seconds of each stage, and of the whole with its range."""
    columns = ("case", *STAGES.values(), "total", "pause")
    table = Table(*columns, title="median seconds", title_justify="left")
    for name in sorted(found, key=lambda name: name.partition(": ")[::-1]):
        shares = [
            statistics.median(one.stages.get(stage, 0.0) for one in found[name])
            for stage in STAGES.values()
        ]
        totals = [one.total_s for one in found[name]]
        spread = f"{statistics.median(totals):.2f} [{min(totals):.2f} to {max(totals):.2f}]"
        pause = statistics.median(one.pause_s for one in found[name])
        table.add_row(name, *(f"{share:.2f}" for share in shares), spread, f"{pause:.2f}")
    return table


def wait_for(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.time() + limit_s
    while not condition():
        if time.time() > end:
            raise TimeoutError(f"waited {limit_s:.0f} s for {condition}")
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description="pliant beside plain Ray Train.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--defaults", type=int, default=0, metavar="ROUNDS")
    given = parser.parse_args()
    with nodes_of(tuned=True) as nodes:
        found = take_turns(nodes, given.rounds)
    found |= with_defaults(given.defaults)
    figures.write(
        BENCH / "elastic.json",
        compared_with=f"plain Ray Train and DeepSpeed, {given.rounds} rounds, {NUM_NODES} nodes "
        f"with a worker each, {os.cpu_count()} CPUs",
        **ratios(found),
    )
    raw = {name: [vars(one) for one in ones] for name, ones in found.items()}
    (BENCH / "elastic" / "stages.json").write_text(json.dumps(raw, indent=2) + "\n")
    Console(width=160).print(stage_table(found))


if __name__ == "__main__":
    main()
