"""Tells Ray Train's controller when to form a group, and of how many workers."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.train import ScalingConfig
from ray.train.v2._internal.execution.scaling_policy import (
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
    ScalingPolicy,
)

from pliant.elastic.ray_adapter.cluster_view import ClusterView, look, lost_among
from pliant.elastic.ray_adapter.worker_pool import WorkerPool
from pliant.elastic.scaling import (
    Bounds,
    Resize,
    Situation,
    Start,
    Wait,
    count_possible,
    decide_running,
    decide_start,
)

LOOK_EVERY_S = 0.5
IDLE_S = 0.1
REFILL_AFTER_S = 3.0
"""A spare that gets ready takes computing time, which a group that has just started needs."""


@dataclass(frozen=True)
class Orders:
    """What the recorder wants of the controller."""

    wanted: int | None = None
    """Workers that somebody asked for."""
    kill: tuple[int, ...] = ()
    """Ranks whose process must end, because it hangs."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Nodes whose accelerator has failed its check, and why."""
    is_training: bool = False


@dataclass(frozen=True)
class PolicySettings:
    """When to resize."""

    bounds: Bounds
    settle_s: float
    """For how long there must be room for more workers before they are taken."""
    pause_s: float
    """Between the start of a group and its growth."""
    start_timeout_s: float
    """How long workers that are to join may take to get ready."""
    handshake_timeout_s: float
    """How long the workers may take to make their state safe when the size is to change."""
    hang_start_s: float
    """How long a group may take from its start until it trains."""


