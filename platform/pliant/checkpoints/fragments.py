"""The unit in which state is saved: a run of elements of one flattened tensor, held by one rank."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Kind = Literal["fp32", "exp_avg", "exp_avg_sq", "buffer"]
"""Master weights, the optimizer's two moments, and a model's persistent buffers."""


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + len(tensor)) of a tensor with `numel` elements."""

    kind: Kind
    name: str
    """Of the parameter or buffer, as the module names it."""
    start: int
    numel: int
    tensor: torch.Tensor
    """1-D; the live state itself: loading writes into it."""
    is_owner: bool = True
    """Whether this rank saves the fragment; of state that all ranks hold, one does."""

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"


class FragmentSource(Protocol):
    """The state of a partitioned engine, whatever the stage."""

    def fragments(self) -> list[Fragment]:
        """This rank's part of the state, with tensors that alias it."""

    def refresh(self) -> None:
        """Rebuilds what follows from the master weights, after they were loaded."""
