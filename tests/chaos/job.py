"""The job that the faults strike: its driver, a process of its own, and what its journal tells."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pliant.tracking import Journal

POLL_S = 0.1
OUT_OF_ORDER_S = 30.0
"""Events carry the time when they came about, which is not quite their order."""
TESTS = Path(__file__).parents[1]


class Stuck(Exception):
    """Something that should have come about did not."""


@dataclass
class Attempt:
    """A worker group, as the journal tells of it."""

    number: int
    time: float
    world_size: int
    step: int
    lost: int
    """Steps done before that it does again."""
    cause: str
    first_step_at: float | None = None
    """When its first step was done; None before."""


@dataclass
class Follower:
    """Reads a journal as it grows."""

    path: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    processes: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By rank, the process last heard of and when that was."""
    step: int = 0
    """The last that counts."""
    steps_done: int = 0
    """Those done again count each time."""
    offset: int = 0

    def read(self) -> None:
        for event, offset in Journal(self.path).read(self.offset):
            self.offset = offset
            self.events.append(event)
            self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        match event["kind"]:
            case "attempt":
                lost = max(0, self.step - event["step"])
                self.step = event["step"]
                self.attempts.append(
                    Attempt(
                        event["attempt"],
                        event["time"],
                        event["world_size"],
                        event["step"],
                        lost,
                        event["cause"],
                    )
                )
            case "step":
                self.step = event["step"]
                self.steps_done += 1
                if self.attempts and self.attempts[-1].first_step_at is None:
                    self.attempts[-1].first_step_at = event["time"]
            case "timeline" if event.get("what") == "worker begins":
                self.processes[event["rank"]] = event["pid"], event["time"]

    def ranks(self) -> list[int]:
        """Living processes of the last group, by rank."""
        world_size = self.attempts[-1].world_size if self.attempts else 0
        known = [self.processes[rank] for rank in range(world_size) if rank in self.processes]
        return [pid for pid, heard_at in known if _is_still(pid, heard_at)]

    def since(self, when: float, kind: str, **facts: Any) -> list[dict[str, Any]]:
        """Events of a kind that were written after a moment."""
        wanted = {"kind": kind, **facts}
        found = []
        for event in reversed(self.events):
            if event["time"] < when - OUT_OF_ORDER_S:
                break
            if event["time"] >= when and wanted.items() <= event.items():
                found.append(event)
        return found[::-1]

    def step_s(self) -> float:
        """Seconds a step took lately."""
        times = [event["time"] for event in self.events[-200:] if event["kind"] == "step"]
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 1.0


def _is_still(pid: int, when: float) -> bool:
    """Whether the process of that time lives; its number may be somebody else's by now."""
    try:
        process = psutil.Process(pid)
        return process.create_time() <= when and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Job:
    """`pliant run`, started as often as is needed."""

    def __init__(self, spec: Path, runs_dir: Path, name: str, output: Path, limit_s: float) -> None:
        self.run_dir = runs_dir / name
        self.journal = Follower(self.run_dir / "events.jsonl")
        self.limit_s = limit_s
        self.refused = 0
        """Starts that were told to wait until the driver before is gone."""
        self._command = [
            *(sys.executable, "-m", "pliant", "run", str(spec), "--runs-dir", str(runs_dir)),
            *("--set", f"name={name}"),
        ]
        self._output = output
        self._began_at = 0
        self._options: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, address: str | None, **settings: Any) -> None:
        """Settings have `__` for the dots."""
        changes = {name.replace("__", "."): json.dumps(v) for name, v in settings.items()}
        self._options = [
            *(("--address", address) if address else ()),
            *(part for name, value in changes.items() for part in ("--set", f"{name}={value}")),
        ]
        self.start_again()

    def start_again(self) -> None:
        """As it was started last."""
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        command = [*self._command, *self._options]
        with self._output.open("ab") as output:
            self._began_at = output.tell()
            self._process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def send(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def exit_code(self, limit_s: float = 0.0) -> int:
        """Of the driver, which is to end by itself now."""
        assert self._process is not None
        limit_s = limit_s or self.limit_s
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise Stuck(f"the driver did not end within {limit_s:.0f} s") from None

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def said(self) -> str:
        """What the driver printed since it was started."""
        return self._output.read_bytes()[self._began_at :].decode(errors="replace")

    def wait_for(self, what: str, condition: Callable[[], bool], limit_s: float = 0.0) -> None:
        """Raises `Stuck` where it takes too long, or the driver ends meanwhile."""
        limit_s = limit_s or self.limit_s
        end = time.monotonic() + limit_s
        while True:
            self.journal.read()
            if condition():
                return
            self._look_after_driver()
            if time.monotonic() > end:
                raise Stuck(f"{what}: not within {limit_s:.0f} s")
            time.sleep(POLL_S)

    def wait_for_steps(self, count: int) -> None:
        goal = self.journal.steps_done + count
        self.wait_for(f"{count} more steps", lambda: self.journal.steps_done >= goal)

    def _look_after_driver(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return
        if code == 2 and "runs on this cluster already" in self.said():
            self.refused += 1  # Ray has not noticed yet that the driver before is dead
            time.sleep(1.0)
            self.start_again()
            return
        last = " ".join(self.said().strip().splitlines()[-3:])
        raise Stuck(f"the driver ended with exit code {code}: {last}")

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.send(signal.SIGTERM)
        code = self.exit_code()
        self.journal.read()
        return code
