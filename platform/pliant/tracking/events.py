"""The events of a journal, and what training came to once redone steps are counted once.

Every event has a `kind`, a `time` (Unix seconds) and, where it belongs to one, a `step`. It may
have `metrics`, a mapping of names to floats. Kinds and their further fields:

    job          a driver started                 pid
    data         what the data comes to           metrics (data/...)
    attempt      a worker group started           attempt, world_size, step (resumed from), cause
    step         an optimizer step was done       metrics, samples, tokens, capacity
    evaluation   the model was evaluated          metrics (eval_loss or test_loss)
    checkpoint   a checkpoint is complete         path, metrics (checkpoint_s, checkpoint_stall_s)
    alarm        something needs a person         what ("checkpoint", "hang", ...), text
    restart      a worker group ended early       reason
    resize       a group is asked to make way     from, to (workers), reason
    rewind       back, to leave an update out     step (whose update), reason
    skip         a step's update was left out     reason
    damage       state was passed over            text
    timeline     a moment between two groups      what, and what belongs to it
    drill        a fault was injected             what
    system       the machine was sampled          metrics; step is the last training step
    artifact     a file belongs to the record     path, artifact_path
    note         anything worth reading           text
    end          the job ended                    state, reason

`cause` of an attempt is "start", "failure", "resize" or "continued" (a new driver took up an
earlier run). `tokens` are those without padding, `capacity` is rows x seq_len.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]

BY_STEP = frozenset({"step", "evaluation", "checkpoint"})
"""Kinds that are repeated when steps are redone: a metric has one value a step. All other kinds
happen once, at their time."""


@dataclass
class History:
    """The events that count, by step: what an attempt redid replaces what was lost."""

    steps: dict[int, Event] = field(default_factory=dict)
    evaluations: dict[int, Event] = field(default_factory=dict)
    attempts: list[Event] = field(default_factory=list)
    steps_lost: int = 0
    """Steps done and then thrown away because an attempt resumed before them."""
    seconds_lost: float = 0.0
    """From each failure until training went on, and what the steps that were lost had taken. A
    driver that died cannot tell when; its time is not in here."""
    seconds_resizing: float = 0.0
    """From each request to resize until training went on."""

    def metric(self, name: str) -> dict[int, float]:
        """Values of a metric by step, in order, as far as steps have it."""
        return _values(self.steps, name)

    def evaluation(self, name: str) -> dict[int, float]:
        """As `metric`, of evaluations."""
        return _values(self.evaluations, name)


def replay(events: Iterable[Event]) -> History:
    """Follow `events` in order; an attempt that resumes at step s undoes the steps after s."""
    history = History()
    interrupted: Event | None = None
    for event in events:
        kind = event.get("kind")
        if kind in ("restart", "rewind") or (kind == "resize" and interrupted is None):
            interrupted = event
        elif kind == "job":
            interrupted = None
        elif kind == "attempt":
            _rewind(history, int(event.get("step", 0)))
            _count_pause(history, interrupted, event)
            interrupted = None
            history.attempts.append(event)
        elif kind == "step":
            history.steps[int(event["step"])] = event
        elif kind == "evaluation":
            _add_evaluation(history, event)
    return history


def _add_evaluation(history: History, event: Event) -> None:
    """Several sets may be evaluated at one step."""
    step = int(event["step"])
    earlier = history.evaluations.get(step, {}).get("metrics", {})
    history.evaluations[step] = {**event, "metrics": {**earlier, **event.get("metrics", {})}}


def _count_pause(history: History, interrupted: Event | None, attempt: Event) -> None:
    if interrupted is None:
        return
    seconds = max(0.0, attempt["time"] - interrupted["time"])
    if interrupted["kind"] == "resize":
        history.seconds_resizing += seconds
    else:
        history.seconds_lost += seconds


def _rewind(history: History, step: int) -> None:
    history.steps_lost += max(0, max(history.steps, default=step) - step)
    lost = [event.get("metrics", {}) for done, event in history.steps.items() if done > step]
    history.seconds_lost += sum(
        metrics.get("step_time_s", 0.0) + metrics.get("data_wait_s", 0.0) for metrics in lost
    )
    history.steps = {k: v for k, v in history.steps.items() if k <= step}
    history.evaluations = {k: v for k, v in history.evaluations.items() if k <= step}


def _values(events: dict[int, Event], name: str) -> dict[int, float]:
    found = {step: events[step].get("metrics", {}).get(name) for step in sorted(events)}
    return {step: float(value) for step, value in found.items() if value is not None}
