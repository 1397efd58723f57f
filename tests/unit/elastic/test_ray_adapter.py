"""What pliant uses of Ray Train's insides is there and means what it meant."""

import inspect
from dataclasses import fields

import pytest
import ray
from ray._private import state as ray_state
from ray.exceptions import RayActorError
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import ScalingPolicy
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupState
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker, Worker
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from pliant.elastic.ray_adapter.failures import (
    causes_of,
    describe,
    has_yielded,
    pliant_error_in,
    root_cause,
)
from pliant.elastic.ray_adapter.processes import Footprint
from pliant.elastic.wish import Yielded
from pliant.errors import CheckpointMismatch


def test_this_is_the_version_that_the_adapter_was_written_for() -> None:
    assert ray.__version__ == "2.60.0", (
        "elastic/ray_adapter uses insides of Ray Train 2.60.0; read its modules and check each "
        "before you pin another version"
    )


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_the_trainer_still_hands_its_policies_to_the_method_that_is_overridden() -> None:
    method = TorchTrainer._initialize_and_run_controller
    kinds = [parameter.kind for parameter in inspect.signature(method).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD in kinds
    source = inspect.getsource(TorchTrainer.fit)
    for name in ("failure_policy", "scaling_policy", "train_run_context", "callbacks"):
        assert f"{name}=" in source


def test_the_controller_takes_its_group_from_the_attribute_and_ends_one_before_the_next() -> None:
    assert TrainController.worker_group_cls is WorkerGroup
    assert "self.worker_group_cls.create(" in inspect.getsource(TrainController._start_worker_group)
    resize = inspect.getsource(TrainController._execute_resize_decision)
    assert resize.index("self._shutdown_worker_group()") < resize.index("self._start_worker_group(")
    step = inspect.getsource(TrainController._step)
    assert step.index("worker_group_status.errors") < step.index(
        "make_decision_for_running_worker_group"
    ), "a failure must be seen before the scaling policy is asked"


def test_a_group_can_do_without_the_callback_for_datasets() -> None:
    assert "DatasetsCallback(" in inspect.getsource(TorchTrainer._create_default_callbacks)
    signature = inspect.signature(RayTrainWorker.init_train_context)
    assert signature.parameters["dataset_shard_provider"].default is None


def test_a_group_starts_and_ends_through_the_methods_that_are_overridden() -> None:
    assert parameters(WorkerGroup._start_impl) == ["self", "worker_group_state_builder"]
    assert "self._start_impl(" in inspect.getsource(WorkerGroup._start)
    assert parameters(WorkerGroup.shutdown) == ["self"]
    assert parameters(WorkerGroup._init_train_context) == ["self", "workers", "sync_actor"]
    assert parameters(WorkerGroup._assign_worker_ranks)[0] == "workers"
    assert {field.name for field in fields(WorkerGroupState)} == {
        "start_time",
        "placement_group_handle",
        "workers",
        "sync_actor",
    }
    assert {"actor", "metadata", "distributed_context"} <= {f.name for f in fields(Worker)}


def test_a_worker_actor_can_be_used_for_another_group() -> None:
    source = inspect.getsource(RayTrainWorker.init_train_context)
    assert "training_thread_runner=ThreadRunner()" in source
    assert "set_train_context(context)" in source
    assert parameters(RayTrainWorker.execute)[:2] == ["self", "fn"]


def test_the_policy_has_the_hooks_and_the_settings_that_are_used() -> None:
    for name in (
        "make_decision_for_non_running_worker_group",
        "make_decision_for_running_worker_group",
        "_get_num_workers_for_resource_request",
        "_maybe_send_resource_request",
        "before_controller_shutdown",
    ):
        assert hasattr(ScalingPolicy, name), name
    config = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 2})
    assert config._resources_per_worker_not_none == {"CPU": 2}


def test_the_control_store_tells_free_resources_and_draining_nodes() -> None:
    assert callable(ray_state.available_resources_per_node)
    assert callable(ray_state.state.get_draining_nodes)


def wrapped(error: Exception) -> UserExceptionWithTraceback:
    return UserExceptionWithTraceback(error, "Traceback ...")


def failed(failures: dict[int, Exception]) -> WorkerGroupError:
    return WorkerGroupError("failed", failures)


def test_what_pliant_raised_on_purpose_is_found_among_the_failures() -> None:
    own = CheckpointMismatch("of another model", key="model")
    assert pliant_error_in(failed({0: wrapped(RuntimeError("peer lost")), 1: wrapped(own)})) is own
    assert pliant_error_in(failed({0: wrapped(RuntimeError("boom"))})) is None


def test_a_group_has_yielded_only_where_every_worker_ended_in_order() -> None:
    assert has_yielded(failed({0: wrapped(Yielded(7)), 1: wrapped(Yielded(7))}))
    assert not has_yielded(failed({0: wrapped(Yielded(7)), 1: RayActorError()}))
    assert not has_yielded(ControllerError(RuntimeError("no room")))


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
        ({0: wrapped(Yielded(3)), 1: RayActorError()}, "the worker of rank 1 died"),
        ({0: wrapped(ValueError("first\nno luck"))}, "rank 0 failed: ValueError: no luck"),
        (
            {
                0: wrapped(RuntimeError("peer lost")),
                1: wrapped(CheckpointMismatch("of another model", key="model")),
            },
            "rank 1 failed: CheckpointMismatch: of another model",
        ),
    ],
)
def test_failures_are_told_in_a_clause(failures: dict[int, Exception], sentence: str) -> None:
    assert describe(failed(failures)) == sentence


def test_a_start_that_failed_is_told_in_a_clause() -> None:
    error = ControllerError(RuntimeError("A worker died as it started."))
    assert describe(error) == (
        "the workers could not be started: RuntimeError: A worker died as it started."
    )
    assert causes_of(error) == {}


def test_the_cause_is_found_beneath_rays_wrapping() -> None:
    cause = RuntimeError("boom")
    assert root_cause(wrapped(cause)) is cause
    assert root_cause(cause) is cause


def test_a_process_that_has_grown_a_little_is_used_again_and_one_that_leaks_is_not() -> None:
    first = Footprint(memory_bytes=500 << 20, num_files=80)
    assert not Footprint(600 << 20, 100).has_outgrown(first)
    assert Footprint(700 << 20, 80).has_outgrown(first)
    assert Footprint(500 << 20, 140).has_outgrown(first)
