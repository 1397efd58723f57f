"""The steps of a run as one rank sees them, in order, prepared ahead in a thread."""

import logging
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import pyarrow as pa
import ray
from ray.exceptions import GetTimeoutError, RayError

from pliant.batch import StepBatch
from pliant.data.blocks import Rows, assemble_steps
from pliant.data.feeder import BlockGrid
from pliant.data.plan import DataPlan
from pliant.topology import BatchShape, Place

log = logging.getLogger(__name__)

READY_STEPS = 8
"""Steps that are prepared ahead of the loop."""
POLL_S = 0.005
RETRY_FEEDER_S = 30.0
FETCH_S = 10.0


class BlockSource(Protocol):
    """Where a rank gets its blocks from."""

    def request(self, block: int) -> None:
        """Asks for a block that will be needed soon."""

    def take(self, block: int, timeout_s: float) -> pa.Table | None:
        """The block, or None where it is not ready yet or cannot be had."""


class NoBlocks:
    """No feeder: the rank assembles every step itself."""

    def request(self, block: int) -> None:
        return

    def take(self, block: int, timeout_s: float) -> pa.Table | None:
        return None


class FeederBlocks:
    """Blocks that Ray Data reads ahead, through the job's feeder."""

    def __init__(self, feeder: Any) -> None:
        self._feeder = feeder
        self._requests: dict[int, Any] = {}
        self._silent_until = 0.0

    def request(self, block: int) -> None:
        if block not in self._requests and time.monotonic() >= self._silent_until:
            self._requests[block] = self._feeder.get.remote(block)

    def take(self, block: int, timeout_s: float) -> pa.Table | None:
        self.request(block)
        if block not in self._requests:
            return None
        try:
            refs = ray.get(self._requests[block], timeout=timeout_s)
        except GetTimeoutError:
            return None
        except RayError as error:
            self._fall_silent(error)
            return None
        try:
            table = ray.get(refs[0], timeout=FETCH_S)
        except RayError as error:  # the block's node is gone, or as good as gone
            self._fall_silent(error)
            return None
        self._requests = {b: r for b, r in self._requests.items() if b > block}
        return table

    def _fall_silent(self, error: RayError) -> None:
        """Asks nothing for a while."""
        log.warning("The feeder does not answer; assembling batches here: %s", error)
        self._requests.clear()
        self._silent_until = time.monotonic() + RETRY_FEEDER_S


class StepStream:
    """Iterates over one rank's `StepBatch`es from step `first` on.

    The first batches after a start are assembled here while the feeder warms up, and again whenever
    it cannot be reached: the hand-over is exact, since order is arithmetic.
    """

    def __init__(
        self, grid: BlockGrid, shape: BatchShape, place: Place, source: BlockSource, first: int
    ) -> None:
        self._grid = grid
        self._shape = shape
        self._place = place
        self._source = source
        self._first = first
        self.num_assembled_here = 0

    def __iter__(self) -> Iterator[StepBatch]:
        self._ready: queue.Queue[StepBatch | BaseException | None] = queue.Queue(READY_STEPS)
        self._closed = threading.Event()
        thread = threading.Thread(target=self._prepare, name="step-stream", daemon=True)
        thread.start()
        try:
            while True:
                began = time.perf_counter()
                item = self._ready.get()
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield replace(item, data_wait_s=time.perf_counter() - began)
        finally:
            self._closed.set()
            thread.join()

    def _prepare(self) -> None:
        try:
            for batch in self._batches():
                if not self._offer(batch):
                    return
            self._offer(None)
        except BaseException as error:  # shown to the loop, which raises it
            self._offer(error)

    def _offer(self, item: StepBatch | BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _batches(self) -> Iterator[StepBatch]:
        plan = self._grid.open()
        step = self._first
        while step < self._grid.num_steps and not self._closed.is_set():
            block = step // self._grid.block_steps
            begin, end = self._grid.steps_of(block)
            table = self._wait_for(block)
            if table is None:
                self.num_assembled_here += 1
                begin, end = step, step + 1
                table = assemble_steps(plan, begin, end, self._grid.pad_id)
            # One row too few would shift every batch after it.
            assert table.num_rows == _num_packs(plan, begin, end)
            rows = Rows.of(table, self._shape.seq_len)
            yield from self._decode(plan, rows, begin, step, end)
            step = end

    def _wait_for(self, block: int) -> pa.Table | None:
        """Waits while the loop has something to do; None once it would run dry."""
        for ahead in (block, block + 1):
            if ahead < self._grid.num_blocks:
                self._source.request(ahead)
        while not self._closed.is_set():
            starving = self._ready.qsize() <= READY_STEPS // 2
            table = self._source.take(block, timeout_s=0.0 if starving else POLL_S)
            if table is not None or starving:
                return table
            time.sleep(POLL_S)
        return None

    def _decode(
        self, plan: DataPlan, rows: Rows, begin: int, first: int, end: int
    ) -> Iterator[StepBatch]:
        """The steps `first` up to `end` from rows that start with step `begin`."""
        row = 0
        for step in range(begin, end):
            place = plan.locate(step)
            last_row = row + place.last - place.first
            if step >= first:
                yield rows.step_batch(
                    row, last_row, self._shape, self._place, place.epoch, place.last
                )
            row = last_row


def _num_packs(plan: DataPlan, first: int, last: int) -> int:
    places = map(plan.locate, range(first, last))
    return sum(place.last - place.first for place in places)


def evaluation_batches(
    plan: DataPlan, pad_id: int, shape: BatchShape, place: Place
) -> Iterator[StepBatch]:
    """One pass over a held-out split, in its own order; as many batches on every rank."""
    for step in range(plan.steps_of(0)):
        rows = Rows.of(assemble_steps(plan, step, step + 1, pad_id), shape.seq_len)
        where = plan.locate(step)
        size = where.last - where.first
        yield rows.step_batch(0, size, shape, place, where.epoch, where.last)
