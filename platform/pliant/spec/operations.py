"""Checkpoints, records and resources: `checkpoint:`, `tracking:` and `resources:` of a job spec."""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from pliant.spec.base import Float, Int, Section


class CheckpointSpec(Section):
    """When state is saved and how much of it is kept. The last step is always saved."""

    every: Int = Field(50, gt=0)
    """Steps between checkpoints."""
    keep: Int = Field(2, gt=0)
    """Checkpoints kept, the newest first."""


class TrackingSpec(Section):
    """Where the job is recorded."""

    mlflow_uri: str | None = None
    """MLflow's tracking store; by default `mlflow.db` in the runs directory. Credentials come from
    MLflow's environment variables, never from here."""
    experiment: str = "pliant"
    """MLflow's experiment."""
    tags: dict[str, str] = {}
    """Further tags of the MLflow run."""
    system_metrics_every_s: Float = Field(10.0, gt=0)
    """Seconds between samples of the machine's own metrics."""

    @field_validator("mlflow_uri")
    @classmethod
    def _no_password(cls, uri: str | None) -> str | None:
        if uri is not None and "@" in urlsplit(uri).netloc:
            raise ValueError(
                "holds a login, and a spec is recorded. Set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD in the environment instead"
            )
        return uri


class ResourcesSpec(Section):
    """What each worker takes."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" is cuda where the cluster has GPUs."""
    cpus_per_worker: Float = Field(1.0, gt=0)
    """Logical CPUs that Ray accounts to each worker."""
    threads_per_worker: Int = Field(1, gt=0)
    """OMP_NUM_THREADS of each worker."""
