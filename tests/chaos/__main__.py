"""The command: `python -m chaos --seed 1 --faults 20`."""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from chaos import report
from chaos.disks import Disk, enter_namespace
from chaos.job import Job, Stuck
from chaos.machines import Machines
from chaos.schedule import KINDS, MAX_WORKERS, NEED_OWN_DISKS, NODES, Strike, draw, told
from chaos.strikes import SAVE_EVERY, Chaos, Result
from pliant.checkpoints import snapshot

ROOT = Path(__file__).parents[2]
NAME, UNDISTURBED = "chaos", "undisturbed"
LAST_STEPS = 10
RUN_DISK_BYTES, CHECKPOINT_DISK_BYTES = 512 << 20, 16 << 20
FOREVER = 1_000_000
MOST_STUCK = 5
DIFFERENT = 5
"""The exit code of a negative verdict."""

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
SPEC: dict[str, Any] = {
    "name": NAME,
    "model": {
        "config": {
            "model_type": "llama",
            "vocab_size": "auto",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attention_dropout": 0.1,
        }
    },
    "data": {
        "split": {"validation": 0.1},
        "tokenizer": {"train_vocab_size": 300},
        "seq_len": 64,
        "window": 50,
        "block_steps": 8,
    },
    "training": {
        "exact": True,
        "global_batch_size": 5,
        "lr": 1e-2,
        "schedule": "constant",
        "steps": FOREVER,
        "eval_every": 50,
        "digest_every": 20,
    },
    "deepspeed": {"zero_stage": 1},
    "elastic": {
        "min_workers": 1,
        "max_workers": MAX_WORKERS,
        "settle_s": 1.0,
        "pause_s": 2.0,
        "max_restarts": 100_000,
        "max_node_failures": 100_000,
        "max_backoff_s": 2.0,
        "hang_floor_s": 10.0,
        "hang_start_s": 150.0,
        "handshake_timeout_s": 60.0,
    },
    "checkpoint": {"every": SAVE_EVERY, "hot_every": 1, "keep": 4},
    "resources": {"cpus_per_worker": 2, "device": "cpu"},
}


@dataclass(frozen=True)
class Setting:
    """Where a run takes place and what was asked of it."""

    given: argparse.Namespace
    strikes: list[Strike]
    runs_dir: Path
    disks: list[Disk]
    """The run's and the checkpoints'; none where none can be mounted."""
    out: Path
    """What is kept of it."""
    console: Console

    def say(self, sentence: str) -> None:
        self.console.print(sentence)


def main(arguments: Sequence[str]) -> int:
    given = _parse(arguments)
    has_disks = enter_namespace(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and clean up
    console = Console(width=160, highlight=False, soft_wrap=True)
    kinds = set(given.kinds or KINDS) - (set() if has_disks else set(NEED_OWN_DISKS))
    if not has_disks:
        console.print("no disks can be mounted here: none will be full, and none locked")
    strikes = draw(given.seed, given.faults, given.nodes, kinds)
    out = Path(given.out or ROOT / "runs" / "chaos" / f"seed-{given.seed}")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with _places(has_disks) as (runs_dir, disks):
        return _run(Setting(given, strikes, runs_dir, disks, out, console))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), help="by default all")
    parser.add_argument(
        "--nodes", nargs="+", type=int, default=NODES, help="workers each has room for"
    )
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for a fault")
    parser.add_argument("--spares", type=int, default=1, help="spare processes on each node")
    parser.add_argument("--out", help="where the record is left; by default runs/chaos/seed-N")
    return parser.parse_args(arguments)


@contextmanager
def _places(has_disks: bool) -> Iterator[tuple[Path, list[Disk]]]:
    """A runs directory, on disks of its own where that can be: the run's, the checkpoints'."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-runs-"))
    runs_dir = folder / "runs"
    disks = [
        Disk(runs_dir, RUN_DISK_BYTES),
        Disk(runs_dir / NAME / "checkpoints", CHECKPOINT_DISK_BYTES),
    ]
    try:
        runs_dir.mkdir()
        for disk in disks if has_disks else []:
            disk.mount()
        yield runs_dir, disks if has_disks else []
    finally:
        snapshot.remove(runs_dir / NAME)
        for disk in reversed(disks) if has_disks else []:
            disk.unmount()
        shutil.rmtree(folder, ignore_errors=True)


def _run(here: Setting) -> int:
    began = time.time()
    spec = _write_spec(here.runs_dir.parent, here.given.spares)
    results: list[Result] = []
    findings, steps = _disturb(here, spec, results)
    if steps:
        findings += _compare(here, spec, steps)
    seconds = time.time() - began
    _write_results(here, results, findings, seconds)
    here.console.print(report.cost_table(results))
    for finding in findings:
        here.say(f"found: {finding}")
    verdict = f"{len(findings)} findings" if findings else "as if nothing had been"
    here.say(f"{len(results)} faults in {seconds / 60:.0f} min: {verdict}; see {here.out}")
    return DIFFERENT if findings else 0


def _disturb(here: Setting, spec: Path, results: list[Result]) -> tuple[list[str], int]:
    """Strikes a job and lets it end: what was found, and the steps it did; 0 where it was given
    up."""
    job = Job(spec, here.runs_dir, NAME, here.out / "driver.txt", here.given.limit)
    _set_environment()
    machines = Machines(here.given.nodes)
    run_disk, checkpoint_disk = here.disks or (None, None)
    chaos = Chaos(job, machines, checkpoint_disk, run_disk)
    try:
        job.start(machines.address)
        job.wait_for("the first steps", lambda: job.journal.steps_done > 2)
        here.say(f"seed {here.given.seed}: {len(here.strikes)} faults")
        _strike_all(here, chaos, results)
        return chaos.findings, _finish(chaos)
    except Stuck as error:
        return [*chaos.findings, f"the run was given up: {error}"], 0
    finally:
        job.end()
        machines.end()
        _keep(job.run_dir, here.out)


def _set_environment() -> None:
    """Of the cluster's processes, and so of the workers."""
    paths = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "RAY_AUTH_MODE": "disabled",
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "RAY_worker_niceness": "0",
    }


