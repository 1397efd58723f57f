"""The trial before the full run: two steps, an evaluation, a checkpoint, a resume."""

import time
from pathlib import Path

from pliant.spec import JobSpec
from pliant.training.conclusion import Outcome, StopSignal
from pliant.training.launch import Display, run_job


def run_smoke(spec: JobSpec, runs_dir: Path, display: Display, stop: StopSignal) -> Outcome:
    """Runs the job's first two steps under the name NAME-smoke-TIME, in two parts: the second goes
    on from the first one's checkpoint."""
    name = f"{spec.name}-smoke-{time.strftime('%Y%m%d-%H%M%S')}"
    display.say("trial, first part: one step, an evaluation and a checkpoint")
    outcome = run_job(_cut(spec, name, steps=1), runs_dir, display, stop)
    if outcome.error is not None or stop.is_set():
        return outcome
    display.say("trial, second part: going on from that checkpoint")
    return run_job(_cut(spec, name, steps=2), runs_dir, display, stop)


def _cut(spec: JobSpec, name: str, steps: int) -> JobSpec:
    training = spec.training.model_copy(update={"steps": steps, "epochs": None, "eval_every": 1})
    return spec.model_copy(
        update={
            "name": name,
            "training": training,
            "checkpoint": spec.checkpoint.model_copy(update={"every": 1}),
            "elastic": spec.elastic.model_copy(update={"drills": []}),
        }
    )