class ElasticPolicy(ScalingPolicy):
    """Looks at the cluster, lets `scaling` decide, and asks the workers before it resizes.

    A resize is a handshake: the recorder passes the wish on, the workers finish their step, make
    their state safe and end (`Yielded`), and the group is formed anew. Workers that do not answer
    in time are ended as if they had crashed.
    """

    def __init__(
        self,
        scaling_config: ScalingConfig,
        settings: PolicySettings,
        pool: WorkerPool,
        recorder: Any,
    ) -> None:
        super().__init__(scaling_config)
        self._settings = settings
        self._pool = pool
        self._recorder = recorder
        self.orders = Orders()
        self._orders_ref: Any = None
        self.excluded: set[str] = set()
        """Nodes on which no worker shall run from now on."""
        self.choose_excluded: Callable[[], None] = lambda: None
        """Sets `excluded`, before a group is formed."""
        self._is_first = True
        self._ended_start = 0.0
        """When the group began that was ended because it did not come to train."""
        self._waits_since: float | None = None
        self._said = ""
        self._looked_at = 0.0
        self._possible, self._possible_since = -1, 0.0
        self._growing: Resize | None = None
        """Decided; the newcomers are getting ready."""
        self._pending: tuple[Resize, float] | None = None
        """The workers have been asked to end, and when."""
        self.not_before = 0.0
        """No group is formed before this moment (`time.monotonic`): the back-off after failures."""

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        self._maybe_send_resource_request()
        self._pending = self._growing = None
        now = time.monotonic()
        if now < self.not_before:
            time.sleep(IDLE_S)  # the controller asks again at once
            return NoopDecision()
        self._waits_since = self._waits_since or now
        self.orders = replace(self._read_orders(wait=True), kill=())  # of a group that is over
        self.choose_excluded()
        decision = decide_start(
            self._settings.bounds,
            self.orders.wanted,
            self._count_possible(self._look(lost=lost_among(self._pool.nodes()))),
            self._is_first,
            now - self._waits_since,
        )
        if isinstance(decision, Wait):
            self._say(decision.reason)
            time.sleep(IDLE_S)
            return NoopDecision()
        self._is_first, self._waits_since, self._said = False, None, ""
        return self._decided(decision)

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        self._maybe_send_resource_request()
        orders = self._read_orders(wait=False)
        for rank in orders.kill:
            if rank < worker_group_state.num_workers:
                ray.kill(worker_group_state.workers[rank].actor)
        self.orders = replace(orders, kill=())  # of this group, and only once
        now = time.monotonic()
        if self._pending is not None:
            return self._hurry(now)
        if not orders.is_training:
            self._end_a_start_that_hangs(worker_group_state, now)
            return NoopDecision()
        if now - self._looked_at < LOOK_EVERY_S:
            return NoopDecision()
        self._looked_at = now
        current = worker_group_state.num_workers
        running_s = now - worker_group_state.start_time
        if running_s > REFILL_AFTER_S:
            self._pool.refill()
        resize = self._decide_running(current, running_s, now)
        if self._growing is not None and (resize is None or resize.num_workers > current):
            resize = self._growing  # the newcomers change what room there seems to be
        if resize is not None and self._may_begin(resize, current):
            self._pending = resize, now
            self._recorder.request_resize.remote(
                resize.num_workers, resize.reason, resize.leaves_node
            )
        return NoopDecision()

    def _end_a_start_that_hangs(self, group: Any, now: float) -> None:
        """Beats begin with training; until then only the clock can tell. One process that ends is
        enough: the group fails, and the restart budget counts it."""
        limit_s = self._settings.hang_start_s
        if now - group.start_time > limit_s and self._ended_start != group.start_time:
            self._ended_start = group.start_time
            self._pool.note(
                f"the workers have not begun to train within {limit_s:g} s "
                "(elastic.hang_start_s); the group is ended as after a crash"
            )
            ray.kill(group.workers[0].actor)

    def _may_begin(self, resize: Resize, current: int) -> bool:
        """Before the group grows, the workers that are to join it get ready beside it."""
        if resize.num_workers <= current:
            self._growing = None
            self._pool.send_newcomers_away()
            return True
        self._growing = resize
        count, limit_s = resize.num_workers - current, self._settings.start_timeout_s
        is_ready = self._pool.prepare(count, self._per_worker, limit_s)
        if is_ready is None:
            self._pool.note("the workers that were to join could not be made ready")
            self._possible = -1  # what room there is must settle again
        if is_ready is not False:
            self._growing = None
        return bool(is_ready)

    def _decide_running(self, current: int, running_s: float, now: float) -> Resize | None:
        view = self._look()
        possible = self._count_possible(view)
        if possible != self._possible:
            self._possible, self._possible_since = possible, now
        situation = Situation(
            current=current,
            possible=possible,
            on_leaving_nodes=self._pool.num_workers_on(view.leaving.keys()),
            wanted=self.orders.wanted,
            settled_s=now - self._possible_since,
            running_s=running_s,
        )
        settings = self._settings
        return decide_running(settings.bounds, situation, settings.settle_s, settings.pause_s)

    def _hurry(self, now: float) -> ScalingDecision:
        """While the workers have been asked to end: normally they do, and this is not reached."""
        assert self._pending is not None
        resize, since = self._pending
        if now - since < self._settings.handshake_timeout_s or not resize.num_workers:
            return NoopDecision()  # without room elsewhere, the group ends with its node
        self._pool.note(
            f"the workers did not end within {self._settings.handshake_timeout_s:g} s, though "
            f"{resize.reason}; the group is ended as after a crash"
        )
        self._recorder.failed.remote("the workers did not answer a resize in time")
        self._pending = self._growing = None  # it has been carried out once the next group runs
        return ResizeDecision(resize.num_workers, self._per_worker)

    def _look(self, lost: Collection[str] = ()) -> ClusterView:
        """The cluster without the nodes that are lost, leaving or excluded; the pool avoids them
        from now on."""
        view = look(self.excluded, lost)
        self._pool.avoid = self._pool.nodes() - view.free.keys()
        return view

    def room_by_node(self) -> dict[str, int]:
        """How many workers each living node could hold, if nothing ran there; those that could hold
        none are left out."""
        room = {
            str(node["NodeID"]): int(
                min(node["Resources"].get(name, 0) // each for name, each in self._needs.items())
            )
            for node in ray.nodes()
            if node["Alive"]
        }
        return {node: count for node, count in room.items() if count}

    @property
    def _needs(self) -> dict[str, float]:
        return {name: each for name, each in self._per_worker.items() if each}

    def _count_possible(self, view: ClusterView) -> int:
        """Workers that fit there, those that have a place included."""
        return count_possible(view.free, self._pool.held(view.free.keys()), self._per_worker)

    def _read_orders(self, wait: bool) -> Orders:
        """The recorder's latest answer; a running group is not kept waiting for the next one."""
        if self._orders_ref is None:
            self._orders_ref = self._recorder.orders.remote()
        done, _ = ray.wait([self._orders_ref], timeout=5.0 if wait else 0)
        if done:
            self.orders, self._orders_ref = ray.get(done[0]), None
        return self.orders

    @property
    def _per_worker(self) -> dict[str, float]:
        return self.scaling_config._resources_per_worker_not_none

    def _decided(self, start: Start) -> ResizeDecision:
        self._pool.timeline("decided", workers=start.num_workers, reason=start.reason)
        return ResizeDecision(start.num_workers, self._per_worker)

    def _say(self, reason: str) -> None:
        """Once for each reason."""
        if reason != self._said and "looking" not in reason:
            self._said = reason
            self._pool.note(f"waiting: {reason}")

    def _get_num_workers_for_resource_request(self) -> int:
        """What the autoscaler is asked for."""
        bounds, wanted = self._settings.bounds, self.orders.wanted
        return bounds.fit(wanted or bounds.max_workers) or bounds.max_workers

    async def before_controller_shutdown(self) -> None:
        self._pool.close()
        await super().before_controller_shutdown()
