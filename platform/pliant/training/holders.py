"""Keeps snapshots alive when their node goes: an actor on each node holds copies for another.

Nodes form a ring; each rank sends its snapshots to the holder of the next node, in the background
and only as fast as that goes. A holder also serves what lies on its node to ranks elsewhere. It
outlives worker groups and driver, and is dropped at the end of the job.
"""

import logging
import queue
import re
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch.distributed as dist
from numpy.typing import NDArray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pliant.checkpoints import snapshot
from pliant.checkpoints.slots import Slot, Slots
from pliant.checkpoints.snapshot import Copies, Part, Roots
from pliant.elastic.ray_adapter.cluster_view import lost_among
from pliant.files import file_lock, replacing

log = logging.getLogger(__name__)

NAMESPACE = "pliant"
BLOCK_BYTES = 8 * 2**20
IN_FLIGHT = 2
ASK_TIMEOUT_S = 3.0
"""To list what it holds; a node that was just lost answers nothing."""
BLOCK_TIMEOUT_S = 30.0
LOOK_EVERY_S = 0.2
START_TIMEOUT_S = 180.0
"""The first block waits until the holder's process is up."""
NO_NODE = "here"
"""The name of the node where Ray does not run."""


class Holder:
    """The actor's class."""

    def __init__(self, roots: Roots, node: str) -> None:
        self._roots = roots
        self._node = node
        self._copies = Copies(roots.paths[0] / node)

    def parts(self) -> list[Part]:
        """Everything on this machine, copies and what its own ranks left."""
        return [replace(part, node=self._node) for part in snapshot.find(self._roots.paths)]

    def read(self, path: str, offset: int, size_bytes: int) -> NDArray[np.uint8]:
        """Of a file that a part names."""
        if not any(Path(path).is_relative_to(root) for root in self._roots.paths):
            raise ValueError(f"{path} does not belong to this run")
        return np.fromfile(path, dtype=np.uint8, count=size_bytes, offset=offset)

    def write(self, part: Part, offset: int, block: NDArray[np.uint8]) -> None:
        self._copies.write(part, offset, block)

    def finish(self, part: Part, ledger: bytes) -> None:
        self._copies.finish(part, ledger)

    def remove_before(self, attempt: int) -> None:
        self._copies.remove_before(attempt)

    def forget(self, kept: tuple[int, int] | None, before: int | None) -> None:
        """Whatever else attempts before that one left here belongs to a past that did not last."""
        snapshot.forget(self._roots.paths, kept, before)

    def clear(self) -> None:
        """Removes all that the run left on this machine."""
        self._roots.remove()


def own_node() -> str:
    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else NO_NODE


def next_node(own: str, ranks: Collection[str], others: Collection[str]) -> str | None:
    """Where copies for node `own` lie: on the next one that has ranks, else on one that might."""
    ring = sorted(set(ranks)) if len(set(ranks)) > 1 else sorted({*ranks, *others})
    if len(ring) < 2:
        return None
    return ring[(ring.index(own) + 1) % len(ring)]


def join(job: str, roots: Roots, slots: Slots) -> "Pusher | None":
    """Starts this node's holder and finds the next node's; None where there is no other node. All
    ranks call it."""
    nodes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, own_node())
    others = _nodes_for_workers() if ray.is_initialized() else []
    target = next_node(own_node(), nodes, others)
    if target is None:
        return None
    for node in (own_node(), target):
        _start(job, roots, node)
    return Pusher(job, target, slots)


def can_be_reached(job: str) -> bool:
    """Whether ranks of the next group find this node's snapshots: there is a holder that serves
    them, or no other node that a rank could be on."""
    if not ray.is_initialized() or len(_nodes_for_workers()) < 2:
        return True
    try:
        ray.get_actor(holder_name(job, own_node()), namespace=NAMESPACE)
    except ValueError:
        return False
    return True


def _nodes_for_workers() -> list[str]:
    """Living nodes with room for workers; a head that has none is not filled with snapshots."""
    return [
        str(node["NodeID"])
        for node in ray.nodes()
        if node["Alive"] and (node["Resources"].get("CPU") or node["Resources"].get("GPU"))
    ]


def _start(job: str, roots: Roots, node: str) -> Any:
    actor = ray.remote(num_cpus=0, max_concurrency=1, max_restarts=-1)(Holder)
    return actor.options(
        name=holder_name(job, node),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    ).remote(roots, node)


def holder_name(job: str, node: str) -> str:
    return f"holder-{job}-{node}"


def _holders(job: str) -> dict[str, Any]:
    """node id -> holder, of those that answer to a name."""
    if not ray.is_initialized():
        return {}
    pattern = re.compile(re.escape(holder_name(job, "")) + r"([0-9a-f]{56})")
    holders = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        match = pattern.fullmatch(actor["name"])
        if match and actor["namespace"] == NAMESPACE:
            with suppress(ValueError):  # it is gone by now
                holders[match[1]] = ray.get_actor(actor["name"], namespace=NAMESPACE)
    return holders


def parts_elsewhere(job: str) -> list[Part]:
    """What the job's living holders have."""
    found = _holders(job)
    lost = lost_among(found)  # the wait for one of these would be in vain
    calls = [holder.parts.remote() for node, holder in found.items() if node not in lost]
    if not calls:
        return []
    answered, _ = ray.wait(calls, num_returns=len(calls), timeout=ASK_TIMEOUT_S)
    parts: list[Part] = []
    for call in answered:
        with suppress(RayError):  # its node is gone
            parts += ray.get(call)
    return parts


