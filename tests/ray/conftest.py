"""One embedded Ray for all tests of a module that ask for it."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_AUTO_CONNECT": "0"}
# Ray's workers import the own code of the tests, as a user's would be importable on every node.
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])


@pytest.fixture(scope="module")
def embedded_ray() -> Iterator[None]:
    import ray

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
