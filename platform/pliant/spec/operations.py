"""Checkpoints, records and resources: `checkpoint:`, `tracking:` and `resources:` of a job spec."""

from pathlib import PurePosixPath
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from pliant.spec.base import Auto, Float, Int, Section


class CheckpointSpec(Section):
    """When state is saved and how much of it is kept. The last step is always saved."""

    every: Auto | Annotated[Int, Field(gt=0)] = 50
    """Steps between checkpoints. "auto" weighs what one costs against how often the job fails, as
    both are measured (Young 1974, Daly 2006)."""
    hot_every: Auto | Annotated[Int, Field(ge=0)] = "auto"
    """Steps between snapshots in the memory of the node, and of another node where the job has
    several: what a lost worker or node costs at most. "auto" is the smallest number with which they
    take 2% of the time; 0 takes none."""
    keep: Int = Field(2, gt=0)
    """Checkpoints kept, the newest first."""
    keep_every: Int | None = Field(None, gt=0)
    """Of every so many steps the first checkpoint is kept for good."""
    keep_best: Int = Field(0, ge=0)
    """Checkpoints kept besides, the best first; 0 for none."""
    best_metric: str = "eval_loss"
    """What `keep_best` compares: a metric of the evaluation before a checkpoint."""
    best_mode: Literal["min", "max"] = "min"
    """Whether a low or a high `best_metric` is good."""
    storage: str | None = None
    """Where checkpoints and ledger files lie; by default in the run directory. An absolute path
    that all nodes share, or a URI of pyarrow or fsspec such as `s3://bucket/prefix`; each run has
    a directory below it. Credentials come from the environment, never from here."""

    @field_validator("storage")
    @classmethod
    def _usable_anywhere(cls, storage: str | None) -> str | None:
        if storage is None:
            return None
        if "@" in urlsplit(storage).netloc:
            raise ValueError(
                "holds a login, and a spec is recorded. Set the credentials in the environment "
                "instead"
            )
        if "://" not in storage and not PurePosixPath(storage).is_absolute():
            raise ValueError(
                f"is {storage}, which every node would look for elsewhere. Give an absolute path "
                "or a URI"
            )
        return storage


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
