"""What to do about ranks that hang or straggle, and about a job that does not get on.

Pure: beats and times come in, actions go out. The stacks of all ranks are asked for before a hung
group is touched, since afterwards nobody can say why it hung.
"""

from dataclasses import dataclass

from pliant.elastic.beats import Beat
from pliant.elastic.hangs import Hangs, Hung
from pliant.elastic.stragglers import Stragglers
from pliant.spec.elastic import ElasticSpec

DUMPS_S = 2.0
"""How long a hung group is given to write down its stacks. Beats come every second; a rank without
a sign of life will not answer at all."""


@dataclass(frozen=True)
class Dump:
    """The ranks are being asked for their stacks; `Watchdog.hear` passes it on."""

    reason: str


@dataclass(frozen=True)
class Kill:
    """Kill these workers, so that the group is restarted."""

    workers: tuple[Beat, ...]
    """Their last beats: rank, node and pid."""
    ranks: tuple[int, ...]
    """All that are meant; one that never gave a sign of life has no beat."""
    reason: str


@dataclass(frozen=True)
class Alarm:
    """Somebody should look."""

    sentence: str


@dataclass(frozen=True)
class Slow:
    """A straggler is named, once."""

    worker: Beat
    factor: float
    sentence: str


Action = Dump | Kill | Alarm | Slow


class Watchdog:
    """Hears every rank's beats and is looked at about once a second. Not for several threads at
    once."""

    def __init__(self, settings: ElasticSpec) -> None:
        self._settings = settings
        self._hangs = Hangs(settings)
        self._stragglers = Stragglers(settings)
        self._progress = NoProgress(settings.alarm_after_s)
        self._attempt = -1
        self._beats: dict[int, Beat] = {}
        self._asked_s: float | None = None
        self._num_asked = 0
        self._is_over = True

    def hear(self, beat: Beat, now_s: float) -> bool:
        """Whether the rank shall write down its stacks. The first beat of a later attempt begins
        it; beats of earlier ones are ignored."""
        if beat.attempt > self._attempt:
            self._begin(beat, now_s)
        elif beat.attempt < self._attempt or self._is_over:
            return False
        if beat.phase == "end":
            self._beats.pop(beat.rank, None)
        else:
            self._beats[beat.rank] = beat
        self._hangs.hear(beat, now_s)
        self._stragglers.hear(beat)
        self._progress.reached(beat.step, now_s)
        return beat.dumps < self._num_asked

    def end(self) -> None:
        """The attempt is over, in whatever way; nothing is expected until the next one beats."""
        self._is_over = True
        self._hangs.end()
        self._beats = {}
        self._asked_s = None

    def look(self, now_s: float) -> list[Action]:
        """What is to be done now; each thing is told once."""
        alarm = self._progress.look(now_s)
        actions: list[Action] = [alarm] if alarm else []
        if self._is_over:
            return actions
        hung = self._hangs.look(now_s)
        if hung is not None:
            return actions + self._rescue(hung, now_s)
        self._asked_s = None
        return actions + self._slow()

    def _begin(self, beat: Beat, now_s: float) -> None:
        self.end()
        self._attempt = beat.attempt
        self._num_asked, self._is_over = 0, False
        self._hangs.begin(beat.world_size, now_s)
        self._stragglers.begin(beat.world_size)

    def _rescue(self, hung: Hung, now_s: float) -> list[Action]:
        if self._asked_s is None:
            self._asked_s = now_s
            self._num_asked += 1
            return [Dump(hung.sentence)]
        all_dumped = all(beat.dumps >= self._num_asked for beat in self._beats.values())
        if not all_dumped and now_s - self._asked_s < DUMPS_S:
            return []
        return [self._kill(hung.ranks, hung.sentence)]

    def _slow(self) -> list[Action]:
        found = self._stragglers.look()
        actions: list[Action] = [Slow(s.beat, s.factor, s.sentence) for s in found]
        if found and self._settings.replace_stragglers:
            ranks = tuple(straggler.beat.rank for straggler in found)
            actions.append(self._kill(ranks, " ".join(s.sentence for s in found)))
        return actions

    def _kill(self, ranks: tuple[int, ...], reason: str) -> Kill:
        known = tuple(self._beats[rank] for rank in ranks if rank in self._beats)
        self.end()
        return Kill(known, ranks, reason)


class NoProgress:
    """Raises an alarm when no new step was done for a while, once until there is progress."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._best_step = -1
        self._since_s: float | None = None
        self._is_raised = False

    def reached(self, step: int, now_s: float) -> None:
        """Steps that are done again are no progress."""
        if step > self._best_step:
            self._best_step, self._since_s, self._is_raised = step, now_s, False

    def look(self, now_s: float) -> Alarm | None:
        if self._since_s is None:
            self._since_s = now_s
        waited_s = now_s - self._since_s
        if self._is_raised or waited_s <= self._after_s:
            return None
        self._is_raised = True
        after = f"after step {self._best_step}" if self._best_step > 0 else "since the start"
        return Alarm(f"There has been no new step {after} for {waited_s:.0f} s.")
