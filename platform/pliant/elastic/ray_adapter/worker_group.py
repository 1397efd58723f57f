"""A Ray Train worker group that is formed from a pool of processes and gives them back to it."""

from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.train.v2._internal.callbacks.backend_setup import BackendSetupCallback
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
)
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupState
from ray.train.v2._internal.execution.worker_group.worker import Worker
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2._internal.util import invoke_context_managers, time_monotonic

from pliant.elastic.ray_adapter.worker_pool import PlacesHandle, WorkerPool


class PooledWorkerGroup(WorkerGroup):
    """Differs from Ray's in where its workers come from and where they go."""

    def __init__(self, train_run_context: Any, worker_group_context: Any, callbacks: Any) -> None:
        super().__init__(train_run_context, worker_group_context, callbacks)
        self._pool: WorkerPool = next(c for c in callbacks if isinstance(c, WorkerPool))

    def _start_impl(self, worker_group_state_builder: Any) -> None:
        self._assert_inactive()
        builder, context = worker_group_state_builder, self._worker_group_context
        with invoke_context_managers([c.on_worker_group_start for c in self._callbacks]):
            for callback in self._callbacks:
                callback.before_worker_group_start(context)
            places = PlacesHandle(self._pool)
            builder.with_placement_group_handle(places)  # given up where the start fails
            barrier = self._pool.barrier(
                self._collective_timeout_s, self._collective_warn_interval_s
            )
            workers = self._ranked_workers()
            self._pool.timeline("workers are there")
            try:
                self._init_train_context(workers, barrier)
                self._worker_group_state = WorkerGroupState(
                    time_monotonic(), places, workers, barrier
                )
                for callback in self._callbacks:
                    callback.after_worker_group_start(self)
            except RayActorError as error:
                self._worker_group_state = None
                raise WorkerGroupStartupFailedError(
                    "A worker died before training could start."
                ) from error
        self._pool.timeline("process group is set up")
        ray.get([w.actor.run_train_fn.remote(context.train_fn_ref) for w in workers])
        for callback in self._callbacks:
            callback.after_worker_group_training_start(self)

    def _ranked_workers(self) -> list[Worker]:
        context = self._worker_group_context
        try:
            workers = self._pool.form(
                context.num_workers,
                context.resources_per_worker,
                self._worker_group_start_timeout_s,
            )
        except TimeoutError:
            raise WorkerGroupStartupTimeoutError(num_workers=context.num_workers) from None
        except RayActorError as error:
            raise WorkerGroupStartupFailedError("A worker died as it started.") from error
        for worker in workers:
            worker.distributed_context = None
        ranked = WorkerGroup._assign_worker_ranks(workers)
        self._replica_groups = [
            ReplicaGroup([worker], context.resources_per_worker, self._replica_group_callbacks)
            for worker in ranked
        ]
        self._worker_rank_to_replica_group_rank = {rank: rank for rank in range(len(ranked))}
        return ranked

    def shutdown(self) -> None:
        """Gives the workers back to the pool. Ray's own shutdown of the process group is left out:
        the workers leave it themselves, and it would wait for the dead."""
        self._assert_active()
        state = self._worker_group_state
        with invoke_context_managers([c.on_worker_group_shutdown for c in self._callbacks]):
            for callback in self._callbacks:
                if not isinstance(callback, BackendSetupCallback):
                    callback.before_worker_group_shutdown(self)
            self._pool.park(state.workers, self._pool.find_dead())
            self._clear_state()
            for callback in self._callbacks:
                callback.after_worker_group_shutdown(self._worker_group_context)
