"""The pictures of a run: its losses over its steps, and how long its samples are."""

from collections.abc import Iterable, Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from pliant.files import write_atomically
from pliant.tracking.events import Event, History, replay

_MARKS = {
    "failure": ("restart", "tab:red", ":"),
    "resize": ("resize", "tab:green", "--"),
}


def loss_plot(events: Iterable[Event], path: Path) -> None:
    """Draw training and evaluation loss over the step, with a mark at each restart and resize, as
    a PNG at `path`. Steps that were redone show their last value."""
    from matplotlib.figure import Figure  # slow to import, and drawn once a run

    history = replay(events)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    _curves(axes, history)
    _marks(axes, history)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
    _write(figure, path)


def lengths_plot(edges: Sequence[int], counts: Sequence[int], seq_len: int, path: Path) -> None:
    """Draw a histogram of sample lengths in tokens, with a mark at the row's length, as a PNG."""
    from matplotlib.figure import Figure  # as above

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(edges[:-1], counts, width=[b - a for a, b in pairwise(edges)], align="edge", lw=0.5)
    axes.axvline(seq_len, color="tab:red", ls="--", lw=1, label=f"longest piece, {seq_len:,}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of a sample")
    axes.set_ylabel("samples")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    _write(figure, path)


def _write(figure: Any, path: Path) -> None:
    image = BytesIO()
    figure.savefig(image, format="png", dpi=120)
    write_atomically(path, image.getvalue())


def _curves(axes: Any, history: History) -> None:
    training, evaluation = history.metric("loss"), history.evaluation("eval_loss")
    if training:
        # A line through a single point is invisible.
        marker = "o" if len(training) == 1 else None
        axes.plot(*_points(training), color="tab:blue", lw=1.2, marker=marker, label="training")
    if evaluation:
        points = _points(evaluation)
        axes.plot(*points, color="tab:orange", lw=1.2, marker="o", ms=4, label="evaluation")


def _marks(axes: Any, history: History) -> None:
    labelled = set()
    for attempt in history.attempts:
        cause = attempt.get("cause")
        if cause in _MARKS:
            label, color, style = _MARKS[cause]
            shown = None if cause in labelled else label
            axes.axvline(int(attempt.get("step", 0)), color=color, ls=style, lw=1, label=shown)
            labelled.add(cause)


def _points(values: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(values), list(values.values())
