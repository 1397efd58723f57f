"""A worker's process between two groups: whether it may be used again, how a new one is readied,
and what its answers tell."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayError

GROWTH_LIMIT = 1.25
"""A process that holds so much more memory or so many more files than when it was first kept is not
used again."""
_MEMORY_ALLOWANCE_BYTES, _FILES_ALLOWANCE = 64 << 20, 32


@dataclass(frozen=True)
class Footprint:
    """What a process holds between two attempts."""

    memory_bytes: int
    """Without what is mapped from files or shared memory: snapshots, blocks of samples, stores."""
    num_files: int

    def has_outgrown(self, first: "Footprint") -> bool:
        return (
            self.memory_bytes > first.memory_bytes * GROWTH_LIMIT + _MEMORY_ALLOWANCE_BYTES
            or self.num_files > first.num_files * GROWTH_LIMIT + _FILES_ALLOWANCE
        )


def wait_until_idle(timeout_s: float) -> Footprint | None:
    """In a worker: what it holds once its training thread has ended and left its process group;
    None where that takes longer."""
    import torch.distributed as dist
    from ray.train.v2._internal.execution.context import get_train_context

    runner = get_train_context().execution_context.training_thread_runner
    end = time.monotonic() + timeout_s
    while runner.is_running():
        if time.monotonic() > end:
            return None
        time.sleep(0.002)
    if dist.is_initialized():
        return None
    process = psutil.Process(os.getpid())
    memory = process.memory_info()
    return Footprint(memory.rss - memory.shared, process.num_fds())


def ready(prime: Callable[[], None]) -> None:
    """In a spare: what Ray Train would import when it forms a group, and what the job needs."""
    import ray.data
    import ray.train.torch.config
    import ray.train.v2._internal.execution.train_fn_utils
    import ray.train.v2._internal.logging.logging
    import ray.train.v2.api.data_parallel_trainer
    import ray.tune  # noqa: F401

    prime()


def is_done(ref: Any) -> bool:
    return bool(ray.wait([ref], timeout=0)[0])


def raises(ref: Any) -> bool:
    try:
        ray.get(ref)
    except RayError:
        return True
    return False


def died(ref: Any) -> bool:
    """Whether the actor was gone before it could answer."""
    try:
        ray.get(ref, timeout=0)
    except RayActorError:
        return True
    except RayError:
        return False
    return False


def footprint_in(ref: Any) -> Footprint | None:
    try:
        return ray.get(ref, timeout=0)
    except RayError:
        return None
