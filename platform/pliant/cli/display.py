"""What a person sees while a job runs, and at its end."""

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.status import Status as Spinner
from rich.table import Table

from pliant.training.conclusion import Outcome
from pliant.training.recorder import Status


class TerminalDisplay:
    """One live line in a terminal; elsewhere only what is worth a line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._spinner: Spinner | None = None
        self._began: tuple[float, int] | None = None
        self._label = ""

    def say(self, sentence: str) -> None:
        self._console.print(
            f"[dim]{time.strftime('%H:%M:%S')}[/dim] {sentence}", highlight=False, soft_wrap=True
        )

    def prepared(self, done: int, total: int) -> None:
        self._show(f"preparing data: {done} of {total} chunks")
        if done == total:
            self.say(f"data prepared: {total} chunk{'s' if total > 1 else ''}")

    def update(self, status: Status, total_steps: int) -> None:
        for sentence in status.news:
            self.say(sentence)
        if status.state != "training" or not status.metrics:
            self._began = None
            self._show("starting workers")
            return
        if self._began is None:
            self._began = (time.monotonic(), status.step)
        self._show(
            f"step {status.step}/{total_steps}  loss {status.metrics['loss']:.4f}  "
            f"{status.metrics['tokens_per_s']:,.0f} tokens/s  {status.world_size} workers  "
            f"{self._remaining(status.step, total_steps)}"
        )

    def close(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None

    def _show(self, label: str) -> None:
        if not self._console.is_terminal or label == self._label:
            return
        self._label = label
        if self._spinner is None:
            self._spinner = self._console.status(label)
            self._spinner.start()
        self._spinner.update(label)

    def _remaining(self, step: int, total_steps: int) -> str:
        assert self._began is not None
        since, first = self._began
        if step <= first:
            return ""
        seconds = (time.monotonic() - since) / (step - first) * (total_steps - step)
        return f"about {_duration(seconds)} left"


def print_summary(console: Console, outcome: Outcome) -> None:
    """The summary as a person reads it."""
    summary = outcome.summary
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("state", summary.state + (f" ({summary.reason})" if summary.reason else ""))
    table.add_row("steps", f"{summary.steps:,}")
    if summary.first_loss is not None and summary.last_loss is not None:
        table.add_row("loss", f"{summary.first_loss:.4f} at first, {summary.last_loss:.4f} at last")
    if summary.eval_loss is not None:
        table.add_row("evaluation loss", f"{summary.eval_loss:.4f}")
    if summary.samples_per_s and summary.tokens_per_s and summary.fill_ratio:
        table.add_row(
            "throughput",
            f"{summary.samples_per_s:,.1f} samples/s, {summary.tokens_per_s:,.0f} tokens/s "
            f"(median), rows {summary.fill_ratio:.1%} filled",
        )
    table.add_row("trained", f"{summary.samples:,} samples, {summary.tokens:,} tokens")
    if summary.data:
        counts = summary.data
        dropped = counts["tokens"] - counts["trained"] - counts["masked"]
        table.add_row(
            "data",
            f"{counts['tokens']:,} tokens = {counts['trained']:,} trained + "
            f"{counts['masked']:,} masked + {dropped:,} dropped; an epoch adds "
            f"{counts['padding']:,} of padding",
        )
    table.add_row(
        "workers",
        f"{' -> '.join(map(str, summary.world_sizes)) or 'none'}; {summary.restarts} restarts, "
        f"{summary.resizes} resizes; {summary.steps_lost} steps and "
        f"{summary.seconds_lost + summary.seconds_resizing:.1f} s lost by them",
    )
    if summary.steps_skipped or summary.damages:
        table.add_row(
            "watch",
            f"{summary.steps_skipped} updates left out, {summary.damages} damaged checkpoints "
            "passed over",
        )
    table.add_row(
        "ledger",
        f"{summary.samples_missing} samples missing, {summary.samples_duplicated} duplicated",
    )
    table.add_row("MLflow run", summary.mlflow_run_id or "not reached yet")
    table.add_row("files", str(_short(outcome.run_dir)))
    console.print()
    console.print(table)
    if outcome.unsent_events:
        console.print(
            f"{outcome.unsent_events} events are not in MLflow yet; `pliant sync "
            f"{outcome.run_dir.name}` sends them."
        )
    console.print(f"\nOpen the run:  {ui_command(outcome)}", highlight=False, soft_wrap=True)


def ui_command(outcome: Outcome) -> str:
    """How to look at the run in a browser."""
    if outcome.mlflow_uri.startswith("http"):
        return outcome.mlflow_uri
    program = _short(Path(sys.argv[0]).absolute())
    command = program if program.name == "pliant" else "python -m pliant"
    return f"{command} ui --runs-dir {_short(outcome.run_dir.parent)}"


def _short(path: Path) -> Path:
    """Relative to here, where that is below here."""
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def console_for(is_json: bool) -> Console:
    """Scripts read standard output, so that everything else goes to standard error then."""
    return Console(stderr=is_json, file=sys.stderr if is_json else None)
