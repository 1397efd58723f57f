"""A TorchTrainer whose controller follows pliant's policies and keeps processes between groups."""

import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup

from pliant.elastic.ray_adapter.failures import Failures
from pliant.elastic.ray_adapter.policy import ElasticPolicy, PolicySettings
from pliant.elastic.ray_adapter.worker_group import PooledWorkerGroup
from pliant.elastic.ray_adapter.worker_pool import PoolSettings, WorkerPool
from pliant.spec.elastic import ElasticSpec

TUNED = {
    # A dead worker is noticed within this time.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    # A node that is being drained is the scaling policy's affair.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # Workers write to the run's own directories; nothing is resolved against the working directory
    # of a trial.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
"""Settings of Ray Train's controller."""


def tune_environment(start_timeout_s: float) -> None:
    """Sets what Ray Train reads from the driver's environment; a user's own values win."""
    settings = TUNED | {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(start_timeout_s)}
    for variable, value in settings.items():
        os.environ.setdefault(variable, value)


@dataclass(frozen=True)
class Elasticity:
    """What the trainer needs beyond Ray Train's own settings."""

    spec: ElasticSpec
    policy: PolicySettings
    pool: PoolSettings
    recorder: Any


class ElasticController(TrainController):
    """Ray Train's controller with pliant's policies. They are made here, in its process, because
    they share the pool."""

    worker_group_cls = PooledWorkerGroup

    def __init__(self, elasticity: Elasticity, **controller: Any) -> None:
        context = controller["train_run_context"]
        recorder = elasticity.recorder
        pool = WorkerPool(elasticity.pool, recorder)
        policy = ElasticPolicy(context.scaling_config, elasticity.policy, pool, recorder)
        failures = Failures(
            context.run_config.failure_config, elasticity.spec, policy, pool, recorder
        )
        controller |= {
            "scaling_policy": policy,
            "failure_policy": failures,
            "callbacks": [*controller["callbacks"], pool],
        }
        super().__init__(**controller)


class ElasticTrainer(TorchTrainer):
    """Takes its workers from a pool, resizes by handshake, and does not repeat what cannot
    succeed."""

    def __init__(self, *args: Any, elasticity: Elasticity, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._elasticity = elasticity
        self._controller: Any = None

    def end(self) -> None:
        """Ends the controller and with it whatever it holds on the cluster; `fit` then raises."""
        if self._controller is not None:
            ray.kill(self._controller)

    def _create_default_callbacks(self) -> list[Any]:
        """Without the one for datasets: pliant's workers have a feeder of their own, and each group
        would start a process for nothing, at the worst moment."""
        callbacks = super()._create_default_callbacks()
        return [one for one in callbacks if not isinstance(one, DatasetsCallback)]

    def _initialize_and_run_controller(self, **controller: Any) -> Any:
        here = {ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}
        actor_class = ray.remote(
            num_cpus=0, label_selector=here, runtime_env={"env_vars": get_env_vars_to_propagate()}
        )(ElasticController)
        actor = self._controller = actor_class.remote(self._elasticity, **controller)
        ray.get(actor.run.remote())
        return ray.get(actor.get_result.remote())


def runtime_env_of_workers(env_vars: dict[str, str]) -> dict[str, Any]:
    """As Ray Train makes it for its workers: spares must have the same."""
    return dict(WorkerGroup._get_worker_runtime_env({"env_vars": env_vars}))
