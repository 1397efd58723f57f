"""The two that are compared: pliant and the hand-written loop of `plain_ray`, as processes that
write down what happens."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import plain_ray
import ray
from recoveries import Moment

ROOT = Path(__file__).parent.parent
NUM_NODES = 2
CPUS_PER_WORKER = 2
"""A node has as many, so that it holds one worker; reading data has the head's CPU."""
SAVE_EVERY = 10
SEQ_LEN, ROWS = plain_ray.SEQ_LEN, plain_ray.GLOBAL_BATCH
"""A step takes a fraction of a second, so that what is compared is the recovery."""


class Side(Protocol):
    """A way to train, in a process of its own."""

    name: str

    def command(self, address: str, folder: Path) -> list[str]: ...

    def moments(self, folder: Path) -> list[Moment]: ...

    def is_ready(self, moments: list[Moment]) -> bool:
        """Whether it has prepared itself for the next fault."""


@dataclass
class Plain:
    """`plain_ray`."""

    zero_stage: int
    tuned: bool = True
    name: str = "plain"

    def command(self, address: str, folder: Path) -> list[str]:
        return [
            *(sys.executable, str(ROOT / "benchmarks" / "plain_ray.py"), "--address", address),
            *("--workers", str(NUM_NODES - 1), str(NUM_NODES), "--save-every", str(SAVE_EVERY)),
            *("--events", str(folder / "events.jsonl"), "--storage", str(folder / "storage")),
            *("--zero-stage", str(self.zero_stage), "--cpus-per-worker", str(CPUS_PER_WORKER)),
            *([] if self.tuned else ["--defaults"]),
        ]

    def moments(self, folder: Path) -> list[Moment]:
        keep = ("time", "what", "rank", "pid", "world", "step")
        return [
            Moment(**{key: event[key] for key in keep if key in event})
            for event in read_lines(folder / "events.jsonl")
        ]

    def is_ready(self, moments: list[Moment]) -> bool:
        return True


@dataclass
class Pliant:
    """`pliant run` with the demo's model, without its dropout."""

    name: str = "pliant"
    job: str = "bench-elastic"

    TIMELINE = {  # noqa: RUF012 - constant
        "decided": "decided",
        "workers are there": "process started",
        "process group is set up": "group up",
        "worker begins": "imports done",
        "engine is ready": "engine ready",
        "spares are ready": "spares ready",
    }
    """pliant's words and ours."""

    def command(self, address: str, folder: Path) -> list[str]:
        settings = (
            f"name={self.job}",
            "training.steps=100000",
            "training.eval_every=100000",
            f"checkpoint.every={SAVE_EVERY}",
            f"data.seq_len={SEQ_LEN}",
            "model.config.attention_dropout=0",
            f"training.global_batch_size={ROWS}",
            "training.callbacks=[pace.Pace]",
            "elastic.drills=[]",
            f"elastic.min_workers={NUM_NODES - 1}",
            f"elastic.max_workers={NUM_NODES}",
            "elastic.max_restarts=100",
            "elastic.max_node_failures=100",
            f"resources.cpus_per_worker={CPUS_PER_WORKER}",
        )
        return [
            *(sys.executable, "-m", "pliant", "run", str(ROOT / "jobs" / "specs" / "demo.yaml")),
            *("--address", address, "--runs-dir", str(folder)),
            *(part for setting in settings for part in ("--set", setting)),
        ]

    def moments(self, folder: Path) -> list[Moment]:
        events = read_lines(folder / self.job / "events.jsonl")
        return [moment for event in events if (moment := self._moment(event)) is not None]

    def is_ready(self, moments: list[Moment]) -> bool:
        """The latest group has its spares."""
        told = [m.what for m in moments if m.what in ("loaded", "spares ready")]
        return bool(told) and told[-1] == "spares ready"

    def _moment(self, event: dict[str, Any]) -> Moment | None:
        what = {
            "restart": "detected",
            "resize": "detected",
            "attempt": "loaded",
            "step": "step",
            "timeline": self.TIMELINE.get(event.get("what", ""), ""),
        }.get(event["kind"], "")
        if not what:
            return None
        return Moment(
            time=event["time"],
            what=what,
            rank=event.get("rank"),
            pid=event.get("pid"),
            world=event.get("world_size"),
            step=event.get("step", 0),
        )

    def ask(self, num_workers: int) -> None:
        """What `pliant resize` does once its interpreter is up."""
        recorder = ray.get_actor(f"recorder-{self.job}", namespace="pliant")
        ray.get(recorder.want_workers.remote(num_workers))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file that is being written to."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines if line]
