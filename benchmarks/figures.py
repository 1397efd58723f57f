"""How benchmarks write their figures: median, goal and spread, in `runs/bench/NAME.json`."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Figure:
    """Repeated measurements of one thing; smaller is better."""

    values: list[float]
    goal: float
    unit: str

    def as_dict(self) -> dict[str, Any]:
        value = statistics.median(self.values)
        return {
            "value": round(value, 4),
            "goal": self.goal,
            "ok": value <= self.goal,
            "unit": self.unit,
            "spread": [round(min(self.values), 4), round(max(self.values), 4)],
        }


def write(path: Path, compared_with: str, **figures: Figure) -> None:
    """One file per benchmark; printed as well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body: dict[str, Any] = {"compared_with": compared_with}
    body |= {name: figure.as_dict() for name, figure in figures.items()}
    path.write_text(json.dumps(body, indent=2) + "\n")
