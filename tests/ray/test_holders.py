"""Holders keep a lost node's snapshots, and serve what lies on their own node. The two nodes are
processes of one machine, so a node is lost when it and its directory are gone."""

import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster

from fakes.checkpoints import NUMELS, cut, emptied, whole_tensors
from pliant.checkpoints import reader
from pliant.checkpoints.slots import Slots, lay_out, owned
from pliant.checkpoints.snapshot import Description, Moment, Roots
from pliant.training import holders
from pliant.training.commit import Base
from pliant.training.sources import HotFiles, snapshots

JOB = "held"
TENSORS = whole_tensors()


@pytest.fixture(scope="module")
def cluster():
    directory = tempfile.mkdtemp(prefix="ph", dir="/tmp")  # sockets need a short path
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "include_dashboard": False, "temp_dir": directory},
        )
        other = cluster.add_node(num_cpus=1)
        ray.init(cluster.address, namespace="pliant", logging_level="ERROR", log_to_driver=False)
        yield cluster, other
        ray.shutdown()
        cluster.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def until(condition, timeout_s=60.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_lost_nodes_snapshot_comes_back_from_its_neighbour(cluster, one_rank, tmp_path):
    ray_cluster, other = cluster
    roots = Roots.of(tmp_path, "key")
    own = roots.paths[0] / holders.own_node()
    fragments = owned(cut(TENSORS, 1)[0])
    slots = Slots(roots.paths[0], own.name, 1, 0, 1, lay_out(fragments))
    slots.describe(Description(1, NUMELS, "", {}, origin=""))
    assert not holders.can_be_reached(JOB)  # a rank on the other node would not see it
    pusher = holders.join(JOB, roots, slots)
    assert pusher is not None
    assert holders.can_be_reached(JOB)
    for step in (1, 2, 3):
        slots.ledger.append([(step - 1, np.array([7 * step]))])
        slot = slots.take(fragments, step)
        slots.record(slot, Moment(step, {"epoch": 0, "pack": 0}, {}))
        if step < 3:  # the node is lost before this one has gone out
            pusher.push(slot, was_whole=True)
            until(lambda: not pusher.is_busy)
    assert not pusher.has_failed

    # What lies on a node is served by its holder, to ranks that do not see its memory.
    (part,) = snapshots(JOB, roots)[0].parts
    copy = holders.fetch(JOB, own.name, part.file, part.size_bytes, tmp_path)
    assert copy.read_bytes() == Path(part.file).read_bytes()

    pusher.close(5.0)
    slots.close()
    shutil.rmtree(own)
    newest, *_ = snapshots(JOB, roots)
    assert newest.age == (1, 2)
    files = HotFiles(JOB, roots, newest)
    targets = emptied(fragments)
    reader.load(files.checkpoint(targets, Base()), targets)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(targets, fragments, strict=True))
    entries = files.entries(0, 1, Base())
    assert [(step, ids.tolist()) for step, ids in entries] == [(0, [7]), (1, [14])]

    ray_cluster.remove_node(other, allow_graceful=False)
    shutil.rmtree(roots.paths[0] / other.node_id, ignore_errors=True)
    assert snapshots(JOB, roots) == []
    with pytest.raises(OSError, match="could not be had from node"):
        holders.fetch(JOB, other.node_id, part.file, 10, tmp_path / "else")

    holders.stop_holders(JOB, tmp_path)
    assert not roots.paths[0].exists()
    until(lambda: holders._holders(JOB) == {})
