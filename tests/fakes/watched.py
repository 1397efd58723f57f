"""Jobs that run while a test looks on, waits for moments and interferes."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fakes.displays import RecordedDisplay
from fakes.jobs import TINY_LLAMA
from pliant.spec import JobSpec
from pliant.spec.load import build_spec, merge
from pliant.tracking import Journal
from pliant.tracking.events import Event, replay
from pliant.training.conclusion import Outcome
from pliant.training.launch import run_job

STEPS = 14
LIMIT_S = 200.0
NEWS_S = 1.0
"""A wish has reached rank 0 after this time: it asks twice a second."""


def write_samples(folder: Path) -> Path:
    """120 short samples; their packs make several epochs of a run."""
    path = folder / "samples.jsonl"
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]
    lines = [
        {"prompt": f"{words[i % 6]} {i} ", "completion": " ".join(words[: 1 + i % 5]) * (1 + i % 3)}
        for i in range(120)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def tree_of(samples: Path, name: str, *changes: dict[str, Any]) -> dict[str, Any]:
    """The spec of a small job: 2 workers at most, dropout on, no spare processes, which would take
    the time of the ones at work."""
    tree: dict[str, Any] = {
        "name": name,
        "model": {"config": {**TINY_LLAMA, "vocab_size": "auto"}},
        "data": {
            "train": str(samples),
            "tokenizer": {"train_vocab_size": 300},
            "seq_len": 64,
            "window": 50,
            "block_steps": 2,
        },
        "training": {"global_batch_size": 5, "steps": STEPS, "lr": 1e-2, "digest_every": 4},
        "elastic": {"max_workers": 2, "spares": 0, "pause_s": 0, "settle_s": 0.5},
        "checkpoint": {"every": 4, "hot_every": 1},
        "tracking": {"system_metrics_every_s": 3600},
    }
    for change in changes:
        tree = merge(tree, change)
    return tree


def spec_of(samples: Path, name: str, *changes: dict[str, Any]) -> JobSpec:
    return build_spec(tree_of(samples, name, *changes), origin="test")


class Watch:
    """Looks at a run from outside. Every wait has a limit, and says at its end what was seen."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def events(self, kind: str, **facts: Any) -> list[Event]:
        """Those of the journal so far that are of this kind and have these facts."""
        path = self.run_dir / "events.jsonl"
        events = list(Journal(path).events()) if path.exists() else []
        return [e for e in events if e["kind"] == kind and facts.items() <= e.items()]

    def wait_for(self, what: str, is_so: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        end = time.monotonic() + limit_s
        while not is_so():
            seen = self.ended() or (f"{limit_s:g} s passed" if time.monotonic() > end else None)
            if seen:
                raise AssertionError("\n".join([f"no {what}: {seen}", *self.story()]))
            time.sleep(0.05)

    def wait_for_workers(self, num_workers: int) -> None:
        """The latest attempt has so many."""

        def is_so() -> bool:
            attempts = self.events("attempt")
            return bool(attempts) and attempts[-1]["world_size"] == num_workers

        self.wait_for(f"group of {num_workers}", is_so)

    def pids(self) -> list[dict[int, int]]:
        """The processes of each attempt, by rank."""
        attempts: list[dict[int, int]] = []
        for event in sorted(self.events("timeline"), key=lambda event: event["time"]):
            if event["what"] == "workers are there":
                attempts.append({})
            elif event["what"] == "worker begins":
                attempts[-1][event["rank"]] = event["pid"]
        return attempts

    def story(self) -> list[str]:
        """The journal in short, with seconds since its beginning."""
        path = self.run_dir / "events.jsonl"
        events = list(Journal(path).events()) if path.exists() else []
        told = ("step", "what", "rank", "text", "reason", "world_size", "cause")
        return [
            f"{event['time'] - events[0]['time']:6.1f} s {event['kind']}: "
            + ", ".join(f"{name} {event[name]}" for name in told if name in event)
            for event in events
        ]

    def ended(self) -> str | None:
        """How it ended, where that is known."""
        return None


class WatchedJob(Watch):
    """A job in a thread of the test."""

    def __init__(self, spec: JobSpec, runs_dir: Path) -> None:
        super().__init__(runs_dir / spec.name)
        self.stop = threading.Event()
        self.display = RecordedDisplay()
        self._ended: list[Outcome | BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(spec, runs_dir), daemon=True)
        self._thread.start()

    @property
    def lines(self) -> list[str]:
        """What a person would have been told."""
        return self.display.lines

    def wait_for_line(self, words: str) -> None:
        self.wait_for(f'line with "{words}"', lambda: any(words in line for line in self.lines))

    def ended(self) -> str | None:
        return repr(self._ended[0]) if self._ended else None

    def outcome(self, limit_s: float = LIMIT_S) -> Outcome:
        """Waits for the end."""
        self._thread.join(limit_s)
        if not self._ended:
            raise AssertionError("\n".join([f"no end within {limit_s:g} s", *self.story()]))
        if isinstance(self._ended[0], BaseException):
            raise self._ended[0]
        return self._ended[0]

    def end(self) -> None:
        """Stops it, where it is not over."""
        self.stop.set()
        self._thread.join(LIMIT_S)

    def _run(self, spec: JobSpec, runs_dir: Path) -> None:
        try:
            self._ended.append(run_job(spec, runs_dir, self.display, self.stop))
        except Exception as error:
            self._ended.append(error)


def losses(run_dir: Path) -> dict[int, float]:
    """By step; what was done again counts once."""
    return replay(Journal(run_dir / "events.jsonl").events()).metric("loss")


def check(outcome: Outcome, **facts: Any) -> None:
    """Finished, nothing missing or doubled, no step done twice, and these facts."""
    expected = {
        "state": "FINISHED",
        "steps": STEPS,
        "steps_lost": 0,
        "samples_missing": 0,
        "samples_duplicated": 0,
        **facts,
    }
    found = {name: getattr(outcome.summary, name) for name in expected}
    story = "\n".join(Watch(outcome.run_dir).story())
    assert found == expected, f"{found}, wanted were {expected}: {outcome.summary.reason}\n{story}"
