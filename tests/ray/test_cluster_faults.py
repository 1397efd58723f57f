"""Nodes that are drained, die and come; a driver and a head that are lost."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray
import yaml

from fakes.clusters import LocalCluster, local_cluster
from fakes.faults import Faults
from fakes.watched import LIMIT_S, NEWS_S, Watch, WatchedJob, check, losses, tree_of
from pliant.checkpoints.snapshot import Roots, find
from pliant.tracking import read_summary
from pliant.training.state import KEY_FILE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Three nodes with room for one worker each."""
    with local_cluster(num_nodes=3) as cluster:
        yield cluster


@pytest.fixture
def connected(cluster: LocalCluster) -> Iterator[None]:
    ray.init(
        address=cluster.address, namespace="pliant", logging_level="ERROR", log_to_driver=False
    )
    yield
    ray.shutdown()


@pytest.mark.usefixtures("connected")
def test_a_node_on_which_workers_die_again_and_again_is_left_out(
    start: Callable[..., WatchedJob], faults: Faults, undisturbed: dict[int, float]
) -> None:
    elastic = {"max_workers": 3, "max_node_failures": 2}
    job = start("left-out", {"elastic": elastic}, faults.spec(hold=[3, 6, 9]))
    distrusted = ""
    for step in (3, 6):
        job.wait_for("hold", lambda step=step: faults.is_held(step, num_workers=3))
        nodes = {faults.node_of(step, rank): rank for rank in range(3)}
        distrusted = distrusted or next(iter(nodes))
        os.kill(job.pids()[-1][nodes[distrusted]], signal.SIGKILL)
        faults.release(step)
    job.wait_for("hold", lambda: faults.is_held(9, num_workers=2))
    assert distrusted not in {faults.node_of(9, rank) for rank in range(2)}
    faults.release(9)
    # The workers were held before the snapshots of steps 3 and 6.
    check(job.outcome(), restarts=2, steps_lost=2, world_sizes=(3, 2))
    assert losses(job.run_dir) == pytest.approx(undisturbed, rel=1e-5)
    assert any(f"node {distrusted[:8]}" in line and "left out" in line for line in job.lines)


@pytest.mark.usefixtures("connected")
def test_a_notice_that_comes_too_late_costs_no_more_than_a_crash(
    cluster: LocalCluster,
    start: Callable[..., WatchedJob],
    faults: Faults,
    undisturbed: dict[int, float],
) -> None:
    job = start("late", {"elastic": {"max_workers": 3}}, faults.spec(hold=[6]))
    job.wait_for("hold", lambda: faults.is_held(6, num_workers=3))
    lost = faults.node_of(6, rank=1)
    cluster.drain(lost, within_s=0.5)
    time.sleep(0.5)  # the workers are held: nobody has answered by then
    cluster.kill(lost)
    faults.release(6)
    job.wait_for_workers(2)
    cluster.add_node()
    outcome = job.outcome()
    check(outcome, steps_lost=outcome.summary.steps_lost, restarts=1)
    assert outcome.summary.steps_lost <= 2  # since the checkpoint of step 4
    assert losses(job.run_dir) == pytest.approx(undisturbed, rel=1e-5)


