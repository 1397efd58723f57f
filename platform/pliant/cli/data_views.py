"""What `pliant data` prints."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from pliant.accel.metadata_cost import seconds_per_build
from pliant.data.blocks import Rows, assemble
from pliant.data.plan import DataPlan
from pliant.data.show import decode_spans
from pliant.data.statistics import (
    Drift,
    Filling,
    Histogram,
    drift,
    filling,
    histogram,
    propose_seq_len,
    quantiles,
)
from pliant.data.store import Prepared, Split, open_store, store_root, stores_of
from pliant.data.tokenizer import open_tokenizer
from pliant.data.tokens import Accounting
from pliant.errors import UserError
from pliant.spec import JobSpec
from pliant.spec.resolve import Facts, resolve
from pliant.tracking.plots import lengths_plot
from pliant.training.planning import guess_vocab_size

BAR = 40
TRAINED, MASKED = "bold green", "dim"


class PreparingDisplay:
    """A bar on the error stream while data is prepared."""

    def __enter__(self) -> "PreparingDisplay":
        self._progress = Progress(
            TextColumn("preparing data"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("chunks"),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
        )
        self._bar = self._progress.add_task("", total=None)
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, done: int, total: int) -> None:
        self._progress.update(self._bar, completed=done, total=total)


# Accounting


def print_accounting(prepared: Prepared) -> None:
    """Every split's records and tokens, by what became of them."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    accounts = {
        split: Accounting(**counts) for split, counts in prepared.manifest["accounting"].items()
    }
    there = {split: account for split, account in accounts.items() if any(vars(account).values())}
    for split in there:
        table.add_column(split, justify="right")
    for name in vars(Accounting()):
        counts = [getattr(account, name) for account in there.values()]
        if any(counts):
            table.add_row(name, *(f"{count:,}" for count in counts))
    Console().print(table)


# Description


@dataclass(frozen=True)
class Description:
    """What `pliant data stats` tells."""

    samples: int
    tokens: int
    quantiles: dict[float, int]
    histogram: Histogram
    seq_len: int
    fillings: tuple[Filling, ...]
    accounting: dict[str, int]
    segments_per_row: float
    num_layers: int
    build_s: float
    """Seconds to derive what attention needs of a row's segments, once, on this machine."""
    proposed_seq_len: int
    drift: Drift | None

    @property
    def now(self) -> Filling:
        """With the spec's row length."""
        return next(one for one in self.fillings if one.seq_len == self.seq_len)

    @property
    def packing_gain(self) -> float:
        """How many times fewer rows than with one sample a row."""
        return self.now.packed / self.now.padded

    @property
    def cache_gain_s(self) -> float:
        """Seconds that a micro-batch saves where the metadata is built once, not once a layer."""
        return (self.num_layers - 1) * self.build_s

    def as_dict(self) -> dict[str, Any]:
        tree = asdict(self)
        tree["quantiles"] = {str(q): value for q, value in self.quantiles.items()}
        gains = {"packing_gain": self.packing_gain, "cache_gain_s": self.cache_gain_s}
        return tree | gains | ({"drift_verdict": self.drift.verdict} if self.drift else {})


