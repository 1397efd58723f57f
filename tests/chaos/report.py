"""What came of it: a table of costs, a verdict, and a report of where the job got stuck."""

import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from chaos.job import Job
from chaos.strikes import Result
from pliant.checkpoints import reader
from pliant.tracking.events import replay
from pliant.tracking.journal import Journal

LAST_EVENTS = 25
STACK_S = 20.0


@dataclass(frozen=True)
class Run:
    """A finished job, as far as it must be the same however disturbed it was."""

    weights: str
    """SHA-256 of the fp32 weights in its last checkpoint."""
    losses: dict[int, float]
    summary: dict[str, Any]


def read_run(run_dir: Path) -> Run:
    return Run(
        weights=weights_digest(run_dir),
        losses=replay(Journal(run_dir / "events.jsonl").events()).metric("loss"),
        summary=json.loads((run_dir / "summary.json").read_bytes()),
    )


def weights_digest(run_dir: Path) -> str:
    """Of the newest checkpoint, by the name of each tensor. Raises `FileNotFoundError` where there
    is none."""
    checkpoint = reader.newest(run_dir / "checkpoints", run_dir / "ledger")
    if checkpoint is None:
        raise FileNotFoundError(f"{run_dir} has no checkpoint")
    digest = hashlib.sha256()
    with reader.whole_tensors(checkpoint) as tensor_of:
        for key in sorted(k for k in checkpoint.manifest.tensors if k.startswith("fp32/")):
            digest.update(key.encode())
            digest.update(tensor_of(key).numpy().tobytes())
    return digest.hexdigest()


def differences(disturbed: Run, undisturbed: Run) -> list[str]:
    """What is not the same though it must be, a sentence each."""
    found = []
    for name in ("missing", "duplicated"):
        if count := disturbed.summary[f"samples_{name}"]:
            found.append(f"{count} samples are {name}")
    if disturbed.summary["state"] != "FINISHED":
        summary = disturbed.summary
        found.append(f"the job ended as {summary['state']}: {summary['reason']}")
    steps = sorted(disturbed.losses.keys() | undisturbed.losses.keys())
    differing = [s for s in steps if disturbed.losses.get(s) != undisturbed.losses.get(s)]
    if differing:
        found.append(f"the loss differs in {len(differing)} steps, first in step {differing[0]}")
    if disturbed.weights != undisturbed.weights:
        found.append("the final weights differ")
    return found


def line_of(number: int, result: Result, told: str) -> str:
    """A fault in a line."""
    back = "" if result.back_s is None else f", back after {result.back_s:.1f} s"
    worlds = "".join(f" -> {size}" for size in result.worlds)
    workers = f", workers{worlds}" if worlds else ""
    facts = f" ({result.facts})" if result.facts else ""
    return (
        f"{number:3d}  step {result.step}: {told}{facts}{back}, {result.steps_lost} steps lost"
        f"{workers}"
    )


def cost_table(results: Sequence[Result]) -> Table:
    """Seconds and steps that each kind of fault cost."""
    table = Table("fault", "times", "seconds to the next step", "steps lost", box=None)
    kinds: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        kinds[result.kind].append(result)
    for kind in sorted(kinds):
        ones = kinds[kind]
        seconds = sorted(one.back_s for one in ones if one.back_s is not None)
        spread = (
            f"{statistics.median(seconds):.1f} [{seconds[0]:.1f} to {seconds[-1]:.1f}]"
            if seconds
            else "none needed"
        )
        lost = [one.steps_lost for one in ones]
        steps = f"{sum(lost)}, at most {max(lost)} at once" if any(lost) else "0"
        table.add_row(kind, str(len(ones)), spread, steps)
    return table


def stuck_report(job: Job, told: str, reason: str, pids: Sequence[int]) -> str:
    """Everything that helps to see where it hangs."""
    events = [e for e in job.journal.events if e["kind"] not in ("step", "system")]
    lines = [f"{told}: {reason}", f"at step {job.journal.step}", "", "last events"]
    for event in events[-LAST_EVENTS:]:
        clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        rest = {k: v for k, v in event.items() if k not in ("kind", "time")}
        lines.append(f"{clock} {event['kind']} {json.dumps(rest, default=str)[:300]}")
    lines += ["", "the driver said", job.said()[-3000:], ""]
    for pid in (job.pid, *pids):
        lines += [_name(pid), _stacks(pid), ""]
    return "\n".join(lines)


def _name(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"process {pid} ({process.status()}): {' '.join(process.cmdline())[:120]}"
    except psutil.Error as error:
        return f"process {pid}: {error}"


def _stacks(pid: int) -> str:
    spy = Path(sys.executable).with_name("py-spy")
    command = [str(spy), "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=STACK_S)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return done.stdout or done.stderr