def _write_spec(folder: Path, spares: int) -> Path:
    data = folder / "samples.jsonl"
    lines = [
        {"prompt": f"{WORDS[i % 6]} {i} ", "completion": " ".join(WORDS[: 1 + i % 5]) * (1 + i % 3)}
        for i in range(400)
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tree = {
        **SPEC,
        "data": {**SPEC["data"], "train": str(data)},
        "training": {**SPEC["training"], "callbacks": ["chaos.pace.Pace"]},
        "elastic": {**SPEC["elastic"], "spares": spares},
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def _strike_all(here: Setting, chaos: Chaos, results: list[Result]) -> None:
    num_stuck = 0
    for number, strike in enumerate(here.strikes, start=1):
        what = told(strike.fault)
        try:
            result = chaos.carry_out(strike)
        except Exception as error:  # whatever it is: a long run goes on, and tells it at the end
            num_stuck += 1
            here.say(f"{number:3d}  {what}: {error!r}")
            chaos.findings.append(f"fault {number}, {what}: {error!r}")
            pids = chaos.machines.helpers("")
            text = report.stuck_report(chaos.job, what, traceback.format_exc(), pids)
            (here.out / f"stuck-{number}.txt").write_text(text)
            if num_stuck >= MOST_STUCK:
                raise Stuck(f"{num_stuck} faults were not got over") from error
            chaos.resume()
            continue
        results.append(result)
        here.say(report.line_of(number, result, what))


def _finish(chaos: Chaos) -> int:
    """Lets the job end after a few more steps; how many it did."""
    job = chaos.job
    code = job.stop()
    if code != 4:
        chaos.findings.append(f"the driver ended with exit code {code} after SIGTERM, not 4")
    steps = job.journal.step + LAST_STEPS
    job.start(chaos.machines.address, training__steps=steps)
    code = job.exit_code(job.limit_s * 2)
    if code != 0:
        chaos.findings.append(f"the job ended with exit code {code}: {job.said()[-500:]}")
    return steps


def _compare(here: Setting, spec: Path, steps: int) -> list[str]:
    """Against the same job on two workers of a Ray of its own, with nothing in its way."""
    here.say(f"the same {steps} steps again, undisturbed, on two workers")
    quiet = Job(spec, here.runs_dir, UNDISTURBED, here.out / "undisturbed.txt", 0.0)
    quiet.start(
        None,
        training__steps=steps,
        training__callbacks=[],
        elastic__max_workers=2,
        elastic__spares=0,
        checkpoint__hot_every=0,
    )
    try:
        code = quiet.exit_code(120.0 + 2.0 * steps)
        if code:
            return [f"the undisturbed job ended with exit code {code}: {quiet.said()[-500:]}"]
        runs = [report.read_run(here.runs_dir / name) for name in (NAME, UNDISTURBED)]
    except Exception as error:
        return [f"the runs cannot be compared: {error}"]
    finally:
        quiet.end()
    here.say(_told_together(*runs))
    return report.differences(*runs)


def _told_together(disturbed: report.Run, undisturbed: report.Run) -> str:
    summary = disturbed.summary
    return (
        f"ledger: {summary['samples_missing']} samples missing, {summary['samples_duplicated']} "
        f"duplicated\nweights after {summary['steps']} steps: {disturbed.weights[:16]}, "
        f"undisturbed {undisturbed.weights[:16]}\nrestarts {summary['restarts']}, resizes "
        f"{summary['resizes']}, steps lost and done again {summary['steps_lost']}"
    )


def _keep(run_dir: Path, out: Path) -> None:
    """What explains a finding; the disks are gone afterwards."""
    for name in ("events.jsonl", "resolved.yaml", "summary.json", "error.txt"):
        if (run_dir / name).is_file():
            shutil.copy(run_dir / name, out / name)
    if (run_dir / "stacks").is_dir():
        shutil.copytree(run_dir / "stacks", out / "stacks", dirs_exist_ok=True)


def _write_results(
    here: Setting, results: list[Result], findings: list[str], seconds: float
) -> None:
    body = {
        "seed": here.given.seed,
        "seconds": seconds,
        "findings": findings,
        "faults": [{"kind": one.kind, **asdict(one)} for one in results],
    }
    (here.out / "result.json").write_text(json.dumps(body, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
