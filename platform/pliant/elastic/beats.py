"""What ranks tell of themselves while they train: signs of life and the times of their steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Phase = Literal["start", "data", "compute", "collective", "checkpoint", "evaluation", "end"]
"""What a rank is at. "start" is all before its first step, "end" its last sign of life."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds that a rank spent in each phase of one step."""

    step: int
    seconds: Mapping[Phase, float]


@dataclass(frozen=True)
class Beat:
    """One sign of life."""

    attempt: int
    """The same on all ranks of a worker group, and greater than that of the one before."""
    rank: int
    world_size: int
    node: str
    """The node's id."""
    pid: int
    step: int
    """Steps done."""
    phase: Phase
    phase_s: float
    """Seconds since it entered the phase."""
    collectives: int
    """Collectives that it has entered in this attempt. All ranks enter the same ones in the same
    order, so that whoever has entered fewer is the one that the others wait for."""
    steps: tuple[StepTimes, ...] = ()
    """Steps finished since the last beat."""
    dumps: int = 0
    """How often it wrote down its stacks in this attempt."""
