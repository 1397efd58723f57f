"""Whether the loss depends on how many workers ran: the demo on 1, 2, 3 and 4 of them, and resized
from 4 to 2 to 3 on the way.

The same 100 steps with dropout, five times for each precision. The loss of every step is compared
with that of the run on one worker, and the ledger, step by step, must be the same. Four ranks share
the eight rows of a step evenly, three do not.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import figures
import pyarrow.parquet as pq

from pliant.tracking import Journal
from pliant.tracking.events import replay
from pliant.training import wanted

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "runs" / "bench"
SPEC = ROOT / "jobs" / "specs" / "demo.yaml"
GOALS = {"fp32": 1e-5, "bf16": 5e-3}
SIZES = (1, 2, 3, 4)
RESIZED = (4, 2, 3)
RESIZE_LIMIT_S = 120.0

Curve = dict[int, float]
"""Loss by step."""
Trained = dict[int, list[int]]
"""The pieces of each step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    runs_dir = BENCH / "curves"
    shutil.rmtree(runs_dir, ignore_errors=True)
    found = {}
    for precision, goal in GOALS.items():
        runs = {f"{size} workers": train(runs_dir, precision, size, steps) for size in SIZES}
        runs["4 -> 2 -> 3"] = train_resized(runs_dir, precision, steps)
        worst = compare(runs, steps)
        print(precision, json.dumps(worst), file=sys.stderr)
        found[precision] = figures.Figure(list(worst.values()), goal, "largest relative difference")
    figures.write(
        BENCH / "curves.json", compared_with=f"the run on one worker, {steps} steps", **found
    )


def compare(runs: dict[str, Path], steps: int) -> dict[str, float]:
    """The largest relative difference of a loss to the first run's, for each of the others. The
    steps and the ledger must be the same."""
    curves = {name: curve_of(run_dir) for name, run_dir in runs.items()}
    ledgers = {name: trained_in(run_dir) for name, run_dir in runs.items()}
    first = next(iter(runs))
    for name in runs:
        assert curves[name].keys() == set(range(1, steps + 1)), f"{name} lacks steps"
        assert ledgers[name] == ledgers[first], f"{name} trained on other samples"
    return {
        name: max(abs(curve[step] / loss - 1) for step, loss in curves[first].items())
        for name, curve in curves.items()
        if name != first
    }


def curve_of(run_dir: Path) -> Curve:
    return replay(Journal(run_dir / "events.jsonl").events()).metric("loss")


def trained_in(run_dir: Path) -> Trained:
    """From the ledger files that the newest checkpoint names."""
    newest = max((run_dir / "checkpoints").glob("*/manifest.json"), key=lambda path: path.parent)
    trained: Trained = {}
    for entry in json.loads(newest.read_bytes())["ledger"]:
        for row in pq.read_table(run_dir / "ledger" / entry["file"]).to_pylist():
            trained.setdefault(row["step"], []).extend(row["pieces"])
    return {step: sorted(pieces) for step, pieces in trained.items()}


def train(runs_dir: Path, precision: str, num_workers: int, steps: int) -> Path:
    run_dir = runs_dir / f"{precision}-{num_workers}"
    with running(run_dir, precision, num_workers, num_workers, steps) as process:
        assert process.wait() == 0, f"see {run_dir}.txt"
    return run_dir


def train_resized(runs_dir: Path, precision: str, steps: int) -> Path:
    run_dir = runs_dir / f"{precision}-resized"
    with running(run_dir, precision, 1, max(RESIZED), steps) as process:
        for number, size in enumerate(RESIZED[1:], start=1):
            while len(curve_of(run_dir)) < number * steps // len(RESIZED):
                assert process.poll() is None, f"see {run_dir}.txt"
                time.sleep(0.5)
            print(wanted.resize(run_dir, size, RESIZE_LIMIT_S), file=sys.stderr)
        assert process.wait() == 0, f"see {run_dir}.txt"
    attempts = [e for e in Journal(run_dir / "events.jsonl").events() if e["kind"] == "attempt"]
    assert tuple(attempt["world_size"] for attempt in attempts) == RESIZED
    return run_dir


@contextmanager
def running(
    run_dir: Path, precision: str, least: int, most: int, steps: int
) -> Iterator[subprocess.Popen[bytes]]:
    settings = (
        f"name={run_dir.name}",
        f"training.precision={precision}",
        f"training.steps={steps}",
        f"training.eval_every={steps}",
        f"elastic.min_workers={least}",
        f"elastic.max_workers={most}",
        "elastic.drills=[]",
    )
    command = [sys.executable, "-m", "pliant", "run", str(SPEC), "--runs-dir", str(run_dir.parent)]
    command += [part for setting in settings for part in ("--set", setting)]
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with run_dir.with_suffix(".txt").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
