"""A run in some figures."""

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pliant.files import write_atomically
from pliant.tracking.events import Event, History, replay


@dataclass(frozen=True)
class Summary:
    """What a run came to; steps that were redone count once. None is not known."""

    steps: int
    """The last optimizer step."""
    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None
    """Of the last evaluation."""
    samples: int
    tokens: int
    """Without padding."""
    samples_per_s: float | None
    """Median over steps, as is tokens_per_s."""
    tokens_per_s: float | None
    fill_ratio: float | None
    """Tokens over the room of the rows they were packed into."""
    world_sizes: tuple[int, ...]
    """In order, without repeats."""
    restarts: int
    """Worker groups started after a failure."""
    resizes: int
    """Worker groups started with another number of workers."""
    steps_lost: int
    """Steps done and then thrown away, because an attempt resumed before them."""
    seconds_lost: float
    """From each failure until training went on, and what the steps lost had taken; without the
    time before another driver took over."""
    seconds_resizing: float
    """From each request to resize until training went on."""
    steps_skipped: int
    """Steps whose update was left out, because their loss or gradient was not to be trusted."""
    damages: int
    """Checkpoints and snapshots that were passed over because they were not whole."""
    data: dict[str, int]
    """Where the tokens of the training data went: tokens = trained + masked + overlong_truncated +
    overlong_dropped + no_targets + empty; and of the first epoch, rows, epoch_tokens, padding."""
    samples_missing: int
    """Planned samples that were not trained."""
    samples_duplicated: int
    """Samples that were trained more often than planned."""
    mlflow_run_id: str | None
    state: str
    reason: str | None


def summarize(
    events: Iterable[Event],
    *,
    state: str,
    reason: str | None = None,
    samples_missing: int = 0,
    samples_duplicated: int = 0,
    mlflow_run_id: str | None = None,
) -> Summary:
    """The summary of a journal; what the journal cannot know is passed in."""
    events = list(events)
    history = replay(events)
    kinds = Counter(event["kind"] for event in events)
    losses = list(history.metric("loss").values())
    evaluations = list(history.evaluation("eval_loss").values())
    causes = [attempt.get("cause") for attempt in history.attempts]
    return Summary(
        steps=max(history.steps, default=0),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        eval_loss=evaluations[-1] if evaluations else None,
        samples=_total(history, "samples"),
        tokens=_total(history, "tokens"),
        samples_per_s=_median(history, "samples_per_s"),
        tokens_per_s=_median(history, "tokens_per_s"),
        fill_ratio=_fill_ratio(history),
        world_sizes=_world_sizes(history),
        restarts=causes.count("failure"),
        resizes=causes.count("resize"),
        steps_lost=history.steps_lost,
        seconds_lost=round(history.seconds_lost, 3),
        seconds_resizing=round(history.seconds_resizing, 3),
        steps_skipped=len({event["step"] for event in events if event["kind"] == "skip"}),
        damages=kinds["damage"],
        data=_data(events),
        samples_missing=samples_missing,
        samples_duplicated=samples_duplicated,
        mlflow_run_id=mlflow_run_id,
        state=state,
        reason=reason,
    )


_OF_EARLIER_VERSIONS = {
    "seconds_lost": 0.0,
    "seconds_resizing": 0.0,
    "steps_skipped": 0,
    "damages": 0,
    "data": {},
}
"""Figures that a summary of an earlier version does not have."""


def read_summary(path: Path) -> Summary:
    """What `write_summary` wrote; figures that were not finite are None."""
    figures = {**_OF_EARLIER_VERSIONS, **json.loads(path.read_bytes())}
    return Summary(**{**figures, "world_sizes": tuple(figures["world_sizes"])})


def write_summary(path: Path, summary: Summary) -> None:
    """Write `summary` as JSON; figures that are not finite become null."""
    figures = {name: _finite(value) for name, value in asdict(summary).items()}
    write_atomically(path, json.dumps(figures, indent=2, allow_nan=False).encode() + b"\n")


def _data(events: list[Event]) -> dict[str, int]:
    found = [event["metrics"] for event in events if event["kind"] == "data"]
    figures = found[-1] if found else {}
    return {name.removeprefix("data/"): int(value) for name, value in figures.items()}


def _total(history: History, name: str) -> int:
    return sum(int(event.get(name, 0)) for event in history.steps.values())


def _median(history: History, name: str) -> float | None:
    values = history.metric(name).values()
    return median(values) if values else None


def _fill_ratio(history: History) -> float | None:
    capacity = _total(history, "capacity")
    return _total(history, "tokens") / capacity if capacity else None


def _world_sizes(history: History) -> tuple[int, ...]:
    sizes = [int(attempt["world_size"]) for attempt in history.attempts]
    return tuple(size for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1])


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
