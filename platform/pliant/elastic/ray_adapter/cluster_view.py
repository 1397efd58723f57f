"""What Ray's control store knows of the nodes, and what it has not noticed yet."""

import socket
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import ray
from ray._private import state as ray_state

CONNECT_TIMEOUT_S = 0.5
MOST_AT_ONCE = 64
"""Nodes that are asked at the same time."""


@dataclass(frozen=True)
class ClusterView:
    """The nodes on which workers may run."""

    free: Mapping[str, Mapping[str, float]]
    """Free resources by node id."""
    leaving: Mapping[str, float]
    """Seconds until they are gone, by id of a node that is being drained; infinite where it is not
    known."""


def look(excluded: Collection[str] = (), lost: Collection[str] = ()) -> ClusterView:
    """The cluster as it is now, without the nodes named."""
    draining = dict(ray_state.state.get_draining_nodes() or {})
    leaving = {node: _seconds_until(deadline_ms) for node, deadline_ms in draining.items()}
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    good = alive - draining.keys() - set(excluded) - set(lost)
    free = ray_state.available_resources_per_node()
    return ClusterView({node: free.get(node, {}) for node in good}, leaving)


def lost_among(suspects: Collection[str]) -> set[str]:
    """Those of the nodes that are gone: the control store says so, or nobody answers where the
    node's Ray should listen. The store alone would need seconds to notice."""
    if not suspects:
        return set()
    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    asked = [node for node in suspects if node in alive]
    with ThreadPoolExecutor(min(len(suspects), MOST_AT_ONCE)) as threads:
        answers = dict(
            zip(asked, threads.map(lambda node: _answers(alive[node]), asked), strict=True)
        )
    return {node for node in suspects if not answers.get(node)}


def _answers(node: Mapping[str, object]) -> bool:
    place = str(node["NodeManagerAddress"]), int(str(node["NodeManagerPort"]))
    try:
        socket.create_connection(place, timeout=CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _seconds_until(deadline_ms: int) -> float:
    return deadline_ms / 1000 - time.time() if deadline_ms else float("inf")
