"""Fifty restarts in a row: nothing piles up in the processes that live on."""

from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from fakes.footprints import FOLDER, Held, read_footprints
from fakes.watched import WatchedJob, check

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("embedded_ray")]

RESTARTS = 50
WARM = 10
"""Restarts until everything that is loaded once is there."""
GROWTH = 1.05


def test_fifty_restarts_leave_no_more_memory_files_or_threads_behind(
    start: Callable[..., WatchedJob], tmp_path: Path
) -> None:
    steps = RESTARTS + 1
    job = start(
        "restarted",
        {
            "training": {
                "steps": steps,
                "callbacks": ["fakes.footprints.WriteFootprints"],
                "digest_every": 0,
            },
            "elastic": {
                "spares": 1,
                "drills": [{"rank": 1, "step": step} for step in range(1, steps)],
                "max_reuses": RESTARTS,
                "max_node_failures": RESTARTS + 1,
                "progress_steps": 1,
                "max_restarts": RESTARTS,
                "max_backoff_s": 0,
            },
            "checkpoint": {"every": 10},
            "env": {FOLDER: str(tmp_path)},
        },
    )
    check(job.outcome(limit_s=1200.0), steps=steps, restarts=RESTARTS, resizes=0)
    found = read_footprints(tmp_path)
    assert found.keys() == {"rank 0", "ray::Recorder", "ray::ElasticController", "ray::Feeder"}
    grown = {
        f"{name}: {what}": (early, late)
        for name, held in found.items()
        for what, early, late in growth(held)
        if late > early * GROWTH
    }
    assert not grown
    assert len({held.pid for held in found["rank 0"]}) == 1  # it was the same process all along


def growth(held: list[Held]) -> list[tuple[str, float, float]]:
    """For each thing that a process holds, the medians of some restarts early on and at the end."""
    assert len(held) == RESTARTS + 1
    early, late = held[WARM : WARM + 5], held[-5:]
    return [
        (
            what,
            median(getattr(one, what) for one in early),
            median(getattr(one, what) for one in late),
        )
        for what in ("memory_bytes", "num_files", "num_threads")
    ]
