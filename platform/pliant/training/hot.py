"""The snapshots of one rank in one attempt, and their copies on another node."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from pliant.checkpoints import snapshot
from pliant.checkpoints.fragments import Fragment
from pliant.checkpoints.slots import Slot, Slots, lay_out, owned
from pliant.checkpoints.snapshot import Moment, Roots
from pliant.errors import PliantError
from pliant.topology import Place
from pliant.training import holders
from pliant.training.agreement import caught, first_error, gather
from pliant.training.contents import Contents


class Snapshots:
    """All ranks call its methods, in the same steps."""

    def __init__(
        self,
        slots: Slots,
        roots: Roots,
        attempt: int,
        total_bytes: int,
        pusher: holders.Pusher | None,
        device: torch.device,
    ) -> None:
        self.slots = slots
        self.total_bytes = total_bytes
        """Of all ranks' files together."""
        self._roots = roots
        self._attempt = attempt
        self._pusher = pusher
        self._device = device
        self._step = -1
        self._num_taken = 0

    def take(
        self,
        fragments: list[Fragment],
        moment: Moment,
        is_hot: bool,
        write_ledger: Callable[[], None],
    ) -> float | None:
        """Takes the snapshot of a step; the seconds it took, or None where that says little of the
        next one. Does nothing where it was taken before.

        Raises `OSError` where there is no room, on this rank alone, for the snapshot or for what
        `write_ledger` writes. The others are told in any case: all of them wait for it.
        """
        if moment.step == self._step:
            return None
        self._step = moment.step
        slot = None
        try:
            began, num_made = time.perf_counter(), self.slots.num_made
            write_ledger()
            slot = self.slots.take(owned(fragments), moment.step)
            if is_hot:
                self.slots.record(slot, moment)
            seconds = time.perf_counter() - began
        finally:
            if is_hot:
                self._after(slot)
        return seconds if self.slots.num_made == num_made else None

    def pinned(self, step: int) -> Slot:
        """The snapshot of this step, to be released. Raises `OSError` where it could not be
        taken."""
        latest = self.slots.latest
        if latest is None or latest.step != step:
            raise OSError(f"there is no snapshot of step {step}")
        self.slots.pin(latest)
        return latest

    def has(self, step: int) -> bool:
        return self.slots.latest is not None and self.slots.latest.step == step

    def close(self, timeout_s: float) -> None:
        if self._pusher is not None:
            self._pusher.close(timeout_s)
        self.slots.close()

    def _after(self, slot: Slot | None) -> None:
        """What earlier attempts left is kept until a snapshot of this one is complete over all
        ranks; where there is another node, until it has the copies."""
        self._num_taken += 1
        if self._pusher is None:
            self.slots.replaces_earlier = True  # whoever takes the next knows that all took this
            if self._num_taken == 2:
                self._remove_earlier()
            return
        busy, failed = self._pusher.is_busy or slot is None, self._pusher.has_failed
        flags = torch.tensor([busy, failed], dtype=torch.int32, device=self._device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        busy, failed = flags.tolist()
        if busy or slot is None:
            return
        self._pusher.push(slot, was_whole=not failed)
        if self._pusher.is_safe and not self.slots.replaces_earlier:
            self.slots.replaces_earlier = True
            self._remove_earlier()

    def _remove_earlier(self) -> None:
        for root in self._roots.paths:
            snapshot.remove_before(root, self._attempt)


def open_snapshots(
    root: Path,
    roots: Roots,
    job: str,
    place: Place,
    attempt: int,
    contents: Contents,
    origin: str,
    is_hot: bool,
) -> Snapshots:
    """Makes the place for them; nothing is copied yet. `origin` as in `Description`."""
    layout = lay_out(owned(contents.fragments()))
    node = holders.own_node()
    slots = Slots(root, node, attempt, place.rank, place.world_size, layout, is_hot)
    slots.describe(contents.description(origin))
    pusher = holders.join(job, roots, slots) if is_hot else None
    total_bytes = sum(gather(layout.size_bytes))
    return Snapshots(slots, roots, attempt, total_bytes, pusher, contents.device)


def choose_root(
    roots: Roots, size_bytes: int, num_slots: int, world_size: int
) -> Path | PliantError | OSError:
    """Where so many slots lie; on every rank an error where any has no room for them."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    found = caught(lambda: roots.choose(num_slots * size_bytes * ranks_here))
    return first_error(gather(found)) or found
