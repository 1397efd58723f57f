"""The only module that touches Ray Train's insides. Pinned to Ray 2.60.

Ray Train has no slot for a failure policy; its trainer hands the policies to its controller in one
overridable method, which is used here. `tests/unit/elastic/test_ray_adapter.py` fails clearly where
another version moved something.
"""

import os
from typing import Any

from ray.exceptions import RayActorError
from ray.train import RunConfig, UserCallback
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.failure_handling import (
    FailureDecision,
    FailurePolicy,
)
from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError

from pliant.errors import PliantError

TUNED = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # Workers write to the run's own directories; nothing is resolved against the working directory
    # of a trial.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
"""Settings of Ray Train's controller: it notices a dead worker within a quarter of a second."""


def tune_environment(start_timeout_s: float) -> None:
    """Sets what Ray Train reads from the driver's environment; a user's own values win."""
    settings = TUNED | {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(start_timeout_s)}
    for variable, value in settings.items():
        os.environ.setdefault(variable, value)


class ElasticTrainer(TorchTrainer):
    """A TorchTrainer that does not repeat what cannot succeed."""

    def _initialize_and_run_controller(self, **controller: Any) -> Any:
        run_config: RunConfig = self.run_config
        controller["failure_policy"] = BudgetedFailures(run_config.failure_config)
        return super()._initialize_and_run_controller(**controller)


class FailureReport(UserCallback):
    """Tells the recorder, in the controller's process, that a worker group failed and why. What
    pliant raised on purpose ends the run and is told at its end."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        causes = [root_cause(error) for error in worker_exceptions.values()]
        if not any(isinstance(cause, PliantError) for cause in causes):
            self._recorder.failed.remote(describe(worker_exceptions))


def describe(failures: dict[int, Exception]) -> str:
    """One clause on the failures: the ranks whose process died, else what the first raised."""
    causes = {rank: root_cause(failure) for rank, failure in failures.items()}
    died = sorted(rank for rank, cause in causes.items() if isinstance(cause, RayActorError))
    if died:
        return f"the worker of rank {', '.join(map(str, died))} died"
    rank, cause = min(causes.items(), key=lambda item: item[0])
    return f"rank {rank} failed: {_shortly(cause)}"


def _shortly(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1][:300]}" if lines else type(error).__name__


class BudgetedFailures(FailurePolicy):
    """Ray's own budget, except that an error which pliant raised on purpose ends the run: the next
    attempt would only meet it again."""

    def __init__(self, failure_config: Any) -> None:
        super().__init__(failure_config)
        self._budget = DefaultFailurePolicy(failure_config)

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        if pliant_error_in(training_failed_error) is not None:
            return FailureDecision.RAISE
        return self._budget.make_decision(training_failed_error)


def pliant_error_in(error: BaseException) -> PliantError | None:
    """The error of pliant's own that made the workers fail, if one did."""
    if not isinstance(error, WorkerGroupError):
        return None
    causes = [root_cause(failure) for failure in error.worker_failures.values()]
    return next((cause for cause in causes if isinstance(cause, PliantError)), None)


def root_cause(failure: BaseException) -> BaseException:
    """The exception itself, without Ray's wrapping."""
    if isinstance(failure, UserExceptionWithTraceback):
        return failure._base_exc
    if isinstance(failure, WorkerHealthCheckFailedError):
        return failure.health_check_failure
    return failure
