"""Which faults strike, in which order and when: drawn from a seed, before anything is started.

A schedule keeps track of the nodes that its own faults take and add, so that it never asks for the
last one. Ranks, nodes and files are numbers to be counted round whatever there is when it strikes.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

MAX_WORKERS = 4
"""Room in the cluster, whatever is added."""
NODES = (2, 1, 1)
"""Workers for which each node of the cluster has room at first."""
MOST_STEPS = 15
"""Between two faults."""


@dataclass(frozen=True)
class KillWorker:
    """SIGKILL."""

    rank: int


@dataclass(frozen=True)
class StopWorker:
    """SIGSTOP: the process is there and does nothing any more."""

    rank: int


@dataclass(frozen=True)
class LoseNode:
    """Every process of a node gets SIGKILL, and what lay in its memory is gone."""

    node: int


@dataclass(frozen=True)
class AddNode:
    workers: int
    """That it has room for."""


@dataclass(frozen=True)
class DrainNode:
    """The notice of a spot instance: the node is lost when the deadline is over."""

    node: int
    deadline_s: float


@dataclass(frozen=True)
class Resize:
    """Somebody asks for a number of workers."""

    workers: int | None
    """None: as many as there is room for."""


FileDamage = Literal["torn", "altered", "short", "missing", "manifest", "ledger"]


@dataclass(frozen=True)
class DamageCheckpoint:
    """The newest checkpoint is damaged, snapshots are gone, and a worker is killed."""

    how: FileDamage
    file: int
    rank: int


SnapshotDamage = Literal["short", "missing", "record"]


@dataclass(frozen=True)
class DamageSnapshot:
    """A rank's newest snapshot is damaged as the rank is killed."""

    how: SnapshotDamage
    rank: int


@dataclass(frozen=True)
class FillDisk:
    """The disk is full for so many steps."""

    whole_run: bool
    """The disk of the run directory, and not of the checkpoints alone."""
    steps: int


@dataclass(frozen=True)
class LockDisk:
    """The checkpoints' disk takes no writes for so many steps, as after an error of its own."""

    steps: int


@dataclass(frozen=True)
class KillHelper:
    """SIGKILL to an actor that is no worker."""

    which: Literal["Feeder", "Holder"]


@dataclass(frozen=True)
class KillDriver:
    """SIGKILL; the job is started again."""


@dataclass(frozen=True)
class StopJob:
    """SIGTERM; the job is started again."""


@dataclass(frozen=True)
class LoseCluster:
    """Every node, the head and the driver; all are started again."""


Fault = (
    KillWorker
    | StopWorker
    | LoseNode
    | AddNode
    | DrainNode
    | Resize
    | DamageCheckpoint
    | DamageSnapshot
    | FillDisk
    | LockDisk
    | KillHelper
    | KillDriver
    | StopJob
    | LoseCluster
)

KINDS: dict[str, type[Fault]] = {kind.__name__: kind for kind in get_args(Fault)}
NEED_OWN_DISKS = ("FillDisk", "LockDisk")
OFTEN = (
    *("KillWorker", "LoseNode", "AddNode", "DrainNode", "Resize", "DamageCheckpoint"),
    *("Resize", "Resize"),  # a small size would else stand for long
)
"""Added to one of each kind."""


@dataclass(frozen=True)
class Strike:
    """A fault and its moment."""

    fault: Fault
    after_steps: int
    """Steps done since the fault before was over."""
    settles: bool
    """Whether the group is given time to reach its full size again. If not, the next fault strikes
    as soon as training goes on: newcomers and spares may still be getting ready."""


@dataclass
class _Cluster:
    """As it is once the faults so far have struck."""

    rooms: list[int]
    """Workers that each node has room for."""
    wanted: int | None = None
    """Workers that somebody asked for."""

    def goal(self, wanted: int | None) -> int:
        return min(wanted or MAX_WORKERS, sum(self.rooms))


