"""A Ray cluster whose nodes come, are drained and die as a test wants; all on this machine."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PREEMPTION = 2
"""Ray's DrainNodeReason for a node that will be taken away."""


class LocalCluster:
    """A head without room for workers, and nodes with room for one each. Made by `local_cluster`.

    The nodes are processes of this machine and share its disk.
    """

    def __init__(self, temp_dir: str) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, "temp_dir": temp_dir},
        )
        self._nodes: dict[str, Any] = {}

    @property
    def address(self) -> str:
        """host:port of the head, for `ray.init(address=...)`."""
        return str(self._cluster.address)

    def add_node(self) -> str:
        """One more; its id."""
        node = self._cluster.add_node(num_cpus=1)
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def drain(self, node_id: str, within_s: float) -> None:
        """Ray is told that the node will be gone by then, as by a spot notice."""
        from ray._raylet import GcsClient

        deadline_ms = int((time.time() + within_s) * 1000)
        client = GcsClient(address=self.address)
        is_accepted, reason = client.drain_node(node_id, PREEMPTION, "spot notice", deadline_ms)
        assert is_accepted, reason

    def kill(self, node_id: str) -> None:
        """All of its processes end at once, and what was in its memory is gone."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)
        for base in ("/dev/shm", tempfile.gettempdir()):
            for memory in Path(base).glob(f"pliant-*/{node_id}"):
                shutil.rmtree(memory)

    def end(self) -> None:
        """The nodes and then the head, whatever they are doing. Nothing here may be connected."""
        # A client that misses its head for a minute would end this process.
        self._cluster.global_state.disconnect()
        for node_id in list(self._nodes):
            self.kill(node_id)
        if self._cluster.head_node is not None:
            self._cluster.remove_node(self._cluster.head_node, allow_graceful=False)


@contextmanager
def local_cluster(num_nodes: int) -> Iterator[LocalCluster]:
    """Gone when the block ends, as is its folder. It takes 10 to 20 s to start."""
    # Ray's cluster writes the head's address into the usual folder, wherever its own folder is.
    usual = Path(tempfile.gettempdir()) / "ray"
    usual.mkdir(exist_ok=True)
    # Paths of Ray's sockets must stay below 107 bytes, which pytest's tmp_path would exceed.
    temp_dir = tempfile.mkdtemp(prefix="nodes-", dir="/tmp")
    cluster = LocalCluster(temp_dir)
    address = cluster.address
    try:
        for _ in range(num_nodes):
            cluster.add_node()
        yield cluster
    finally:
        cluster.end()
        _forget_address(usual / "ray_current_cluster", address)
        shutil.rmtree(temp_dir, ignore_errors=True)


def _forget_address(path: Path, address: str) -> None:
    """Else whoever starts Ray on this machine next would be led to a cluster that is gone."""
    with suppress(OSError):
        if path.read_text().strip() == address:
            os.remove(path)
