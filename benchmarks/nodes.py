"""A cluster of several nodes on this machine, which come and go."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import plain_ray
import ray
from ray.cluster_utils import Cluster
from sides import CPUS_PER_WORKER, NUM_NODES


@dataclass
class Nodes:
    """A cluster on this machine."""

    cluster: Cluster
    nodes: list[Any] = field(default_factory=list)

    def add(self) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=CPUS_PER_WORKER))

    def lose(self) -> None:
        """The newest node's processes get SIGKILL."""
        self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)

    def fill_up(self) -> None:
        while len(self.nodes) < NUM_NODES:
            self.add()

    def wait_until_free(self) -> None:
        """Nothing of the job before is left."""
        wait_for(lambda: ray.available_resources().get("CPU") == NUM_NODES * CPUS_PER_WORKER + 1)


@contextmanager
def nodes_of(tuned: bool) -> Iterator[Nodes]:
    # Ray insists on its own temporary folder, whatever folder it is given.
    Path("/tmp/ray").mkdir(exist_ok=True)
    folder = tempfile.mkdtemp(prefix="bench-", dir="/tmp")
    niceness = "0" if tuned else "15"
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RAY_AUTH_MODE": "disabled",
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "RAY_worker_niceness": niceness,
    }
    head = {"num_cpus": 1, "include_dashboard": False, "temp_dir": folder}
    if tuned:
        head["_system_config"] = plain_ray.TUNED_CLUSTER
    cluster = Cluster(initialize_head=True, head_node_args=head)
    Path("/tmp/ray/ray_current_cluster").unlink(missing_ok=True)
    # Ray prints a page for every node that is lost.
    with redirect_stdout(StringIO()):
        try:
            ray.init(address=cluster.address, namespace="pliant", log_to_driver=False)
            nodes = Nodes(cluster)
            nodes.fill_up()
            yield nodes
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def wait_for(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.time() + limit_s
    while not condition():
        if time.time() > end:
            raise TimeoutError(f"waited {limit_s:.0f} s for {condition}")
        time.sleep(0.05)
