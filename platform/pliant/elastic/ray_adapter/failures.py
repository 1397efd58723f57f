"""What follows when a worker group ends before its time, told to Ray Train's controller."""

import time
from collections.abc import Collection
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError

from pliant.elastic.failure import (
    Failure,
    GiveUp,
    decide,
    exclude_nodes,
    is_final,
    is_hardware,
)
from pliant.elastic.ray_adapter.policy import ElasticPolicy
from pliant.elastic.ray_adapter.worker_pool import WorkerPool
from pliant.elastic.wish import Yielded
from pliant.errors import PliantError, TrainingRewinds
from pliant.spec.elastic import ElasticSpec


class Failures(FailurePolicy):
    """Keeps the history of the job's failures and lets `elastic.failure` decide."""

    def __init__(
        self,
        failure_config: Any,
        settings: ElasticSpec,
        policy: ElasticPolicy,
        pool: WorkerPool,
        recorder: Any,
    ) -> None:
        super().__init__(failure_config)
        self._settings = settings
        self._policy = policy
        self._pool = pool
        self._recorder = recorder
        self._history: list[Failure] = []
        self._kept: set[str] = set()
        policy.choose_excluded = self._leave_nodes_out

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        if has_yielded(training_failed_error):
            return FailureDecision.RETRY
        if isinstance(training_failed_error, ControllerError) and isinstance(
            training_failed_error.controller_failure, WorkerGroupStartupTimeoutError
        ):
            return FailureDecision.RETRY  # the room was taken by somebody else; look again
        rewind = next(
            (
                c
                for c in causes_of(training_failed_error).values()
                if isinstance(c, TrainingRewinds)
            ),
            None,
        )
        if rewind is not None:
            ray.get(self._recorder.rewind.remote(rewind.step, rewind.message))
            return FailureDecision.RETRY
        dead = self._pool.find_dead()
        text = describe(training_failed_error, dead)
        step, saved_step = ray.get(self._recorder.failed.remote(text))
        failure = self._failure(training_failed_error, dead, text, step, saved_step)
        decision = decide(self._settings, self._history, failure)
        self._history.append(failure)
        if isinstance(decision, GiveUp):
            ray.get(self._recorder.gave_up.remote(decision.reason))
            return FailureDecision.RAISE
        self._policy.not_before = time.monotonic() + decision.delay_s
        if decision.delay_s:
            self._pool.note(decision.reason)
        return FailureDecision.RETRY

    def _failure(
        self, error: TrainingFailedError, dead: set[int], text: str, step: int, saved_step: int
    ) -> Failure:
        causes = causes_of(error)
        blamed = dead | {rank for rank, cause in causes.items() if is_hardware(str(cause))}
        nodes = {rank: node for node, rank in self._pool.ranks()}
        return Failure(
            time_s=time.time(),
            step=step,
            saved_step=saved_step,
            error=text,
            died=tuple(sorted(dead)),
            nodes=tuple(sorted({nodes[rank] for rank in blamed if rank in nodes})),
            is_final=any(is_final(cause) for cause in causes.values()),
        )

    def _leave_nodes_out(self) -> None:
        """Called whenever a group is to be formed: nodes come back, break and go meanwhile."""
        exclusions = exclude_nodes(
            self._settings,
            self._history,
            self._policy.orders.broken,
            self._policy.room_by_node(),
            time.time(),
            self._settings.min_workers,
        )
        for node in exclusions.left_out.keys() - self._policy.excluded:
            self._pool.note(f"node {node[:8]} is left out: {exclusions.left_out[node]}")
        for node in exclusions.kept.keys() - self._kept:
            self._pool.note(
                f"node {node[:8]} is needed all the same, though {exclusions.kept[node]}"
            )
        self._kept = set(exclusions.kept)
        self._policy.excluded = set(exclusions.left_out)


def has_yielded(error: TrainingFailedError) -> bool:
    """Whether every worker ended its attempt in order, to let the group be formed anew."""
    causes = causes_of(error).values()
    return bool(causes) and all(isinstance(cause, Yielded) for cause in causes)


def describe(error: TrainingFailedError, dead: Collection[int] = ()) -> str:
    """One clause on a failure: the ranks whose process is known to have died, else what the first
    raised."""
    causes = causes_of(error)
    died = {rank for rank, cause in causes.items() if isinstance(cause, RayActorError)}
    if died or dead:
        return f"the worker of rank {', '.join(map(str, sorted(died | set(dead))))} died"
    if not causes:
        cause = getattr(error, "controller_failure", error)
        return f"the workers could not be started: {_shortly(cause)}"
    telling = {r: c for r, c in causes.items() if not isinstance(c, Yielded)} or causes
    rank, cause = min(telling.items(), key=_own_errors_first)
    return f"rank {rank} failed: {_shortly(cause)}"


def _own_errors_first(item: tuple[int, BaseException]) -> tuple[bool, int]:
    """A rank that pliant ended on purpose tells more than those that then lost their peer."""
    rank, cause = item
    return not isinstance(cause, PliantError), rank


def pliant_error_in(error: TrainingFailedError) -> PliantError | None:
    """The error of pliant's own that made the workers fail, if one did."""
    causes = causes_of(error).values()
    return next((cause for cause in causes if isinstance(cause, PliantError)), None)


def causes_of(error: TrainingFailedError) -> dict[int, BaseException]:
    """What each rank met; empty where the controller itself failed."""
    failures = error.worker_failures if isinstance(error, WorkerGroupError) else {}
    return {rank: root_cause(failure) for rank, failure in failures.items()}


def root_cause(failure: BaseException) -> BaseException:
    """The exception itself, without Ray's wrapping."""
    if isinstance(failure, UserExceptionWithTraceback):
        return failure._base_exc
    if isinstance(failure, WorkerHealthCheckFailedError):
        return failure.health_check_failure
    return failure


def _shortly(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1][:300]}" if lines else type(error).__name__
