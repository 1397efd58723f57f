"""What happens from a fault to the next optimizer step, by stage."""

from dataclasses import dataclass
from itertools import pairwise

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