def forget_elsewhere(
    job: str, kept: tuple[int, int] | None, before: int | None, timeout_s: float = 0.0
) -> None:
    """As `snapshot.forget`, on all nodes; waits for it so long. A holder that gets to it late may
    have snapshots of attempt `before` already."""
    calls = [holder.forget.remote(kept, before) for holder in _holders(job).values()]
    if calls and timeout_s:
        ray.wait(calls, num_returns=len(calls), timeout=timeout_s)


def fetch(job: str, node: str, path: str, size_bytes: int, folder: Path) -> Path:
    """The first bytes of another node's file as a file in `folder`, which the ranks of a node
    share. Raises `OSError` where it cannot be had."""
    target = folder / path.replace("/", "_")
    with file_lock(folder / f"{target.name}.lock"):
        if not target.exists():
            with replacing(target) as file:
                for block in _blocks(job, node, path, size_bytes):
                    file.write(block)
    return target


def _blocks(job: str, node: str, path: str, size_bytes: int) -> Iterator[Any]:
    try:
        holder = ray.get_actor(holder_name(job, node), namespace=NAMESPACE)
        offsets = range(0, size_bytes, BLOCK_BYTES)
        calls = [
            holder.read.remote(path, offset, min(BLOCK_BYTES, size_bytes - offset))
            for offset in offsets[:IN_FLIGHT]
        ]
        for number in range(len(offsets)):
            block = ray.get(calls.pop(0), timeout=BLOCK_TIMEOUT_S)
            for offset in offsets[number + IN_FLIGHT : number + IN_FLIGHT + 1]:
                length = min(BLOCK_BYTES, size_bytes - offset)
                calls.append(holder.read.remote(path, offset, length))
            yield memoryview(block)
    except (RayError, ValueError) as error:
        raise OSError(f"{path} could not be had from node {node[:8]}: {error}") from None


class Pusher:
    """Sends snapshots to the holder of another node, one at a time."""

    def __init__(self, job: str, node: str, slots: Slots) -> None:
        self._job = job
        self._node = node
        self._slots = slots
        self._closed = False
        self._has_sent = False
        self._sent: Slot | None = None
        self._kept: Slot | None = None
        self._failed = False
        self.is_safe = False
        """Whether a snapshot of all ranks came through: no earlier attempt's is needed any more."""
        self._busy = threading.Event()
        self._queue: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="pusher")
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        return self._busy.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether the last push did."""
        return self._failed

    def push(self, slot: Slot, was_whole: bool) -> None:
        """Sends the newest snapshot. All ranks call it in the same step, when none is busy; they
        tell whether all pushes before were whole.

        What was sent last stays here too until the next is whole over all ranks: only together
        with this node's own part can another node's copy be restored.
        """
        done = self._kept if was_whole else self._sent
        if done is not None:
            self._slots.release(done)
        if was_whole:
            self._kept = self._sent
            self.is_safe |= self._sent is not None
        self._slots.pin(slot)
        self._sent = slot
        self._busy.set()
        self._queue.put(slot)

    def close(self, timeout_s: float) -> None:
        """A copy that is not complete does not count, and the one before it is still there."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (slot := self._queue.get()) is not None:
            try:
                self._send(snapshot.read_part(slot.record))
                self._failed = False
            except (RayError, OSError, ValueError) as error:
                if not self._failed and not self._closed:
                    log.warning(
                        "A snapshot could not be sent to node %s: %s", self._node[:8], _brief(error)
                    )
                self._failed = True
            finally:
                self._busy.clear()

    def _send(self, part: Part) -> None:
        holder = ray.get_actor(holder_name(self._job, self._node), namespace=NAMESPACE)
        ledger = Path(part.ledger).read_bytes()[: part.ledger_bytes]
        content = np.memmap(part.file, dtype=np.uint8, mode="r")
        calls: list[Any] = []
        for offset in range(0, len(content), BLOCK_BYTES):
            if self._closed:
                return
            block = np.array(content[offset : offset + BLOCK_BYTES])
            calls.append(holder.write.remote(part, offset, block))
            if len(calls) == IN_FLIGHT:
                self._await(calls.pop(0))
        for call in [*calls, holder.finish.remote(part, ledger)]:
            self._await(call)
        if self.is_safe:
            holder.remove_before.remote(part.attempt)
        self._has_sent = True

    def _await(self, call: Any) -> None:
        """Raises `OSError` where the holder takes too long, or where there is no time for it any
        more."""
        limit_s = BLOCK_TIMEOUT_S if self._has_sent else START_TIMEOUT_S
        end = time.monotonic() + limit_s
        while not ray.wait([call], timeout=LOOK_EVERY_S)[0]:
            if self._closed:
                raise OSError("the attempt is over")
            if time.monotonic() > end:
                raise OSError(f"its holder has not answered for {limit_s:g} s")
        ray.get(call)


def _brief(error: BaseException) -> str:
    """Ray's own sentences fill a page."""
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"[:200]


def stop_holders(job: str, run_dir: Path) -> None:
    """Ends the job's holders and removes all its snapshots: call it once the job needs no restart.
    Its state is then on disk only."""
    holders = _holders(job)
    calls = [holder.clear.remote() for holder in holders.values()]
    if calls:
        ray.wait(calls, num_returns=len(calls), timeout=ASK_TIMEOUT_S)
    for holder in holders.values():
        ray.kill(holder)
    snapshot.remove(run_dir)
