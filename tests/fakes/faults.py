"""Faults that strike in the workers of a job of the tests, in the step that the test names.

The spec names the callback `Strikes` and, where the fault is to lie in a step's computing, the loss
`faulty_nll`; its `env` names the folder in which test and workers leave word for each other.
"""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from pliant.batch import StepBatch
from pliant.files import write_atomically
from pliant.storage import local as storage
from pliant.training.engine import StepResult, nll_sum
from pliant.training.progress import Progress

FOLDER = "PLIANT_TEST_FAULTS"
HOLD_LIMIT_S = 240.0
_here: dict[str, int] = {"step": 0, "is_slow": False}
"""What this process knows of itself."""


@dataclass(frozen=True)
class Faults:
    """What a test wants of the workers; all of it is in the folder."""

    folder: Path

    def spec(self, **kinds: Any) -> dict[str, Any]:
        """Changes to a spec that bring the faults about:

        hold=[steps]    every worker waits when it has done the step, until `release`
        kill_saving=(r, s)  rank r gets SIGKILL while it stores its part of the checkpoint of step
                        s, once in the job's life: a part of the file is written
        freeze=(r, s)   rank r stops its own process when step s is done, once in the job's life
        pace_s=s        every step takes so much longer
        slow=(r, s)     so does the forward pass of each micro-batch, in the first process that
                        comes to be rank r
        nan=s           the loss of step s is not a number, the first time
        fail=s          step s raises an error, every time
        hold_evaluation whether the first evaluation waits until `release("evaluation")`
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "faults.json").write_text(json.dumps(kinds))
        return {
            "training": {"callbacks": ["fakes.faults.Strikes"], "loss": "fakes.faults.faulty_nll"},
            "env": {FOLDER: str(self.folder)},
        }

    def is_held(self, where: int | str, num_workers: int = 1) -> bool:
        """Whether the ranks below `num_workers` wait there."""
        return all(self._note(where, rank).exists() for rank in range(num_workers))

    def node_of(self, where: int | str, rank: int) -> str:
        """The id of the node of a rank that is held there."""
        return self._note(where, rank).read_text()

    def release(self, where: int | str) -> None:
        (self.folder / f"go-{where}").touch()

    def release_all(self) -> None:
        """For the rest of the job."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.release("on")

    def _note(self, where: int | str, rank: int) -> Path:
        return self.folder / f"held-{where}-{rank}"


class Strikes:
    """The callback. It comes before pliant's own snapshot: the step is recorded, and a worker that
    is lost while it is held has the snapshot of the step before."""

    def __init__(self) -> None:
        self._kinds = _kinds()
        if "kill_saving" in self._kinds:
            storage.copy_and_digest = _dying_copy  # type: ignore[assignment]

    def after_step(self, progress: Progress, batch: StepBatch, result: StepResult) -> None:
        _here["step"] = progress.step
        time.sleep(self._kinds.get("pace_s", 0.0))
        if progress.step in self._kinds.get("hold", []):
            _hold(progress.step)
        rank = int(os.environ["RANK"])
        if [rank, progress.step] == self._kinds.get("freeze") and _is_first("froze"):
            os.kill(os.getpid(), signal.SIGSTOP)


def faulty_nll(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """The usual loss, but where a fault says otherwise."""
    nll = nll_sum(logits_BTV, labels_BT)
    kinds, step = _kinds(), _here["step"] + 1
    if not torch.is_grad_enabled():
        if kinds.get("hold_evaluation"):
            _hold("evaluation")
        return nll
    if step == kinds.get("fail"):
        raise ArithmeticError(f"no luck in step {step}, {time.time_ns()}")
    slow_rank, slow_s = kinds.get("slow", (-1, 0.0))
    if int(os.environ["RANK"]) == slow_rank and _is_first("slow"):
        _here["is_slow"] = True
    if _here["is_slow"]:
        time.sleep(slow_s)
    if step == kinds.get("nan") and _is_first("nan"):
        return nll * float("nan")
    return nll


def _kinds() -> dict[str, Any]:
    """A job may run without any."""
    folder = os.environ.get(FOLDER)
    return json.loads((Path(folder) / "faults.json").read_text()) if folder else {}


def _hold(where: int | str) -> None:
    folder = Path(os.environ[FOLDER])
    node = ray.get_runtime_context().get_node_id()
    write_atomically(folder / f"held-{where}-{os.environ['RANK']}", node.encode())
    end = time.monotonic() + HOLD_LIMIT_S
    while not any((folder / f"go-{release}").exists() for release in (where, "on")):
        if time.monotonic() > end:
            raise TimeoutError(f"the test did not release {where}")
        time.sleep(0.02)


_copy = storage.copy_and_digest


def _dying_copy(source: Any, target: Any) -> storage.StoredFile:
    """As the real one, but where the fault strikes: half of the file is there by then."""
    rank, step = _kinds()["kill_saving"]
    is_meant = f"step-{step:08d}" in str(target.name) and int(os.environ["RANK"]) == rank
    if is_meant and _is_first("killed while saving"):
        content = source.read()
        target.write(content[: len(content) // 2])
        target.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return _copy(source, target)


def _is_first(what: str) -> bool:
    """For one process of the job, once."""
    try:
        (Path(os.environ[FOLDER]) / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
