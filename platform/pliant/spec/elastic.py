"""How the job grows, shrinks and survives: `elastic:` of a job spec."""

from typing import Literal

from pydantic import Field, model_validator

from pliant.spec.base import Float, Int, Section


class DrillSpec(Section):
    """A rehearsed fault: it strikes once, and the job must recover as from a real one."""

    kind: Literal["kill"] = "kill"
    """kill: the worker's process gets SIGKILL."""
    rank: Int = Field(0, ge=0)
    """Whose process is struck."""
    step: Int = Field(gt=0)
    """Struck when this step is done."""


class ElasticSpec(Section):
    """Bounds of the worker group and the budget for restarts."""

    min_workers: Int = Field(1, gt=0)
    """The job waits until it has so many."""
    max_workers: Int = Field(1, gt=0)
    """The job takes so many where it can get them."""
    max_restarts: Int = Field(3, ge=0)
    """Restarts after failures before the job is given up."""
    start_timeout_s: Float = Field(120.0, gt=0)
    """How long to wait for `min_workers` workers at the start."""
    drills: list[DrillSpec] = []
    """Faults to rehearse."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "ElasticSpec":
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers {self.min_workers} is above max_workers {self.max_workers}. "
                "Lower the one or raise the other"
            )
        return self
