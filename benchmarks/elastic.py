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
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import figures
from nodes import Nodes, nodes_of, wait_for
from pace import PACE_S
from recoveries import STAGES, Moment, Recovery, recovery
from rich.console import Console
from rich.table import Table
from sides import NUM_NODES, SAVE_EVERY, Plain, Pliant, Side

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "runs" / "bench"
SETTLE_S, SETTLE_STEPS = 10.0, SAVE_EVERY + 1
"""Faults are at least so far apart: a checkpoint was made."""
START_S = 45.0
"""Before the first fault: what starts in the background, such as readers of data, is there."""
START_LIMIT_S, FAULT_LIMIT_S = 240.0, 240.0


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

    def settle(self, since: float, at_least_s: float = SETTLE_S) -> None:
        """Trains until it is ready for the next fault, and on to the step after a checkpoint."""

        def is_settled() -> bool:
            moments = self.moments()
            if not self.side.is_ready(moments):
                return False
            steps = [m for m in moments if m.what == "step" and m.time > since]
            is_after_save = bool(steps) and steps[-1].step % SAVE_EVERY == 1
            is_long_enough = len(steps) > SETTLE_STEPS and time.time() - steps[0].time > at_least_s
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
        run.settle(time.time(), START_S)
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