def draw(
    seed: int,
    count: int,
    nodes: Sequence[int] = NODES,
    kinds: Collection[str] = tuple(KINDS),
) -> list[Strike]:
    """`count` strikes. Kinds are taken from a bag that holds each of them, so that none is left out
    for long."""
    dice = random.Random(seed)
    cluster = _Cluster(list(nodes))
    bag: list[str] = []
    strikes = []
    for _ in range(count):
        kind = _take(bag, kinds, cluster.rooms, dice)
        fault = _make(kind, cluster, dice)
        strikes.append(Strike(fault, dice.randint(3, MOST_STEPS), dice.random() < 0.75))
    return strikes


def _take(bag: list[str], kinds: Collection[str], rooms: list[int], dice: random.Random) -> str:
    """The first kind in the bag that can be carried out; the bag is filled when there is none."""
    for _ in range(2):
        for kind in bag:
            if _is_possible(kind, rooms):
                bag.remove(kind)
                return kind
        more = sorted(kinds) + [kind for kind in OFTEN if kind in kinds]
        dice.shuffle(more)
        bag += more
    raise ValueError(f"None of {', '.join(sorted(kinds))} can strike {len(rooms)} nodes.")


def _is_possible(kind: str, rooms: list[int]) -> bool:
    if kind in ("LoseNode", "DrainNode"):
        return len(rooms) > 1
    if kind == "AddNode":
        return sum(rooms) < MAX_WORKERS
    return True


def _make(kind: str, cluster: _Cluster, dice: random.Random) -> Fault:
    """A fault of this kind; `cluster` becomes what it is after it."""
    rooms, rank = cluster.rooms, dice.randrange(MAX_WORKERS)
    match kind:
        case "KillWorker":
            return KillWorker(rank)
        case "StopWorker":
            return StopWorker(rank)
        case "LoseNode":
            node = dice.randrange(len(rooms))
            rooms.pop(node)
            return LoseNode(node)
        case "AddNode":
            rooms.append(dice.randint(1, min(2, MAX_WORKERS - sum(rooms))))
            return AddNode(rooms[-1])
        case "DrainNode":
            node = dice.randrange(len(rooms))
            rooms.pop(node)
            return DrainNode(node, dice.choice((0.5, 30.0, 30.0)))
        case "Resize":
            cluster.wanted = _other_size(cluster, dice)
            return Resize(cluster.wanted)
        case "DamageCheckpoint":
            how = dice.choice(get_args(FileDamage))
            return DamageCheckpoint(how, dice.randrange(MAX_WORKERS), rank)
        case "DamageSnapshot":
            return DamageSnapshot(dice.choice(get_args(SnapshotDamage)), rank)
        case "FillDisk":
            return FillDisk(dice.random() < 0.5, dice.randint(20, 40))
        case "LockDisk":
            return LockDisk(dice.randint(20, 40))
        case "KillHelper":
            return KillHelper(dice.choice(("Feeder", "Holder")))
        case "KillDriver":
            return KillDriver()
        case "StopJob":
            return StopJob()
        case "LoseCluster":
            return LoseCluster()
    raise ValueError(f"{kind} is no fault; there are {', '.join(KINDS)}.")


def _other_size(cluster: _Cluster, dice: random.Random) -> int | None:
    """One that changes something, and as often as not all there is."""
    now = cluster.goal(cluster.wanted)
    sizes: list[int | None] = [size for size in range(1, MAX_WORKERS) if cluster.goal(size) != now]
    if cluster.goal(None) != now:
        sizes += [None] * max(len(sizes), 1)
    return dice.choice(sizes or [None])


def told(fault: Fault) -> str:
    """As a line of a report has it: `LoseNode node=1`."""
    facts = " ".join(f"{name}={value}" for name, value in vars(fault).items())
    return f"{type(fault).__name__} {facts}".rstrip()