@pytest.mark.usefixtures("connected")
def test_a_node_may_be_drained_die_and_come_and_no_step_is_lost(
    cluster: LocalCluster,
    start: Callable[..., WatchedJob],
    faults: Faults,
    undisturbed: dict[int, float],
) -> None:
    job = start("nodes", {"elastic": {"max_workers": 3}}, faults.spec(hold=[3, 6, 7, 9]))

    job.wait_for("hold", lambda: faults.is_held(3, num_workers=3))
    drained = faults.node_of(3, rank=1)
    cluster.drain(drained, within_s=120)
    job.wait_for("resize", lambda: job.events("resize", step=3, to=2))
    time.sleep(NEWS_S)
    faults.release(3)
    job.wait_for_workers(2)
    assert job.events("checkpoint")[0]["step"] in (4, 5, 6)  # it is on disk, not on the node
    cluster.kill(drained)

    # Once the first copies have arrived on the other node, those of the next step do in no time.
    for step, copied in ((6, 0), (7, 6)):
        job.wait_for("hold", lambda step=step: faults.is_held(step, num_workers=2))
        job.wait_for("copies", lambda copied=copied: ranks_copied(job, copied) == {0, 1})
        if step == 6:
            faults.release(step)
    cluster.kill(faults.node_of(7, rank=1))
    lost_pid = job.pids()[-1][1]
    job.wait_for("death", lambda: not psutil.pid_exists(lost_pid))
    faults.release(7)
    job.wait_for_workers(1)

    job.wait_for("hold", lambda: faults.is_held(9))
    cluster.add_node()
    job.wait_for("resize", lambda: job.events("resize", step=9, to=2))
    time.sleep(NEWS_S)
    faults.release(9)
    job.wait_for_workers(2)

    # The node was lost while the workers were held, before the snapshot of step 7.
    check(job.outcome(), restarts=1, resizes=2, steps_lost=1, world_sizes=(3, 2, 1, 2))
    assert losses(job.run_dir) == pytest.approx(undisturbed, rel=1e-5)
    assert (
        "step 3: resizing from 3 to 2 workers: 1 worker is on a node that is being drained"
        in job.lines
    )
    assert "step 7: the worker of rank 1 died" in job.lines
    assert "step 9: resizing from 1 to 2 workers: there is room for 2 workers" in job.lines
    # The newcomer got ready while the one that was there was held.
    newcomers = {*job.pids()[-1].values()} - {*job.pids()[-2].values()}
    assert len(newcomers) == 1


def test_a_lost_driver_and_a_lost_head_cost_the_steps_since_the_last_checkpoint_at_most(
    cluster: LocalCluster,
    samples: Path,
    runs_dir: Path,
    faults: Faults,
    undisturbed: dict[int, float],
    tmp_path: Path,
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(tree_of(samples, "drivers", faults.spec(hold=[6, 10]))))

    with Driver(spec, runs_dir, "--address", cluster.address) as driver:
        driver.wait_for("hold", lambda: faults.is_held(6))
        driver.kill()
    faults.release(6)

    with Driver(spec, runs_dir, "--address", cluster.address) as driver:
        driver.wait_for("hold", lambda: faults.is_held(10))
        assert driver.events("attempt")[-1]["step"] >= 4
        cluster.end()
        driver.kill()  # it was on the head
    faults.release(10)

    with Driver(spec, runs_dir) as driver:
        code, told = driver.wait()
        assert code == 0, told
        attempts = driver.events("attempt")
    assert [attempt["cause"] for attempt in attempts] == ["start", "continued", "continued"]
    assert attempts[-1]["step"] >= 8
    summary = read_summary(runs_dir / "drivers" / "summary.json")
    assert (summary.state, summary.restarts, summary.world_sizes) == ("FINISHED", 0, (2,))
    assert summary.steps_lost <= 2 + 2
    assert (summary.samples_missing, summary.samples_duplicated) == (0, 0)
    assert losses(runs_dir / "drivers") == pytest.approx(undisturbed, rel=1e-5)


def ranks_copied(job: WatchedJob, step: int) -> set[int]:
    """Those whose snapshot of this step of the latest attempt, or of a later one, lies on another
    node as well."""
    attempt = job.events("attempt")[-1]["attempt"]
    roots = Roots.of(job.run_dir, (job.run_dir / KEY_FILE).read_text())
    places: dict[int, set[str]] = {}
    for part in find(roots.paths):
        if part.attempt == attempt and part.moment.step >= step:
            places.setdefault(part.rank, set()).add(Path(part.file).parts[-3])
    return {rank for rank, nodes in places.items() if len(nodes) == 2}


class Driver(Watch):
    """`pliant run` as a process of its own, gone when the block ends."""

    def __init__(self, spec: Path, runs_dir: Path, *options: str) -> None:
        super().__init__(runs_dir / "drivers")
        self._told = spec.with_suffix(".log")
        with self._told.open("w") as told:
            self._process = subprocess.Popen(
                [
                    *[sys.executable, "-m", "pliant", "run", str(spec)],
                    *["--runs-dir", str(runs_dir), *options],
                ],
                stdout=told,
                stderr=told,
                env=os.environ | {"RAY_AUTH_MODE": "disabled"},
            )

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self) -> tuple[int, str]:
        """Its exit code and what it told."""
        code = self._process.wait(LIMIT_S)
        return code, self._told.read_text()

    def ended(self) -> str | None:
        code = self._process.poll()
        return None if code is None else f"it ended with {code}: {self._told.read_text()}"
