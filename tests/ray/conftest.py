"""One embedded Ray for all tests of a module that ask for it, and what jobs of the tests share."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_AUTO_CONNECT": "0"}
# Ray's workers import the own code of the tests, as a user's would be importable on every node.
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])

import pytest
import ray

from fakes.faults import Faults
from fakes.watched import WatchedJob, check, losses, spec_of, write_samples


@pytest.fixture(scope="module")
def embedded_ray() -> Iterator[None]:
    with own_ray():
        yield


@contextmanager
def own_ray() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    ray.init(
        address="local",
        namespace="pliant",
        num_cpus=4,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        _temp_dir=folder,
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    return Faults(tmp_path / "faults")


Start = Callable[..., WatchedJob]


@pytest.fixture
def start(samples: Path, runs_dir: Path, faults: Faults) -> Iterator[Start]:
    """Starts a job with changes to its spec. Whatever becomes of the test, its jobs are over when
    Ray is shut down, which would otherwise take the process along."""
    jobs = []

    def start(name: str, *changes: dict[str, Any], runs_dir: Path = runs_dir) -> WatchedJob:
        jobs.append(WatchedJob(spec_of(samples, name, *changes), runs_dir))
        return jobs[-1]

    yield start
    faults.release_all()
    for job in jobs:
        job.end()


@pytest.fixture
def undisturbed(samples: Path, runs_dir: Path) -> dict[int, float]:
    """The losses of the job that nothing happens to, on one worker. It is run once."""
    spec = spec_of(samples, "undisturbed", {"elastic": {"max_workers": 1}})
    if not (runs_dir / spec.name).exists():
        with nullcontext() if ray.is_initialized() else own_ray():
            check(WatchedJob(spec, runs_dir).outcome(), restarts=0)
    return losses(runs_dir / spec.name)
