"""How many workers a job should have: pure decisions, with reasons."""

from collections.abc import Mapping
from dataclasses import dataclass

FIRST_LOOK_S = 2.0
"""How long a job that starts with fewer workers than wanted looks for more. A restart does not: to
grow later costs little."""


@dataclass(frozen=True)
class Bounds:
    """What the spec allows."""

    min_workers: int
    max_workers: int
    allowed: tuple[int, ...] = ()
    """World sizes to choose from; empty: all within the bounds."""

    def fit(self, possible: int) -> int | None:
        """The largest size that is allowed and possible; None where there is none."""
        sizes = self.allowed or range(self.min_workers, self.max_workers + 1)
        fitting = [n for n in sizes if self.min_workers <= n <= min(possible, self.max_workers)]
        return max(fitting, default=None)


@dataclass(frozen=True)
class Start:
    num_workers: int
    reason: str


@dataclass(frozen=True)
class Wait:
    reason: str


@dataclass(frozen=True)
class Resize:
    num_workers: int
    reason: str
    leaves_node: bool = False
    """A node is going away with some of the workers: their state must be safe elsewhere."""


@dataclass(frozen=True)
class Situation:
    """What is known of a running group and the cluster around it."""

    current: int
    possible: int
    """Workers that would fit on nodes that stay: those there, and those for which there is room."""
    on_leaving_nodes: int
    """Workers of the group whose node is being drained."""
    wanted: int | None
    """The size that somebody asked for; None: as many as possible."""
    settled_s: float
    """For how long `possible` has been what it is."""
    running_s: float
    """For how long the group has run."""


def decide_start(
    bounds: Bounds, wanted: int | None, possible: int, is_first: bool, waited_s: float
) -> Start | Wait:
    """The size of a group that is to be formed. `waited_s` counts from when it could have been."""
    target = bounds.fit(_goal(bounds, wanted))
    size = bounds.fit(min(possible, _goal(bounds, wanted)))
    if size is None:
        return Wait(
            f"there is room for {possible} of the {bounds.min_workers} workers that are needed"
        )
    if size == target:
        return Start(size, f"there is room for the {size} wanted")
    if is_first and waited_s < FIRST_LOOK_S:
        return Wait(f"there is room for {possible} workers; looking for more")
    return Start(size, f"there is room for {possible}")


def decide_running(
    bounds: Bounds, situation: Situation, settle_s: float, pause_s: float
) -> Resize | None:
    """Whether a healthy group should change its size, and why.

    It grows once the room has been there for `settle_s` and the last start is `pause_s` ago, so
    that a cluster in motion does not make it change with every node.
    """
    wanted, current = situation.wanted, situation.current
    size = bounds.fit(min(situation.possible, _goal(bounds, wanted)))
    if situation.on_leaving_nodes:
        count = situation.on_leaving_nodes
        workers = "1 worker is" if count == 1 else f"{count} workers are"
        return Resize(size or 0, f"{workers} on a node that is being drained", leaves_node=True)
    if size is None or size == current:
        return None
    if wanted is not None and situation.possible >= size:
        asked = "1 worker was" if wanted == 1 else f"{wanted} workers were"
        return Resize(size, f"{asked} asked for")
    if size < current:
        return None  # they are there, whatever the cluster says of the room for them
    if situation.settled_s < settle_s or situation.running_s < pause_s:
        return None
    return Resize(size, f"there is room for {situation.possible} workers")


def count_possible(
    free: Mapping[str, Mapping[str, float]],
    held: Mapping[str, int],
    per_worker: Mapping[str, float],
) -> int:
    """Workers that fit on the nodes of `free` (free resources by node id), where `held` tells how
    many places the job has on a node already."""
    total = 0
    for node, resources in free.items():
        counts = [
            int(resources.get(name, 0.0) / amount + 1e-9)
            for name, amount in per_worker.items()
            if amount > 0
        ]
        total += held.get(node, 0) + min(counts, default=0)
    return total


def _goal(bounds: Bounds, wanted: int | None) -> int:
    return bounds.max_workers if wanted is None else min(wanted, bounds.max_workers)
