"""How often state is kept: as often as it is worth its cost, both of which are measured."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch.distributed as dist

from pliant.training.commit import Answer

HOT_SHARE = 0.02
"""Of the time, spent on snapshots."""
SAVING_SHARE = 0.25
"""At most so much of the time a checkpoint is being written: writing takes from the same cores."""
PRIOR_S = 24 * 3600.0
"""Before a worker has failed, it is taken to fail once in this time."""
FIRST_INTERVAL = 50
"""Steps to the first checkpoint, of which the cost is not known yet."""
FIRST_LOOK = 4
LOOK_EVERY = 64
"""Intervals are decided anew after 4, 8, 16, 32, 64, 128, 192, ... steps of an attempt."""
REMEMBERED = 64

Interval = int | Literal["auto"]


def hot_interval(stall_s: float, step_s: float) -> int:
    """The smallest number of steps between snapshots that stall for `stall_s`, so that they stay
    within their share of steps that take `step_s`."""
    return max(1, math.ceil(stall_s / (HOT_SHARE * step_s)))


@dataclass(frozen=True)
class Costs:
    """What a checkpoint costs and how often the job fails, as measured."""

    stall_s: float
    """Training waits for so long."""
    saving_s: float
    """The checkpoint is complete after so long."""
    step_s: float
    failures: int
    elapsed_s: float
    """Over which the failures were counted."""
    world_size: int

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures; the prior counts as one failure."""
        prior_s = PRIOR_S / self.world_size
        return (self.elapsed_s + prior_s) / (self.failures + 1)


def checkpoint_interval(costs: Costs) -> int:
    """Steps between checkpoints, so that writing them and repeating lost work cost the least:
    sqrt(2 * cost * MTBF) seconds (Young 1974, "A first order approximation to the optimum
    checkpoint interval", Comm. ACM 17(9); Daly 2006, Future Generation Computer Systems 22(3),
    equation 10 to first order). The cost is what training waits for; that the writing also slows
    it is kept within bounds by a share of the time."""
    optimum_s = math.sqrt(2 * costs.stall_s * costs.mtbf_s)
    interval_s = max(optimum_s, costs.saving_s / SAVING_SHARE)
    return max(1, round(interval_s / costs.step_s))


def looks(steps_done: int) -> bool:
    """Whether intervals are decided anew after so many steps of an attempt."""
    if steps_done >= LOOK_EVERY:
        return steps_done % LOOK_EVERY == 0
    return steps_done >= FIRST_LOOK and steps_done & (steps_done - 1) == 0


class Cadence:
    """When a snapshot and when a checkpoint is due. Rank 0 decides from what it measures, and all
    ranks learn it in the same step; its methods are called by all ranks alike."""

    def __init__(self, every: Interval, hot_every: Interval, world_size: int) -> None:
        self.every = FIRST_INTERVAL if every == "auto" else every
        self.hot_every = 1 if hot_every == "auto" else hot_every
        self._chooses_every = every == "auto"
        self._chooses_hot = hot_every == "auto"
        self._world_size = world_size
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        self._stalls: deque[float] = deque(maxlen=REMEMBERED)
        self._saves: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        self._failures, self._elapsed_s = 0, 0.0
        self._steps_done = 0
        self._saved_step = 0

    def begin(self, step: int) -> None:
        """An attempt goes on from `step`."""
        self._saved_step = step

    def hot_is_due(self, step: int) -> bool:
        return self.hot_every > 0 and step % self.hot_every == 0

    def save_is_due(self, step: int) -> bool:
        if self._chooses_every:
            return step - self._saved_step >= self.every
        return step % self.every == 0

    def stepped(self, seconds: float) -> None:
        """A step was done, which took so long with all that belongs to it but snapshots."""
        self._steps.append(seconds)
        self._steps_done += 1

    def stalled(self, seconds: float) -> None:
        """A snapshot took so long."""
        self._stalls.append(seconds)

    def saved(self, step: int) -> None:
        """A checkpoint was begun."""
        self._saved_step = step

    def stored(self, stall_s: float, saving_s: float, answer: Answer) -> None:
        """This rank's part of a checkpoint is stored."""
        self._saves.append((stall_s, saving_s))
        self._failures, self._elapsed_s = answer.failures, answer.elapsed_s

    def look(self, tell: Callable[[str], object]) -> None:
        """Decides anew, where it is time; rank 0 tells of a change and gives its reason."""
        if not (self._chooses_every or self._chooses_hot) or not looks(self._steps_done):
            return
        decided: list[Any] = [None]
        if dist.get_rank() == 0:
            decided = [(self._checkpoints(tell), self._hot(tell))]
        dist.broadcast_object_list(decided, src=0)
        self.every, self.hot_every = decided[0]

    def _hot(self, tell: Callable[[str], object]) -> int:
        if not self._chooses_hot or not self._stalls or not self._steps:
            return self.hot_every
        stall_s, step_s = median(self._stalls), median(self._steps)
        decided = hot_interval(stall_s, step_s)
        if decided != self.hot_every:
            tell(
                f"Snapshots every {decided} steps: one takes {1000 * stall_s:.1f} ms and a step "
                f"{1000 * step_s:.0f} ms, of which {HOT_SHARE:.0%} may go to them."
            )
        return decided

    def _checkpoints(self, tell: Callable[[str], object]) -> int:
        if not self._chooses_every or not self._saves or not self._steps:
            return self.every
        stall_s, saving_s = (median(values) for values in zip(*self._saves, strict=True))
        costs = Costs(
            stall_s,
            saving_s,
            median(self._steps),
            self._failures,
            self._elapsed_s,
            self._world_size,
        )
        decided = checkpoint_interval(costs)
        if abs(decided - self.every) <= self.every // 10:
            return self.every  # not worth a word
        tell(
            f"Checkpoints every {decided} steps of {1000 * costs.step_s:.0f} ms: one stalls "
            f"training for {1000 * stall_s:.0f} ms and is complete after {saving_s:.1f} s, and the "
            f"job is taken to fail every {costs.mtbf_s / 3600:.1f} h ({costs.failures} failures so "
            "far)."
        )
        return decided
