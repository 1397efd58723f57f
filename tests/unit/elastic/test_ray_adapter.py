"""What pliant uses of Ray Train's insides is there and means what it meant."""

import inspect

import pytest
import ray
from ray.exceptions import RayActorError
from ray.train import FailureConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.exceptions import WorkerGroupError

from pliant.elastic.ray_adapter import BudgetedFailures, describe, pliant_error_in, root_cause
from pliant.errors import CheckpointMismatch


def test_this_is_the_version_that_the_adapter_was_written_for() -> None:
    assert ray.__version__ == "2.60.0", (
        "elastic/ray_adapter uses insides of Ray Train 2.60.0; read its docstring and check each "
        "before you pin another version"
    )


def test_the_trainer_still_hands_its_policies_to_the_method_that_is_overridden() -> None:
    method = TorchTrainer._initialize_and_run_controller
    kinds = [parameter.kind for parameter in inspect.signature(method).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD in kinds
    assert "failure_policy=" in inspect.getsource(TorchTrainer.fit)


def wrapped(error: Exception) -> UserExceptionWithTraceback:
    return UserExceptionWithTraceback(error, "Traceback ...")


def test_what_pliant_raised_on_purpose_is_found_and_not_tried_again() -> None:
    own = CheckpointMismatch("of another model", key="model")
    error = WorkerGroupError("failed", {0: wrapped(RuntimeError("peer lost")), 1: wrapped(own)})
    assert pliant_error_in(error) is own
    policy = BudgetedFailures(FailureConfig(max_failures=3))
    assert policy.make_decision(error) is FailureDecision.RAISE


def test_other_failures_are_tried_again_within_the_budget() -> None:
    error = WorkerGroupError("failed", {0: wrapped(RuntimeError("boom"))})
    assert pliant_error_in(error) is None
    policy = BudgetedFailures(FailureConfig(max_failures=2))
    decisions = [policy.make_decision(error) for _ in range(3)]
    assert decisions == [FailureDecision.RETRY, FailureDecision.RETRY, FailureDecision.RAISE]


@pytest.mark.parametrize(
    ("failures", "sentence"),
    [
        (
            {1: WorkerHealthCheckFailedError("check failed", RayActorError())},
            "the worker of rank 1 died",
        ),
        (
            {0: wrapped(RuntimeError("peer lost")), 2: RayActorError()},
            "the worker of rank 2 died",
        ),
        ({0: wrapped(ValueError("first\nno luck"))}, "rank 0 failed: ValueError: no luck"),
    ],
)
def test_failures_are_told_in_a_clause(failures: dict[int, Exception], sentence: str) -> None:
    assert describe(failures) == sentence


def test_the_cause_is_found_beneath_rays_wrapping() -> None:
    cause = RuntimeError("boom")
    assert root_cause(wrapped(cause)) is cause
    assert root_cause(cause) is cause
