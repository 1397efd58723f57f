"""Ranks that are persistently slower than their peers in what they do by themselves.

All ranks finish a step together, so that its time tells nothing; what is compared is the time
outside collectives.
"""

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from pliant.elastic.beats import Beat, StepTimes
from pliant.spec.elastic import ElasticSpec

SHARE = 0.9
"""Slow in this share of the steps looked at: persistently."""


@dataclass(frozen=True)
class Straggler:
    """A rank that holds up the others."""

    beat: Beat
    """Its last one."""
    factor: float
    """Its own time over the median of the others', in the median step."""
    sentence: str


class Stragglers:
    """Collects the ranks' own times of the last steps."""

    def __init__(self, settings: ElasticSpec) -> None:
        self._factor = settings.straggler_factor
        self._window: deque[dict[int, float]] = deque(maxlen=settings.straggler_steps)
        """Of steps that all ranks have told of: their own seconds by rank."""
        self.begin(0)

    def begin(self, world_size: int) -> None:
        """A new attempt: other processes, perhaps on other nodes."""
        self._world_size = world_size
        self._beats: dict[int, Beat] = {}
        self._incomplete: dict[int, dict[int, float]] = {}
        self._named: set[int] = set()
        self._window.clear()

    def hear(self, beat: Beat) -> None:
        is_first = beat.rank not in self._beats or not self._beats[beat.rank].step
        self._beats[beat.rank] = beat
        # The first step of an attempt compiles, allocates and fills caches.
        for times in beat.steps[1:] if is_first else beat.steps:
            ranks = self._incomplete.setdefault(times.step, {})
            ranks[beat.rank] = own_seconds(times)
            if len(ranks) == self._world_size:
                self._window.append(self._incomplete.pop(times.step))

    def look(self) -> list[Straggler]:
        """The stragglers of each full window of steps, unless the window before named them."""
        if self._world_size < 2 or len(self._window) < (self._window.maxlen or 0):
            return []
        steps = [compare(seconds) for seconds in self._window]
        ratios = {rank: [step[rank] for step in steps] for rank in range(self._world_size)}
        slow = {rank for rank, ratio in ratios.items() if self._is_persistent(ratio)}
        new, self._named = slow - self._named, slow
        found = [self._straggler(rank, statistics.median(ratios[rank])) for rank in sorted(new)]
        self._window.clear()
        return found

    def _is_persistent(self, ratios: list[float]) -> bool:
        return sum(ratio > self._factor for ratio in ratios) >= SHARE * len(ratios)

    def _straggler(self, rank: int, factor: float) -> Straggler:
        beat = self._beats[rank]
        return Straggler(
            beat,
            factor,
            f"Rank {rank} on node {beat.node[:8]} is a straggler: its own part of a step takes "
            f"{factor:.2f} times as long as that of the other ranks, in the last "
            f"{len(self._window)} steps.",
        )


def own_seconds(times: StepTimes) -> float:
    """What the rank did by itself in a step."""
    return times.seconds.get("data", 0.0) + times.seconds.get("compute", 0.0)


def compare(seconds: Mapping[int, float]) -> dict[int, float]:
    """Each rank's own seconds over the median of the others', of two ranks or more."""
    ordered = sorted(seconds.values())
    middles = ((len(ordered) - 2) // 2, (len(ordered) - 1) // 2)

    def without(place: int) -> float:
        """The median of `ordered` without the value at `place`."""
        return sum(ordered[middle + (middle >= place)] for middle in middles) / 2

    return {
        rank: own / max(without(bisect_left(ordered, own)), 1e-9) for rank, own in seconds.items()
    }
