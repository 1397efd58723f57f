"""The only package that touches Ray Train's insides. Pinned to Ray 2.60.

Ray Train has no slots for a scaling policy, a failure policy or a worker group; its trainer hands
them to its controller in one overridable method, which is used here.
`tests/unit/elastic/test_ray_adapter.py` fails clearly where another version moved something.
"""

from pliant.elastic.ray_adapter.failures import pliant_error_in
from pliant.elastic.ray_adapter.policy import Orders, PolicySettings
from pliant.elastic.ray_adapter.trainer import (
    Elasticity,
    ElasticTrainer,
    runtime_env_of_workers,
    tune_environment,
)
from pliant.elastic.ray_adapter.worker_pool import PoolSettings

__all__ = [
    "ElasticTrainer",
    "Elasticity",
    "Orders",
    "PolicySettings",
    "PoolSettings",
    "pliant_error_in",
    "runtime_env_of_workers",
    "tune_environment",
]
