"""A Ray head of its own for one test: own ports, own temporary folder, ended by its process group.

It meets no other Ray on the machine, and a test may run beside others. Its nodes are processes of
this machine, so a job submitted to it reads and writes the same disk.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Head:
    """Where a running head answers."""

    dashboard: str
    """URL of the Jobs API: `connect(head.dashboard)`."""
    gcs: str
    """host:port for `ray.init(address=...)`."""


@contextmanager
def running_head(num_cpus: int = 4, extra_env: dict[str, str] | None = None) -> Iterator[Head]:
    """A head node with a dashboard, gone when the block ends. Starting it takes 10 to 20 s."""
    # Paths of Ray's sockets must stay below 107 bytes, which pytest's tmp_path would exceed.
    temp_dir = Path(tempfile.mkdtemp(prefix="pl-", dir="/tmp"))
    ports = free_ports(8)
    log = temp_dir / "head.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(temp_dir, ports, num_cpus),
            env=_environment(temp_dir, extra_env or {}),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    head = Head(dashboard=f"http://127.0.0.1:{ports[1]}", gcs=f"127.0.0.1:{ports[0]}")
    try:
        _wait_until_ready(process, head, log)
        yield head
    finally:
        _end(process, temp_dir)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _command(temp_dir: Path, ports: list[int], num_cpus: int) -> list[str]:
    options = {
        "port": ports[0],
        "dashboard-port": ports[1],
        "dashboard-agent-listen-port": ports[2],
        "dashboard-agent-grpc-port": ports[3],
        "ray-client-server-port": ports[4],
        "runtime-env-agent-port": ports[5],
        "metrics-export-port": ports[6],
        "node-manager-port": ports[7],
        "node-ip-address": "127.0.0.1",
        "dashboard-host": "127.0.0.1",
        "include-dashboard": "true",
        "temp-dir": temp_dir,
        "num-cpus": num_cpus,
        "object-store-memory": 200 * 1024**2,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    ray = Path(sys.executable).with_name("ray")
    return [str(ray), "start", "--head", "--block", "--disable-usage-stats", *words]


def _environment(temp_dir: Path, extra: dict[str, str]) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_TMPDIR")}
    # A job's entrypoint says `python`, and means the one that runs the tests.
    path = f"{Path(sys.executable).parent}{os.pathsep}{inherited.get('PATH', '')}"
    own = {"PATH": path, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(temp_dir)}
    return inherited | own | extra


def _wait_until_ready(process: "subprocess.Popen[bytes]", head: Head, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"ray start ended with {process.returncode}:\n{log.read_text()}")
        # The list of jobs is served only when the head's agent is up; the version comes earlier.
        if _responds(f"{head.dashboard}/api/jobs/"):
            return
        time.sleep(0.25)
    raise RuntimeError(f"No Ray head after {START_TIMEOUT_S:.0f} s:\n{log.read_text()}")


def _responds(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)  # It is up, and wants a token.
    except OSError:
        return False


def _end(process: "subprocess.Popen[bytes]", temp_dir: Path) -> None:
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=15)
    for pid in _left_behind(temp_dir):
        _kill(pid)
    _kill(process.pid)
    process.wait()
    shutil.rmtree(temp_dir, ignore_errors=True)


def _left_behind(temp_dir: Path) -> list[int]:
    """Processes that name this head's folder: Ray puts some of its own in sessions of their own."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            if str(temp_dir).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
