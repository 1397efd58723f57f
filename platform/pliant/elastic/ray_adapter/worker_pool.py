"""The places that a job holds on the cluster, with the worker processes in them.

A place is a placement group of one bundle, so that a job can give one up or take one more without
touching the others. Places and processes outlive worker groups: a process whose training thread has
ended cleanly is used again, and one that died is replaced by a spare, which waits on the same node
with everything imported. That is how a restart takes a second instead of the time that a new
process needs.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.checkpoint.sync_actor import SynchronizationActor
from ray.train.v2._internal.execution.worker_group.placement_group_handle import (
    PlacementGroupHandle,
)
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker, Worker
from ray.train.v2._internal.util import bundle_to_remote_args
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.placement_group import placement_group_table as table_of
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from pliant.elastic.ray_adapter.cluster_view import lost_among
from pliant.elastic.ray_adapter.processes import (
    Footprint,
    died,
    footprint_in,
    is_done,
    raises,
    ready,
    wait_until_idle,
)

ANSWER_S = 0.5
"""A process that is there answers within this time, but for one that is stopped or very busy."""
SPARE_FAILURES = 3
"""After so many spares that could not be made ready, no more are tried."""


@dataclass(frozen=True)
class PoolSettings:
    """How the pool keeps processes."""

    keeps_processes: bool
    """Off: every group starts with new ones."""
    num_spares: int
    """Spare processes on each node where the job has workers."""
    park_timeout_s: float
    """How long a healthy worker may take to end its attempt, and still be used again."""
    max_reuses: int
    """Attempts after which a process is replaced in any case."""
    runtime_env: dict[str, Any]
    prime: Callable[[], None]
    """What a spare runs to be ready: imports, and everything that is slow the first time."""


@dataclass
class Place:
    """Resources that the job holds on a node, and the process that uses them."""

    group: PlacementGroup
    node_id: str
    worker: Worker | None = None
    num_reuses: int = 0
    first_footprint: Footprint | None = None


@dataclass
class Spare:
    """A process without resources of its own, which waits on a node."""

    actor: Any
    metadata: Any
    primed: Any
    """References to what the actor answers."""


@dataclass
class Newcomer:
    """A worker that gets ready beside a running group, which it is to join."""

    group: PlacementGroup
    began: float
    actor: Any = None
    metadata: Any = None
    primed: Any = None


@dataclass
class WorkerPool(WorkerGroupCallback):
    """Lives in Ray Train's controller. A callback, because that is how a worker group gets it."""

    settings: PoolSettings
    recorder: Any
    places: list[Place] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)
    """Nodes on which no worker shall run."""
    spares: dict[str, list[Spare]] = field(default_factory=dict)
    newcomers: list[Newcomer] = field(default_factory=list)
    sync_actor: Any = None
    spares_failed: int = 0
    told_ready: bool = False
    """Whether this group's spares were said to be ready."""

    # What the job holds

    def held(self, nodes: Collection[str]) -> Counter[str]:
        """The number of places on each of the nodes, those of newcomers included."""
        newcomers = [
            table_of(one.group)["bundles_to_node_id"][0] for one in self.newcomers if one.actor
        ]
        there = [place.node_id for place in self.places] + newcomers
        return Counter(node_id for node_id in there if node_id in nodes)

    def num_workers_on(self, nodes: Collection[str]) -> int:
        return sum(place.node_id in nodes for place in self.places if place.worker)

    def nodes(self) -> set[str]:
        return {place.node_id for place in self.places}

    def ranks(self) -> list[tuple[str, int]]:
        """(node id, rank) of every worker of the group."""
        return [
            (place.node_id, rank)
            for place in self.places
            if place.worker is not None and (rank := _rank(place.worker)) is not None
        ]

    def find_dead(self) -> set[int]:
        """Ranks whose process or node is gone; those that merely do not answer are not meant."""
        lost = lost_among(self.nodes())
        asked = {
            rank: place.worker.actor.get_metadata.remote()
            for place in self.places
            if place.worker is not None and (rank := _rank(place.worker)) is not None
        }
        ray.wait(list(asked.values()), num_returns=max(len(asked), 1), timeout=ANSWER_S)
        on_lost_nodes = {rank for node, rank in self.ranks() if node in lost}
        return on_lost_nodes | {rank for rank, ref in asked.items() if died(ref)}

    # From one group to the next

    def park(self, workers: list[Worker], dead: Collection[int]) -> None:
        """Keeps the processes whose training thread has ended, and ends the others. Their places
        stay. `dead` are the ranks whose process is gone."""
        asked = {
            rank: worker.execute_async(wait_until_idle, self.settings.park_timeout_s)
            for rank, worker in enumerate(workers)
            if rank not in dead and self.settings.keeps_processes
        }
        if asked:
            limit_s = self.settings.park_timeout_s + 1
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=limit_s)
        for rank, worker in enumerate(workers):
            place = next(place for place in self.places if place.worker is worker)
            footprint = footprint_in(asked[rank]) if rank in asked else None
            reason = self._why_not_again(place, footprint)
            if reason is None:
                place.num_reuses += 1
                continue
            ray.kill(worker.actor)
            place.worker = None
            if rank in asked:
                self.note(f"the process of rank {rank} is not used again: {reason}")
        kept = sum(place.worker is not None for place in self.places)
        self.timeline("parked", kept=kept, of=len(workers))

    def note(self, text: str) -> None:
        """A sentence about what was decided."""
        self.recorder.record.remote([{"kind": "note", "text": text}])

    def timeline(self, what: str, **facts: Any) -> None:
        """A moment on the way from one group to the next."""
        event = {"kind": "timeline", "time": time.time(), "what": what, **facts}
        self.recorder.append.remote(event)

    def _why_not_again(self, place: Place, footprint: Footprint | None) -> str | None:
        """None where the process of this place may be used again."""
        if footprint is None:
            return f"it did not end its work within {self.settings.park_timeout_s:g} s"
        place.first_footprint = place.first_footprint or footprint
        if place.num_reuses >= self.settings.max_reuses:
            return f"it was used {place.num_reuses + 1} times"
        if footprint.has_outgrown(place.first_footprint):
            first = place.first_footprint
            return (
                f"it holds {footprint.memory_bytes >> 20} MiB and {footprint.num_files} files, "
                f"and held {first.memory_bytes >> 20} MiB and {first.num_files}"
            )
        return None

    def form(
        self, num_workers: int, per_worker: dict[str, float], timeout_s: float
    ) -> list[Worker]:
        """Workers for a new group: those kept, spares, and new ones. Raises TimeoutError where
        places for them cannot be had in time."""
        self.send_newcomers_away()
        for place in [place for place in self.places if place.node_id in self.avoid]:
            self._give_up(place)
        # Places with a process first: those are there at once.
        self.places.sort(key=lambda place: place.worker is None)
        for place in self.places[num_workers:]:
            self._give_up(place)
        self._take_places(num_workers - len(self.places), per_worker, timeout_s)
        self._fill(per_worker)
        self.told_ready = False
        return [place.worker for place in self.places if place.worker is not None]

    def _take_places(self, count: int, per_worker: dict[str, float], timeout_s: float) -> None:
        groups = [placement_group([dict(per_worker)], strategy="PACK") for _ in range(count)]
        end = time.monotonic() + timeout_s
        for group in groups:
            if not group.wait(max(end - time.monotonic(), 0.01)):
                for one in groups:
                    remove_placement_group(one)
                raise TimeoutError
        for group in groups:
            node_id = table_of(group)["bundles_to_node_id"][0]
            self.places.append(Place(group, node_id))

    def _fill(self, per_worker: dict[str, float]) -> None:
        """A process for every place that has none."""
        empty = [place for place in self.places if place.worker is None]
        actors = [self._spare_or_new(place, per_worker) for place in empty]
        for place, (actor, metadata) in zip(empty, actors, strict=True):
            place.worker = Worker(
                actor, ray.get(metadata), per_worker, placement_group_bundle_index=0
            )
            place.num_reuses, place.first_footprint = 0, None

    def _spare_or_new(self, place: Place, per_worker: dict[str, float]) -> tuple[Any, Any]:
        """(actor, reference to its metadata)."""
        waiting = self.spares.get(place.node_id)
        if waiting:
            spare = waiting.pop(0)
            return spare.actor, spare.metadata
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=place.group, placement_group_bundle_index=0
        )
        actor_class = self._actor_class(**bundle_to_remote_args(per_worker))
        actor = actor_class.options(scheduling_strategy=strategy).remote()
        return actor, actor.get_metadata.remote()

    def _actor_class(self, **resources: Any) -> Any:
        return ray.remote(runtime_env=self.settings.runtime_env, **resources)(RayTrainWorker)

    # Newcomers

    def prepare(self, count: int, per_worker: dict[str, float], timeout_s: float) -> bool | None:
        """Whether `count` workers are ready to join the group; None where they could not be had.
        They get ready while the group goes on, so that it need not wait for them. Call it again
        until it says."""
        now = time.monotonic()
        while len(self.newcomers) < count:
            group = placement_group([dict(per_worker)], strategy="PACK")
            self.newcomers.append(Newcomer(group, now))
        for newcomer in self.newcomers:
            if newcomer.actor is None and newcomer.group.wait(0):
                self._begin(newcomer, per_worker)
        waiting = [one for one in self.newcomers if one.primed is None or not is_done(one.primed)]
        if any(now - one.began > timeout_s for one in waiting) or self._failed_newcomers():
            self.send_newcomers_away()
            return None
        if waiting:
            return False
        for newcomer in self.newcomers:
            metadata = ray.get(newcomer.metadata)
            worker = Worker(newcomer.actor, metadata, per_worker, placement_group_bundle_index=0)
            self.places.append(Place(newcomer.group, metadata.node_id, worker))
        self.newcomers.clear()
        return True

    def _begin(self, newcomer: Newcomer, per_worker: dict[str, float]) -> None:
        place = Place(newcomer.group, table_of(newcomer.group)["bundles_to_node_id"][0])
        spares = self.spares.get(place.node_id)
        newcomer.primed = spares[0].primed if spares else None
        newcomer.actor, newcomer.metadata = self._spare_or_new(place, per_worker)
        if newcomer.primed is None:
            newcomer.primed = newcomer.actor.execute.remote(ready, self.settings.prime)

    def _failed_newcomers(self) -> bool:
        refs = [one.primed for one in self.newcomers if one.primed is not None]
        return any(is_done(ref) and raises(ref) for ref in refs)

    def send_newcomers_away(self) -> None:
        """Gives up those that are not ready yet."""
        for newcomer in self.newcomers:
            if newcomer.actor is not None:
                ray.kill(newcomer.actor)
            remove_placement_group(newcomer.group)
        self.newcomers.clear()

    # Spares

    def refill(self) -> None:
        """Starts the spares that are missing; they get ready while training goes on."""
        for node_id in self.nodes() - self.avoid:
            waiting = self.spares.setdefault(node_id, [])
            waiting[:] = [spare for spare in waiting if not self._has_failed(spare)]
            while len(waiting) < self.settings.num_spares and self.spares_failed < SPARE_FAILURES:
                waiting.append(self._make_spare(node_id))
        primed = [spare.primed for spares in self.spares.values() for spare in spares]
        if not self.told_ready and not _unfinished(primed):
            self.told_ready = True
            self.timeline("spares are ready")

    def _has_failed(self, spare: Spare) -> bool:
        done, _ = ray.wait([spare.primed], timeout=0)
        try:
            ray.get(done)
        except RayError as error:
            self.spares_failed += 1
            reason = str(error).strip().splitlines()[-1]
            self.note(f"a spare process could not be made ready: {reason}")
            ray.kill(spare.actor)
            return True
        return False

    def _make_spare(self, node_id: str) -> Spare:
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        actor = self._actor_class(num_cpus=0).options(scheduling_strategy=strategy).remote()
        primed = actor.execute.remote(ready, self.settings.prime)
        return Spare(actor, actor.get_metadata.remote(), primed)

    # Endings

    def _give_up(self, place: Place) -> None:
        self.places.remove(place)
        if place.worker is not None:
            ray.kill(place.worker.actor)
        remove_placement_group(place.group)

    def drop_places(self) -> None:
        """Ends every process of the group and gives up its places."""
        for place in self.places[:]:
            self._give_up(place)

    def close(self) -> None:
        """Nothing of the job's stays."""
        self.send_newcomers_away()
        self.drop_places()
        for waiting in self.spares.values():
            for spare in waiting:
                ray.kill(spare.actor)
        self.spares.clear()
        if self.sync_actor is not None:
            ray.kill(self.sync_actor)
            self.sync_actor = None

    def barrier(self, timeout_s: float, warn_interval_s: float) -> Any:
        """Ray Train's own barrier among workers; one for all groups of the job."""
        if self.sync_actor is None:
            here = NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            )
            self.sync_actor = SynchronizationActor.options(scheduling_strategy=here).remote(
                timeout_s=timeout_s, warn_interval_s=warn_interval_s
            )
        else:
            self.sync_actor.reset.remote()
        return self.sync_actor


class PlacesHandle(PlacementGroupHandle):
    """The places of a pool, as a worker group keeps them."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    @property
    def placement_group(self) -> PlacementGroup:
        return self._pool.places[0].group

    def ready(self) -> Any:
        return self.placement_group.ready()

    def wait(self, timeout_seconds: float = 30) -> bool:
        return True

    def shutdown(self) -> None:
        self._pool.drop_places()


def _rank(worker: Worker) -> int | None:
    """Its rank in the group that it is in; None where it is in none yet."""
    context = worker.distributed_context
    return None if context is None else context.world_rank


def _unfinished(calls: list[Any]) -> list[Any]:
    return ray.wait(calls, num_returns=len(calls), timeout=0)[1] if calls else []
