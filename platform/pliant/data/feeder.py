"""One actor per job that has Ray Data read blocks ahead of the ranks and hands them out.

Blocks lie on an absolute grid: block k holds steps [k * block_steps, (k + 1) * block_steps) of the
run. A block is therefore the same whoever asks, and a worker group that starts again is served from
the blocks that are still here. The feeder is detached from any worker group and outlives it.
"""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from pliant.data.blocks import assemble_steps
from pliant.data.plan import DataPlan, PlanSettings
from pliant.data.store import SplitPlace

log = logging.getLogger(__name__)

SEGMENT_BLOCKS = 16
"""Blocks per execution of Ray Data: the first block of an execution takes time proportional to
their number, and a short execution never stalls half done."""
AHEAD_BLOCKS = 8
"""With fewer blocks ahead of the ranks, the next execution starts."""
KEPT_BLOCKS = 64
READERS = 1
"""Processes that read. A block takes milliseconds, and a process seconds to start."""


@dataclass(frozen=True)
class BlockGrid:
    """What the blocks of a run are made from; cheap to pickle."""

    split: SplitPlace
    settings: PlanSettings
    pad_id: int
    num_steps: int
    block_steps: int

    @property
    def num_blocks(self) -> int:
        return -(-self.num_steps // self.block_steps)

    def steps_of(self, block: int) -> tuple[int, int]:
        first = block * self.block_steps
        return first, min(first + self.block_steps, self.num_steps)

    def open(self) -> DataPlan:
        return DataPlan(self.split.open(), self.settings)


class PackedBlocks(Datasource):
    """Ray Data's view of the grid: one read task per block."""

    def __init__(self, grid: BlockGrid, first: int, last: int) -> None:
        super().__init__()
        self._grid = grid
        self._blocks = range(first, last)

    def get_name(self) -> str:
        return "PackedBlocks"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        size = self._grid.settings.global_batch_size * self._grid.block_steps
        metadata = BlockMetadata(num_rows=size, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(_Reader(self._grid, block), metadata) for block in self._blocks]


class _Reader:
    """Assembles one block, in whatever process Ray Data runs it."""

    def __init__(self, grid: BlockGrid, block: int) -> None:
        self._grid = grid
        self._block = block

    def __call__(self) -> Iterator[pa.Table]:
        grid = self._grid
        yield assemble_steps(_opened(grid), *grid.steps_of(self._block), grid.pad_id)


@lru_cache(maxsize=2)
def _opened(grid: BlockGrid) -> DataPlan:
    """A process reads many blocks of a run, and keeps what it has opened and verified."""
    return grid.open()


class Feeder:
    """The actor's class; start it with `start_feeder`."""

    def __init__(self, grid: BlockGrid) -> None:
        self._grid = grid
        self._futures: dict[int, asyncio.Future[ray.ObjectRef]] = {}
        self._wanted = 0
        self._reading = False

    async def get(self, block: int) -> list[ray.ObjectRef]:
        """A reference to the block, in a list so that Ray does not fetch it on the way."""
        future = self._future(block)
        self._wanted = block
        self._read_ahead()
        return [await asyncio.shield(future)]

    def _future(self, block: int) -> "asyncio.Future[ray.ObjectRef]":
        if block not in self._futures:
            self._futures[block] = asyncio.get_running_loop().create_future()
        return self._futures[block]

    def _read_ahead(self) -> None:
        """Starts an execution at the first block that is missing, unless one is under way."""
        first = self._first_missing()
        if self._reading or first is None:
            return
        self._reading = True
        end = min(first + SEGMENT_BLOCKS, self._grid.num_blocks)
        last = next((b for b in range(first + 1, end) if self._is_here(b)), end)
        loop = asyncio.get_running_loop()
        execution = loop.run_in_executor(None, self._read, first, last, loop)
        execution.add_done_callback(self._after_reading)

    def _first_missing(self) -> int | None:
        """What a rank waits for comes first, wherever it lies: whoever asked last may be elsewhere.
        Else it is what will be asked for next."""
        waiting = [b for b, future in self._futures.items() if not future.done()]
        end = min(self._wanted + AHEAD_BLOCKS, self._grid.num_blocks)
        ahead = [b for b in range(self._wanted, end) if not self._is_here(b)]
        return min(waiting or ahead, default=None)

    def _is_here(self, block: int) -> bool:
        return block in self._futures and self._futures[block].done()

    def _read(self, first: int, last: int, loop: asyncio.AbstractEventLoop) -> None:
        block = first
        for bundle in _execute(self._grid, first, last).iter_internal_ref_bundles():
            for entry in bundle.blocks:
                loop.call_soon_threadsafe(self._deliver, block, entry.ref)
                block += 1
        if block != last:
            raise RuntimeError(f"Ray Data gave {block - first} blocks instead of {last - first}")

    def _deliver(self, block: int, ref: ray.ObjectRef) -> None:
        future = self._future(block)
        if not future.done():
            future.set_result(ref)
        oldest = self._wanted - (KEPT_BLOCKS - SEGMENT_BLOCKS - AHEAD_BLOCKS)
        kept = range(oldest, self._wanted + KEPT_BLOCKS)
        for far in [b for b in self._futures if b not in kept and self._is_here(b)]:
            del self._futures[far]

    def _after_reading(self, execution: "asyncio.Future[None]") -> None:
        self._reading = False
        error = execution.exception()
        if error is None:
            self._read_ahead()
            return
        log.warning("Reading ahead failed; the ranks assemble their own batches: %s", error)
        waiting = [b for b, future in self._futures.items() if not future.done()]
        for block in waiting:
            self._futures.pop(block).set_exception(RuntimeError(str(error)))


def _execute(grid: BlockGrid, first: int, last: int) -> ray.data.Dataset:
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.target_max_block_size = None  # else a large block would come in several parts
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.enable_auto_log_stats = False
    # Reading takes no CPU of Ray's account: training may hold them all. It stays on this node: Ray
    # ends idle processes where there are more of them than CPUs, and spread over small nodes every
    # block would be read by a process of its own, seconds after the one before.
    return ray.data.read_datasource(
        PackedBlocks(grid, first, last),
        override_num_blocks=last - first,
        num_cpus=0,
        concurrency=READERS,
        ray_remote_args={"scheduling_strategy": _this_node()},
    )


def _this_node() -> Any:
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )


def start_feeder(job: str, grid: BlockGrid) -> ray.actor.ActorHandle:
    """A feeder for the job on this node, in place of one that an earlier driver may have left."""
    stop_feeder(job)
    actor = ray.remote(num_cpus=0, max_concurrency=1000, max_restarts=-1)(Feeder)
    return actor.options(
        name=feeder_name(job),
        namespace=NAMESPACE,
        lifetime="detached",
        scheduling_strategy=_this_node(),
        get_if_exists=False,
    ).remote(grid)


def stop_feeder(job: str) -> None:
    try:
        ray.kill(ray.get_actor(feeder_name(job), namespace=NAMESPACE))
    except ValueError:
        return  # there is none


NAMESPACE = "pliant"


def feeder_name(job: str) -> str:
    return f"feeder-{job}"
