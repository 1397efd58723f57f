import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from pliant.tracking import MlflowTracker


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creating MLflow's tables takes two seconds: most tests start from a copy."""
    database = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{database}").search_experiments()
    return database


@pytest.fixture
def uri(empty_store: Path, tmp_path: Path) -> str:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "bee"


@pytest.fixture
def make_tracker(uri: str, run_dir: Path) -> Callable[..., MlflowTracker]:
    def make(**changes: object) -> MlflowTracker:
        settings = {
            "uri": uri,
            "experiment": "pliant",
            "run_name": "bee",
            "run_dir": run_dir,
            "tags": {"team": "apiary"},
            "params": {"training": {"lr": 1e-4}},
        }
        return MlflowTracker(**(settings | changes))

    return make


class Server:
    """A real MLflow server in a process of its own, which can be started late and ended."""

    def __init__(self, database: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._database = database
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        store = ["--backend-store-uri", f"sqlite:///{self._database}"]
        artifacts = ["--artifacts-destination", str(self._database.parent / "uploads")]
        listen = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *store, *artifacts, *listen],
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=self._log.open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + 90
        while not self._answers():
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.1)

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)  # the server and its own worker
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=1) as answer:
                return answer.status == 200
        except OSError:
            return False


@pytest.fixture
def server(empty_store: Path, tmp_path: Path) -> Iterator[Server]:
    shutil.copy(empty_store, tmp_path / "served.db")
    server = Server(tmp_path / "served.db", tmp_path / "server.log")
    yield server
    server.stop()
