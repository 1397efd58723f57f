"""How the model is split over ranks: `parallel:` of a job spec."""

from pliant.spec.base import One, Section


class ParallelSpec(Section):
    """Data parallelism takes every worker; the other axes have the size 1."""

    tensor: One = 1
    """Ranks that share each matrix."""
    pipeline: One = 1
    """Stages that the layers are cut into."""
    sequence: One = 1
    """Ranks that share each row."""