def describe(spec: JobSpec, prepared: Prepared, runs_dir: Path, against: str | None) -> Description:
    split = _train(prepared)
    lengths = np.asarray(split.samples)
    seq_len, window = spec.data.seq_len, spec.data.window
    splits = prepared.manifest["made_from"]["overlong"] == "split"
    sizes = sorted({seq_len // 4, seq_len // 2, seq_len, seq_len * 2, seq_len * 4} - {0, 1})
    fillings = tuple(filling(lengths, size, window, splits) for size in sizes)
    now = next(one for one in fillings if one.seq_len == seq_len)
    per_row = len(lengths) / now.num_rows
    return Description(
        samples=len(lengths),
        tokens=int(lengths.sum(dtype=np.int64)),
        quantiles=quantiles(lengths),
        histogram=histogram(lengths),
        seq_len=seq_len,
        fillings=fillings,
        accounting=dict(prepared.manifest["accounting"]["train"]),
        segments_per_row=per_row,
        num_layers=_num_layers(spec),
        build_s=seconds_per_build(max(round(per_row), 1), seq_len),
        proposed_seq_len=propose_seq_len(fillings),
        drift=drift(_earlier(spec, runs_dir, against), lengths) if against else None,
    )


def print_description(found: Description) -> None:
    console = Console()
    mean = found.tokens / found.samples
    console.print(f"{found.samples:,} samples, {found.tokens:,} tokens, {mean:,.1f} a sample")
    console.print(
        "  ".join(f"{_quantile_name(q)} {value:,}" for q, value in found.quantiles.items())
    )
    console.print(_histogram_table(found.histogram))
    console.print(_filling_table(found))
    console.print(
        f"packing takes {found.packing_gain:.2f} times fewer rows than one sample a row, "
        f"{found.segments_per_row:.1f} samples a row"
    )
    console.print(
        f"metadata of a row: {found.build_s * 1e6:,.0f} µs here; built once instead of in each of "
        f"{found.num_layers} layers saves {found.cache_gain_s * 1e3:,.2f} ms a micro-batch"
    )
    if found.proposed_seq_len != found.seq_len:
        console.print(
            f"data.seq_len: {found.proposed_seq_len} is the shortest row here that cuts into at "
            f"most 1% of the tokens; the spec has {found.seq_len}"
        )
    if found.drift is not None:
        one = found.drift
        console.print(
            f"drift: {one.verdict}; stability index {one.stability_index:.3f}, mean "
            f"{one.earlier_mean:,.1f} -> {one.mean:,.1f} tokens"
        )


def draw(prepared: Prepared, path: Path) -> None:
    split = _train(prepared)
    found = histogram(np.asarray(split.samples))
    lengths_plot(found.edges, found.counts, int(split.lengths.max()), path)


def _histogram_table(found: Histogram) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name, justify in (("tokens", "right"), ("samples", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    most = max(found.counts)
    for low, high, count in zip(found.edges, found.edges[1:], found.counts, strict=False):
        table.add_row(f"{low:,} to {high - 1:,}", f"{count:,}", "█" * round(BAR * count / most))
    return table


def _filling_table(found: Description) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    names = ("seq_len", "rows", "packed", "unpacked", "longer samples", "truncated", "dropped")
    for name in names:
        table.add_column(name, justify="right")
    for one in found.fillings:
        table.add_row(
            f"{one.seq_len:,}{' *' if one.seq_len == found.seq_len else ''}",
            f"{one.num_rows:,}",
            f"{one.packed:.2%}",
            f"{one.padded:.2%}",
            f"{one.overlong:,}",
            f"{one.tokens_beyond / found.tokens:.2%}",
            f"{one.tokens_in_overlong / found.tokens:.2%}",
        )
    table.caption = (
        "packed, unpacked: share of the rows that is no padding; truncated, dropped: share of the "
        "tokens that would be lost so. * the spec's"
    )
    table.caption_justify = "left"
    return table


def _quantile_name(q: float) -> str:
    return {0.0: "min", 0.5: "median", 1.0: "max"}.get(q, f"p{q * 100:g}")


def _num_layers(spec: JobSpec) -> int:
    from pliant.training.model import skeleton  # slow to import

    vocab_size = guess_vocab_size(spec)
    resolved = resolve(spec, Facts(vocab_size=vocab_size))
    config: Any = getattr(skeleton(resolved, vocab_size), "config", None)
    return int(getattr(config, "num_hidden_layers", 1))


def _earlier(spec: JobSpec, runs_dir: Path, name: str) -> Any:
    """Sample lengths of the data that a run was trained on; its store must be there still."""
    manifest = runs_dir / name / "manifest.json"
    if not manifest.is_file():
        raise UserError(f"There is no run {name} in {runs_dir}. Check --against and --runs-dir.")
    key = json.loads(manifest.read_bytes())["data"]["key"]
    stores = stores_of(spec.data, store_root(spec.data, runs_dir))
    return np.asarray(_train(open_store(stores.below(key))).samples)


def _train(prepared: Prepared) -> Split:
    split = prepared.split("train")
    assert split is not None  # `prepare` refuses an empty training set
    return split


# Rows


def show_rows(prepared: Prepared, plan: DataPlan, epoch: int, first: int, count: int) -> None:
    """Rows of an epoch, each piece in its place. Raises `UserError` beyond the last row."""
    num_packs = plan.epoch(epoch).num_packs
    if first >= num_packs:
        raise UserError(f"--first is {first}, and epoch {epoch} has {num_packs} rows.")
    console = Console(highlight=False, soft_wrap=True)
    tokenizer = open_tokenizer(prepared.tokenizer_path())
    packs = plan.epoch(epoch).packs(first, min(first + count, num_packs))
    seq_len = plan.settings.seq_len
    table = assemble(plan.split, packs, seq_len, prepared.manifest["pad_id"])
    rows = Rows.of(table, seq_len)
    for row in range(packs.num_packs):
        pieces = rows.lengths[rows.starts[row] : rows.starts[row + 1]]
        used, trained = int(pieces.sum()), int(rows.trained_RT[row].sum())
        samples = f"{len(pieces)} sample{'s' if len(pieces) > 1 else ''}"
        title = f"row {first + row}: {samples}, {used} of {seq_len} tokens, {trained} trained"
        console.print(Rule(title, align="left"))
        at = 0
        for length in pieces.tolist():
            part = slice(at, at + length)
            spans = decode_spans(
                tokenizer,
                rows.tokens_RT[row, part].tolist(),
                rows.trained_RT[row, part].tolist(),
            )
            console.print(_coloured(spans, console.is_terminal))
            console.print(Rule(f"{length} tokens", style="dim", align="left"))
            at += length
        if used < seq_len:
            console.print(f"{seq_len - used} of padding", style="dim")


def _coloured(spans: list[Any], is_terminal: bool) -> Text:
    """Trained text green; between marks where there are no colours."""
    text = Text()
    for span in spans:
        shown = f"⟦{span.text}⟧" if span.trained and not is_terminal else span.text
        text.append(shown, TRAINED if span.trained else MASKED)
    return text
