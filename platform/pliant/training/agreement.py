"""What all ranks learn together: no rank raises alone while the others wait for it."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError

from pliant.errors import FilesDamaged, PliantError


def agreed(action: Callable[[], Any]) -> Any:
    """What `action` returns on rank 0, or raises there, on every rank."""
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        outcome = [caught(action)]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def gather(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def caught(action: Callable[[], Any]) -> Any:
    """What `action` returns, or the error it raises: to be told to the other ranks first."""
    try:
        return action()
    except (OSError, PliantError) as error:
        return error
    except SafetensorError as error:
        return FilesDamaged(f"A file of tensors cannot be read: {error}")


def first_error(values: list[Any]) -> PliantError | OSError | None:
    """Of what `caught` returned."""
    return next((value for value in values if isinstance(value, (PliantError, OSError))), None)
