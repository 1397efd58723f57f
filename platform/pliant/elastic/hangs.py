"""Whether ranks hang, and which ones the others wait for.

The culprit is judged by what it does itself, never by how long the others wait for it: a rank that
writes a checkpoint for a minute is not hung because its peers spend that minute in a collective.
"""

import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from pliant.elastic.beats import Beat, Phase
from pliant.spec.elastic import ElasticSpec

MEMORY = 50
"""Durations kept of each phase of each rank."""

SILENT_S = 10.0
"""Beats come every second: a rank not heard of for so long is stopped, or its interpreter is."""

SELDOM: tuple[Phase, ...] = ("evaluation", "checkpoint")
"""Phases that are over at once in most steps, and take long in some: what they usually take says
nothing of how long they may."""

AWAY_S = 5.0
"""A watch that was not looked at for so long was itself held up, and what it did not hear in that
time tells nothing of the ranks."""


@dataclass(frozen=True)
class Hung:
    """These ranks hold up the group."""

    ranks: tuple[int, ...]
    sentence: str


@dataclass
class _Rank:
    beat: Beat | None
    heard_s: float


class Hangs:
    """Keeps the last beat of each rank and how long phases usually take."""

    def __init__(self, settings: ElasticSpec) -> None:
        self._settings = settings
        self._ranks: dict[int, _Rank] = {}
        self._usual: dict[Phase, deque[float]] = {}
        self._world_size = 0
        self._steps_done = 0
        self._looked_s: float | None = None

    def begin(self, world_size: int, now_s: float) -> None:
        """A new attempt; what phases take is forgotten where the number of ranks changes."""
        if world_size != self._world_size:
            self._usual.clear()
        self._world_size = world_size
        self._ranks = {rank: _Rank(None, now_s) for rank in range(world_size)}
        self._steps_done = 0

    def end(self) -> None:
        """No attempt runs; nothing is expected of anybody."""
        self._ranks = {}

    def hear(self, beat: Beat, now_s: float) -> None:
        if beat.phase == "end":
            self._ranks.pop(beat.rank, None)
            return
        self._ranks[beat.rank] = _Rank(beat, now_s)
        for times in beat.steps:
            for phase, seconds in times.seconds.items():
                self._usual.setdefault(phase, deque(maxlen=MEMORY)).append(seconds)
        self._steps_done += len(beat.steps)

    def look(self, now_s: float) -> Hung | None:
        """The ranks that hold up the group longer than they may, if there are any."""
        self._forgive_own_absence(now_s)
        if not self._ranks:
            return None
        overdue = [rank for rank in self._culprits(now_s) if self._is_overdue(rank, now_s)]
        if not overdue:
            return None
        told = "; ".join(f"rank {rank} {self._tell(rank, now_s)}" for rank in overdue)
        return Hung(tuple(overdue), f"The group hangs: {told}.")

    def _forgive_own_absence(self, now_s: float) -> None:
        away_s = now_s - self._looked_s if self._looked_s is not None else 0.0
        self._looked_s = now_s
        if away_s > AWAY_S:
            for rank in self._ranks.values():
                rank.heard_s = min(rank.heard_s + away_s, now_s)

    def _culprits(self, now_s: float) -> list[int]:
        """Whom the others wait for: the ranks without a sign of life, else those that entered the
        fewest collectives; of these, those that do not wait in one themselves."""
        silent = [r for r, rank in self._ranks.items() if now_s - rank.heard_s > SILENT_S]
        if silent:
            return silent
        beats = [rank.beat for rank in self._ranks.values() if rank.beat is not None]
        fewest = min((beat.collectives for beat in beats), default=0)
        behind = [beat for beat in beats if beat.collectives == fewest]
        busy = [beat for beat in behind if beat.phase != "collective"]
        return [beat.rank for beat in busy or behind]

    def _is_overdue(self, rank: int, now_s: float) -> bool:
        known = self._ranks[rank]
        age_s = now_s - known.heard_s
        if known.beat is None:
            return age_s > self._settings.hang_start_s
        phase = known.beat.phase
        is_silent = age_s > max(self._floor_s(phase), SILENT_S)
        return is_silent or known.beat.phase_s + age_s > self.limit_s(phase)

    def limit_s(self, phase: Phase) -> float:
        """How long a rank may be in the phase."""
        usual_s = _median(self._usual.get(phase, ()))
        return max(self._floor_s(phase), self._settings.hang_factor * usual_s)

    def _floor_s(self, phase: Phase) -> float:
        """Starting, compiling in the first step, what was never seen before and what comes seldom
        take their time."""
        is_known = phase in self._usual and phase not in SELDOM
        is_warm = is_known and self._steps_done >= self._world_size
        floor_s = self._settings.hang_floor_s
        return floor_s if is_warm else max(floor_s, self._settings.hang_start_s)

    def _tell(self, rank: int, now_s: float) -> str:
        known = self._ranks[rank]
        age_s = now_s - known.heard_s
        if known.beat is None:
            return f"was not heard of in {age_s:.0f} s"
        where = f"in phase {known.beat.phase} of step {known.beat.step + 1}"
        if age_s > SILENT_S:
            return f"gives no sign of life for {age_s:.0f} s, last {where}"
        usual_s = _median(self._usual.get(known.beat.phase, ()))
        compared = f", which usually takes {usual_s:.3g} s" if usual_s else ""
        return f"is {where} for {known.beat.phase_s + age_s:.0f} s{compared}"


def _median(seconds: Collection[float]) -> float:
    return statistics.median(seconds) if seconds else 0.0
