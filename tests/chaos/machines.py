"""A cluster of several nodes on this machine, whose nodes can be lost as real ones are."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster

CPUS_PER_WORKER = 2
"""The head has one CPU, for reading data: no worker fits there."""
NOTICED_SOON = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1500,
    "health_check_failure_threshold": 2,
}
"""The head hears of a lost node within 2 s."""
PREEMPTION = 2
"""Ray's reason for draining a node."""


@dataclass(eq=False)
class Machine:
    """A node."""

    node: Any
    workers: int
    """That it has room for."""

    @property
    def node_id(self) -> str:
        return str(self.node.node_id)

    def pids(self) -> list[int]:
        """Of its raylet, and of everything that this started."""
        raylet = self.node.all_processes["raylet"][0].process.pid
        with suppress(psutil.NoSuchProcess):
            return [p.pid for p in psutil.Process(raylet).children(recursive=True)] + [raylet]
        return []


class Machines:
    """The cluster."""

    def __init__(self, rooms: Sequence[int]) -> None:
        """`rooms` are the workers that each node has room for."""
        self._start(rooms)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def room(self) -> int:
        """For workers, on nodes that stay."""
        return sum(machine.workers for machine in self.there)

    def _start(self, rooms: Sequence[int]) -> None:
        Path("/tmp/ray").mkdir(exist_ok=True)  # Ray looks there whatever it is told
        self._folder = tempfile.mkdtemp(prefix="chaos-", dir="/tmp")
        head = {
            "num_cpus": 1,
            "include_dashboard": False,
            "temp_dir": self._folder,
            "_system_config": NOTICED_SOON,
        }
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        Path("/tmp/ray/ray_current_cluster").unlink(missing_ok=True)
        self.there: list[Machine] = []
        for workers in rooms:
            self.add(workers)

    def add(self, workers: int) -> None:
        node = self._cluster.add_node(num_cpus=workers * CPUS_PER_WORKER)
        self.there.append(Machine(node, workers))

    def drain(self, machine: Machine, deadline_s: float) -> None:
        """Tells the head that the node will go; nothing happens to it yet."""
        self.there.remove(machine)
        deadline_ms = int((time.time() + deadline_s) * 1000)
        gcs = GcsClient(address=self.address)
        gcs.drain_node(machine.node_id, PREEMPTION, "a spot notice", deadline_ms)

    def lose(self, machine: Machine, forget: Callable[[str], object]) -> None:
        """Every process of the node ends at once; `forget` removes what was in its memory."""
        if machine in self.there:
            self.there.remove(machine)
        kill(machine.pids())
        forget(machine.node_id)
        with quiet():
            self._cluster.remove_node(machine.node, allow_graceful=False)

    def lose_all(self, forget: Callable[[str], object] = lambda node_id: None) -> list[int]:
        """The head too; the rooms that were there."""
        rooms = [machine.workers for machine in self.there]
        for machine in self.there[:]:
            self.lose(machine, forget)
        head = Machine(self._cluster.head_node, 0)
        kill(head.pids())
        with quiet():
            self._cluster.remove_node(self._cluster.head_node, allow_graceful=False)
        kill(left_behind(self._folder))
        shutil.rmtree(self._folder, ignore_errors=True)
        return rooms

    def start_again(self, rooms: Sequence[int]) -> None:
        """After `lose_all`."""
        self._start(rooms)

    def helpers(self, which: str) -> list[int]:
        """Processes of the actors whose class has a name that begins so."""
        pids = []
        for machine in (Machine(self._cluster.head_node, 0), *self.there):
            for pid in machine.pids():
                with suppress(psutil.Error):
                    if psutil.Process(pid).cmdline()[0].startswith(f"ray::{which}"):
                        pids.append(pid)
        return pids

    def end(self) -> None:
        with suppress(Exception):
            self.lose_all()


def kill(pids: Sequence[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@contextmanager
def frozen(pids: Sequence[int]) -> Iterator[None]:
    """The processes stand still, so that what is done meanwhile happens at one moment."""
    kill(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        kill(pids, signal.SIGCONT)


@contextmanager
def quiet() -> Iterator[None]:
    """Ray prints a page for every node that is lost."""
    with redirect_stdout(StringIO()):
        yield


def left_behind(folder: str) -> list[int]:
    """Processes that name the folder: Ray puts some of its own in sessions of their own."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if process.pid != os.getpid() and any(folder in word for word in words):
            found.append(process.pid)
    return found
