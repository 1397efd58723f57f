"""What the processes of a job hold, attempt after attempt."""

import json
import os
from pathlib import Path
from typing import NamedTuple

import psutil

from pliant.batch import StepBatch
from pliant.training.engine import StepResult
from pliant.training.progress import Progress

FOLDER = "PLIANT_TEST_FOOTPRINTS"
KEPT = ("ray::Recorder", "ray::ElasticController", "ray::Feeder")
"""Titles of the processes that outlive worker groups."""


class Held(NamedTuple):
    """By one process."""

    pid: int
    memory_bytes: int
    """That no other process shares: what is mapped from shared memory or a file is not counted."""
    num_files: int
    num_threads: int


class WriteFootprints:
    """A callback: on rank 0, a file for each attempt with what its own process and those in `KEPT`
    hold after the attempt's first step."""

    def __init__(self) -> None:
        self._is_first = True

    def after_step(self, progress: Progress, batch: StepBatch, result: StepResult) -> None:
        if os.environ["RANK"] != "0" or not self._is_first:
            return
        self._is_first = False
        held = {"rank 0": held_by(psutil.Process())}
        for process in psutil.process_iter(["cmdline"]):
            title = (process.info["cmdline"] or [""])[0]
            for kept in KEPT:
                if title.startswith(kept):
                    held[kept] = held_by(process)
        path = Path(os.environ[FOLDER]) / f"step-{progress.step:05d}.json"
        path.write_text(json.dumps(held))


def held_by(process: psutil.Process) -> Held:
    memory = process.memory_full_info()
    return Held(process.pid, memory.uss, process.num_fds(), process.num_threads())


def read_footprints(folder: Path) -> dict[str, list[Held]]:
    """By process, in the order of the attempts."""
    found: dict[str, list[Held]] = {}
    for path in sorted(folder.glob("step-*.json")):
        for name, held in json.loads(path.read_text()).items():
            found.setdefault(name, []).append(Held(*held))
    return found
