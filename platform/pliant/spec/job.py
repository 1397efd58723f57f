"""One job: a frozen value that holds all that a user can ask for."""

import re

from pydantic import field_validator, model_validator

from pliant.spec.base import Section
from pliant.spec.data import DataSpec
from pliant.spec.deepspeed import DeepSpeedSpec
from pliant.spec.elastic import ElasticSpec
from pliant.spec.model import ModelSpec
from pliant.spec.operations import CheckpointSpec, ResourcesSpec, TrackingSpec
from pliant.spec.parallel import ParallelSpec
from pliant.spec.training import TrainingSpec


class JobSpec(Section):
    """One YAML file is one job."""

    name: str
    """Of the job; its files lie in `runs/NAME`. A job started again under its name goes on."""
    model: ModelSpec
    data: DataSpec
    training: TrainingSpec
    parallel: ParallelSpec = ParallelSpec()
    deepspeed: DeepSpeedSpec = DeepSpeedSpec()
    elastic: ElasticSpec = ElasticSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    tracking: TrackingSpec = TrackingSpec()
    resources: ResourcesSpec = ResourcesSpec()
    env: dict[str, str] = {}
    """Environment variables of every worker (NCCL and others), the same on every node."""

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise ValueError(
                f"is {name!r}, and it must name a folder: at most 100 letters, digits, dots, "
                "dashes and underscores, the first a letter or digit"
            )
        return name

    @field_validator("env", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        if isinstance(value, dict):
            return {key: _text(item) for key, item in value.items()}
        return value

    @model_validator(mode="after")
    def _exact_needs_whole_gradients(self) -> "JobSpec":
        if self.training.exact and self.deepspeed.zero_stage == 3:
            raise ValueError(
                "has training.exact with deepspeed.zero_stage 3, where no rank holds a whole "
                "gradient to add up. Use zero_stage 0, 1 or 2"
            )
        return self


def _text(value: object) -> object:
    """A plain value as a user would write it in a shell; nothing else can be a variable."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, (dict, list)) else str(value)
