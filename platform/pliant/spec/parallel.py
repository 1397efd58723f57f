"""How the model is split over ranks: `parallel:` of a job spec."""

from typing import Literal

from pliant.spec.base import Section


class ParallelSpec(Section):
    """Data parallelism takes every worker; the other axes have the size 1."""

    tensor: Literal[1] = 1
    pipeline: Literal[1] = 1
    sequence: Literal[1] = 1
