"""Packing beside TRL's: best-fit decreasing of a million lengths, and the copying of their tokens.

Four kinds of lengths at a capacity of 4096. Both sides take turns in one process, with numpy's
`argsort` of the lengths as a third, since nothing that sorts can be expected to be much faster.
TRL's packer does not place without copying: for the placement it is given a byte per token.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figures
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from trl.data_utils import _pack_bfd

from pliant.data.packing import best_fit_decreasing
from pliant.data.plan import DataPlan, PlanSettings
from pliant.data.store import (
    STORE_VERSION,
    Split,
    open_store,
    write_index,
    write_manifest,
    write_shard,
)
from pliant.data.tokens import Piece

ROOT = Path(__file__).parent.parent
CAPACITY = 4096
COUNT = 1_000_000
GATHERED = 200_000
"""Samples whose tokens are copied too: 71 million tokens."""
OWN_TURNS = 5
"""Of pliant's for each one of TRL's, which takes a thousand times as long."""

Lengths = NDArray[np.int32]


def sft(rng: np.random.Generator, count: int) -> Lengths:
    """Log-normal with a mean of 355."""
    return clipped(rng.lognormal(math.log(355) - 0.5, 1.0, count))


def near_half(rng: np.random.Generator, count: int) -> Lengths:
    return clipped(rng.normal(2048, 200, count))


def halves_and_thirds(rng: np.random.Generator, count: int) -> Lengths:
    """Pieces that just fit twice or three times, and some that just do not."""
    exact = rng.choice([CAPACITY // 2, CAPACITY // 3], count)
    return clipped(exact + rng.integers(-3, 4, count))


def long_tail(rng: np.random.Generator, count: int) -> Lengths:
    return clipped(200 * (1 + rng.pareto(1.1, count)))


def clipped(lengths: NDArray[Any]) -> Lengths:
    return np.clip(lengths, 1, CAPACITY).astype(np.int32)


KINDS = {f.__name__: f for f in (sft, near_half, halves_and_thirds, long_tail)}


@dataclass(frozen=True)
class Round:
    """One turn of each side on the same lengths."""

    own_s: float
    theirs_s: float
    sort_s: float
    own_bins: int
    their_bins: int
    fewest: int
    """ceil(sum / capacity): no packing has fewer bins."""


def place(lengths: Lengths) -> Round:
    own = [timed(lambda: best_fit_decreasing(lengths, CAPACITY)) for _ in range(OWN_TURNS)]
    short = lengths.astype(np.int16)
    sorts = [timed(lambda: np.argsort(short, kind="stable")) for _ in range(OWN_TURNS)]
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    hollow = pa.LargeListArray.from_arrays(
        pa.array(offsets), pa.array(np.zeros(int(offsets[-1]), dtype=np.int8))
    )
    theirs_s, packed = timed(lambda: _pack_bfd(pa.table({"input_ids": hollow}), CAPACITY))
    return Round(
        own_s=statistics.median(seconds for seconds, _ in own),
        theirs_s=theirs_s,
        sort_s=statistics.median(seconds for seconds, _ in sorts),
        own_bins=own[0][1].num_packs,
        their_bins=len(packed),
        fewest=math.ceil(int(lengths.sum(dtype=np.int64)) / CAPACITY),
    )


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = act()
    return time.perf_counter() - began, result


def gather(split: Split) -> float:
    """Seconds to pack a split and copy its tokens and flags in the order of the packs, over TRL's
    for the same."""
    own_s, _ = timed(lambda: split.gather(best_fit_decreasing(split.lengths, CAPACITY).items))
    offsets = np.concatenate([[0], np.cumsum(split.lengths, dtype=np.int64)])
    tokens, trained = split.gather(np.arange(split.num_pieces))
    columns = {"input_ids": tokens, "completion_mask": trained}
    table = pa.table(
        {
            name: pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))
            for name, values in columns.items()
        }
    )
    theirs_s, _ = timed(lambda: _pack_bfd(table, CAPACITY))
    return own_s / theirs_s


def fill_of_windows(folder: Path) -> float:
    """Share of the tokens that are no padding, packed a thousand samples at a time."""
    split = a_split(folder / "windows", sft(np.random.default_rng(9), 100_000))
    plan = DataPlan(split, PlanSettings(CAPACITY, 8, 1000, True, True, seed=0))
    tokens = int(split.lengths.sum(dtype=np.int64))
    return tokens / (plan.epoch(0).num_packs * CAPACITY)


def a_split(path: Path, lengths: Lengths, shard_pieces: int = 65_536) -> Split:
    """A training split on disk with random tokens."""
    rng = np.random.default_rng(1)
    train = path / "train"
    train.mkdir(parents=True)
    shards = []
    for begin in range(0, len(lengths), shard_pieces):
        pieces = [
            Piece(rng.integers(0, 32_000, n, dtype=np.int32), np.ones(n, dtype=np.uint8))
            for n in lengths[begin : begin + shard_pieces]
        ]
        shards.append(write_shard(train / f"shard-{len(shards):05d}.arrow", pieces))
    splits = {"train": write_index(train, shards, lengths, lengths, lengths)}
    write_manifest(
        path, {"version": STORE_VERSION, "key": "bench", "tokenizer": [], "splits": splits}
    )
    split = open_store(path).split("train")
    assert split is not None
    return split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    best_fit_decreasing(np.array([1], dtype=np.int32), CAPACITY)  # loads the compiled code
    found: dict[str, list[Round]] = {name: [] for name in KINDS}
    for number in range(rounds):
        for name, draw in KINDS.items():
            found[name].append(place(draw(np.random.default_rng(number), COUNT)))
            print(name, found[name][-1], file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs" / "bench") as folder:
        split = a_split(Path(folder) / "gathered", sft(np.random.default_rng(5), GATHERED))
        gathers = [gather(split) for _ in range(rounds)]
        fill = fill_of_windows(Path(folder))
    write(found, gathers, fill)


def write(found: dict[str, list[Round]], gathers: list[float], fill: float) -> None:
    answer = {}
    for name, rounds in found.items():
        ratios = [one.own_s / one.theirs_s for one in rounds]
        answer[f"{name}_over_trl"] = figures.Figure(ratios, 1 / 500, "ratio")
        sorts = [one.own_s / one.sort_s for one in rounds]
        answer[f"{name}_over_argsort"] = figures.Figure(sorts, 1.5, "ratio")
        bins = [one.own_bins / one.their_bins for one in rounds]
        answer[f"{name}_bins_over_trl"] = figures.Figure(bins, 1.0, "ratio")
    over = [100 * (one.own_bins / one.fewest - 1) for one in found["sft"]]
    answer["sft_bins_over_fewest"] = figures.Figure(over, 0.01, "%")
    answer["pack_and_gather_over_trl"] = figures.Figure(gathers, 1 / 15, "ratio")
    answer["padding_at_window_1000"] = figures.Figure([100 * (1 - fill)], 0.1, "%")
    figures.write(
        ROOT / "runs" / "bench" / "packing.json",
        compared_with=f"TRL's bfd and numpy's argsort, {COUNT:,} lengths",
        **answer,
    )
    print(json.dumps({name: vars(rounds[-1]) for name, rounds in found.items()}), file=sys.stderr)


if __name__ == "__main__":
    main()
