"""A worker group that beats once a second, on a clock of its own."""

from dataclasses import dataclass, field

from pliant.elastic.beats import Beat, Phase, StepTimes
from pliant.elastic.watchdog import Action, Watchdog
from pliant.spec.elastic import ElasticSpec


@dataclass
class FakeRank:
    """What a rank tells; the test sets it."""

    rank: int
    phase: Phase = "start"
    since_s: float = 0.0
    step: int = 0
    collectives: int = 0
    is_silent: bool = False
    answers: bool = True
    """Whether it writes down its stacks when it is asked."""
    dumps: int = 0
    untold: list[StepTimes] = field(default_factory=list)


class FakeGroup:
    """Ranks 0 to `world_size` - 1 under a watchdog."""

    def __init__(self, world_size: int, watchdog: Watchdog | None = None, **settings: object):
        self.watchdog = watchdog or Watchdog(ElasticSpec.model_validate(settings))
        self.now_s = 1000.0
        self.attempt = 0
        self.actions: list[Action] = []
        self.start(world_size)

    def start(self, world_size: int) -> None:
        """A new attempt."""
        self.attempt += 1
        self.ranks = [FakeRank(rank, since_s=self.now_s) for rank in range(world_size)]

    def enter(self, phase: Phase, *ranks: int) -> None:
        """These ranks, or all, enter a phase now."""
        for fake in self.ranks:
            if not ranks or fake.rank in ranks:
                fake.phase, fake.since_s = phase, self.now_s
                fake.collectives += phase == "collective"

    def steps(self, count: int, slow: dict[int, float] | None = None, **usual: float) -> None:
        """Whole steps of all ranks, one a second; `usual` seconds in each phase, the compute of
        some ranks `slow`."""
        for _ in range(count):
            for fake in self.ranks:
                times: dict[Phase, float] = {"data": 0.01, "compute": 0.5, "collective": 0.2}
                times.update(usual)  # type: ignore[call-overload]
                times["compute"] *= (slow or {}).get(fake.rank, 1.0)
                fake.step += 1
                fake.untold.append(StepTimes(fake.step, times))
                fake.collectives += 2
            self.enter("data")
            self.wait(1.0)

    def wait(self, seconds: float) -> list[Action]:
        """Lets time pass, a second at a time; what the watchdog wanted done meanwhile."""
        seen = len(self.actions)
        end_s = self.now_s + seconds
        while self.now_s < end_s - 1e-9:
            self.now_s += min(1.0, end_s - self.now_s)
            for fake in self.ranks:
                if not fake.is_silent:
                    self._beat(fake)
            self.actions += self.watchdog.look(self.now_s)
        return self.actions[seen:]

    def _beat(self, fake: FakeRank) -> None:
        beat = Beat(
            attempt=self.attempt,
            rank=fake.rank,
            world_size=len(self.ranks),
            node=f"node-{fake.rank}-of-many",
            pid=100 + fake.rank,
            step=fake.step,
            phase=fake.phase,
            phase_s=self.now_s - fake.since_s,
            collectives=fake.collectives,
            steps=tuple(fake.untold),
            dumps=fake.dumps,
        )
        fake.untold = []
        if self.watchdog.hear(beat, self.now_s) and fake.answers:
            fake.dumps += 1
