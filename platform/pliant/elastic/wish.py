"""What the outside wants of a running worker group; rank 0 carries it into the next step."""

from enum import IntEnum


class Wish(IntEnum):
    """The group acts upon it after the step in which rank 0 voted with it. A higher one comes
    first."""

    NONE = 0
    RESIZE = 1
    """Make the state safe and end, to go on with another number of workers."""
    DRAIN = 2
    """As RESIZE, but a node is going away: the state must be on disk."""
    STOP = 3
    """Take a checkpoint and end."""


class Yielded(Exception):
    """How a worker ends its attempt once its state is safe and the group is to be formed anew."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step

    def __str__(self) -> str:
        return f"yielded after step {self.step}"
