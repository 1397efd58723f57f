"""One table of the figures that the benchmarks wrote: all of them, or those named."""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

BENCH = Path(__file__).parent.parent / "runs" / "bench"


def main() -> None:
    table = Table("benchmark", "figure", "median", "spread", "goal", "met")
    named = sys.argv[1:]
    for path in sorted(BENCH.glob("*.json")):
        if named and path.stem not in named:
            continue
        body = json.loads(path.read_text())
        for name, figure in body.items():
            if not isinstance(figure, dict):
                continue
            low, high = figure["spread"]
            table.add_row(
                path.stem,
                name.replace("_", " "),
                f"{figure['value']:g} {figure['unit']}",
                f"{low:g} to {high:g}",
                f"{figure['goal']:g}",
                "yes" if figure["ok"] else "no",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
