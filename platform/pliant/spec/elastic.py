"""How the job grows, shrinks and survives: `elastic:` of a job spec."""

from typing import Annotated, Literal

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
    allowed_workers: list[Annotated[Int, Field(gt=0)]] = []
    """Numbers of workers to choose from; empty: all from min_workers to max_workers."""
    settle_s: Float = Field(2.0, ge=0)
    """For how long there must be room for more workers before the job takes them."""
    pause_s: Float = Field(10.0, ge=0)
    """Between the start of a worker group and its growth."""
    handshake_timeout_s: Float = Field(120.0, gt=0)
    """How long the workers may take to make their state safe when their number is to change; then
    they are ended as after a crash."""
    reuse_workers: bool = True
    """After a failure or a resize, go on in the processes that are left, where nothing is in doubt
    about them. Off: every worker group starts with new processes."""
    reuse_wait_s: Float = Field(5.0, gt=0)
    """How long such a process may take to end what it was doing."""
    max_reuses: Int = Field(50, ge=0)
    """Times that a process is used again before it is replaced."""
    spares: Literal["auto"] | Annotated[Int, Field(ge=0)] = "auto"
    """Processes kept ready on each node, to replace one that died; "auto" is 1 on the CPU and 0 on
    GPUs, where a process cannot be readied without one."""
    max_restarts: Int = Field(3, ge=0)
    """Restarts without progress before the job is given up. The same error in the same step, three
    times in a row, ends it earlier; preemptions and resizes are not counted."""
    progress_steps: Int = Field(10, gt=0)
    """So many new steps, safe in a checkpoint, give all restarts back."""
    max_backoff_s: Float = Field(60.0, ge=0)
    """The first restart is immediate; each further one without progress waits for twice as long as
    the one before, from 1 s up to this."""
    max_node_failures: Int = Field(3, gt=0)
    """A node on which workers died so often within a day is left out of the next groups. A node
    whose accelerator is found broken is left out at once."""
    health_every_s: Float = Field(60.0, gt=0)
    """Seconds between looks at the health of the accelerators."""
    hang_floor_s: Float = Field(60.0, gt=0)
    """A rank counts as hung no sooner than this long after it entered a phase (data, compute,
    collective, checkpoint, evaluation), or after its last sign of life."""
    hang_factor: Float = Field(10.0, gt=1)
    """Beyond the floor, a rank is hung when a phase takes so many times its usual time."""
    hang_start_s: Float = Field(600.0, gt=0)
    """The floor before an attempt's first step is done, for a phase never seen before, for a batch
    of an evaluation, and for a checkpoint that training waits for."""
    alarm_after_s: Float = Field(900.0, gt=0)
    """An alarm is raised when no new step was done for this long."""
    straggler_factor: Float = Field(1.3, gt=1)
    """A rank is called a straggler when its own part of a step, without the waiting for others,
    takes so many times the others' median."""
    straggler_steps: Int = Field(20, gt=1)
    """For so many steps in a row, but for a tenth of them."""
    replace_stragglers: bool = False
    """A straggler's worker is replaced; otherwise it is only named."""
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
        outside = [n for n in self.allowed_workers if not self.min_workers <= n <= self.max_workers]
        if outside:
            raise ValueError(
                f"allowed_workers has {outside[0]}, which is not between min_workers "
                f"{self.min_workers} and max_workers {self.max_workers}. Leave it out or widen them"
            )
        return self
