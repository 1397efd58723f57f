"""What the lengths of a data set say: how they are spread, how rows would be filled, what moved.

L: lengths, in tokens, of samples before anything was cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pliant.data.packing import best_fit_decreasing

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
MOST_PACKED = 1_000_000
"""Samples that a fill ratio is computed from; of more, so many are drawn."""
SHIFTED, MOVED = 0.1, 0.25
"""Population stability indices from which a distribution counts as shifted, and as another one."""

Lengths = NDArray[np.int32]


@dataclass(frozen=True)
class Histogram:
    """Counts of lengths, in bins whose edges are powers of two and their halves between."""

    edges: tuple[int, ...]
    """[bins + 1]; bin i holds edges[i] <= length < edges[i + 1]."""
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Filling:
    """What rows of `seq_len` tokens would hold."""

    seq_len: int
    packed: float
    """Share of the rows' room that is no padding, packed window by window."""
    padded: float
    """The same with one sample a row."""
    num_rows: int
    """Packed."""
    overlong: int
    """Samples that are longer."""
    tokens_beyond: int
    """Tokens that truncating would cut off."""
    tokens_in_overlong: int
    """Tokens that dropping would lose."""


@dataclass(frozen=True)
class Drift:
    """How far a distribution has moved from an earlier one."""

    stability_index: float
    """Population stability index over quantiles of the earlier lengths."""
    mean_ratio: float
    earlier_mean: float
    mean: float

    @property
    def verdict(self) -> str:
        if self.stability_index >= MOVED:
            return "another distribution"
        return "shifted" if self.stability_index >= SHIFTED else "as before"


def histogram(lengths: Lengths) -> Histogram:
    """Of at least one length."""
    edges = [1, 2, 3, 4]
    while edges[-1] <= int(lengths.max()):
        edges.append(edges[-2] * 2)
    first = max(int(np.searchsorted(edges, lengths.min(), side="right")) - 1, 0)
    counts, _ = np.histogram(lengths, edges[first:])
    return Histogram(tuple(edges[first:]), tuple(map(int, counts)))


def quantiles(lengths: Lengths) -> dict[float, int]:
    found = np.quantile(lengths, QUANTILES, method="inverted_cdf")
    return {q: int(value) for q, value in zip(QUANTILES, found, strict=True)}


def filling(lengths: Lengths, seq_len: int, window: int, splits: bool) -> Filling:
    """How rows of that length would be filled. Longer samples are split where `splits`, else
    truncated."""
    drawn = _drawn(lengths)
    beyond = np.maximum(lengths.astype(np.int64) - seq_len, 0)
    pieces = _pieces(drawn, seq_len, splits)
    num_rows = _rows(pieces, seq_len, window)
    tokens = int(pieces.sum(dtype=np.int64))
    overlong = lengths > seq_len
    return Filling(
        seq_len=seq_len,
        packed=tokens / (num_rows * seq_len),
        padded=tokens / (len(pieces) * seq_len),
        num_rows=round(num_rows * len(lengths) / len(drawn)),
        overlong=int(overlong.sum()),
        tokens_beyond=int(beyond.sum()),
        tokens_in_overlong=int(lengths[overlong].sum(dtype=np.int64)),
    )


def drift(earlier: Lengths, lengths: Lengths, num_bins: int = 10) -> Drift:
    """Between two samples of lengths (population stability index; Siddiqi, Credit Risk Scorecards,
    2006)."""
    inner = np.unique(np.quantile(earlier, np.linspace(0, 1, num_bins + 1)[1:-1]))
    before, now = (_shares(values, inner) for values in (earlier, lengths))
    index = float(((now - before) * np.log(now / before)).sum())
    return Drift(
        stability_index=index,
        mean_ratio=float(lengths.mean() / earlier.mean()),
        earlier_mean=float(earlier.mean()),
        mean=float(lengths.mean()),
    )


def propose_seq_len(fillings: Sequence[Filling], keep: float = 0.99, fill: float = 0.98) -> int:
    """The shortest row that cuts into at most 1 - `keep` of the tokens and is filled to `fill`;
    the one that cuts least where there is none."""
    total = max(one.num_rows * one.seq_len * one.packed + one.tokens_beyond for one in fillings)
    good = [
        one.seq_len
        for one in fillings
        if one.tokens_in_overlong <= (1 - keep) * total and one.packed >= fill
    ]
    return min(good) if good else min(fillings, key=lambda one: one.tokens_in_overlong).seq_len


def _drawn(lengths: Lengths) -> Lengths:
    if len(lengths) <= MOST_PACKED:
        return lengths
    return np.random.default_rng(0).choice(lengths, MOST_PACKED, replace=False)


def _pieces(lengths: Lengths, seq_len: int, splits: bool) -> Lengths:
    if not splits:
        return np.minimum(lengths, seq_len).astype(np.int32)
    whole, rest = np.divmod(lengths, seq_len)
    full = np.full(int(whole.sum()), seq_len, dtype=np.int32)
    return np.concatenate([full, rest[rest > 0].astype(np.int32)])


def _rows(pieces: Lengths, seq_len: int, window: int) -> int:
    """Rows of windows packed one by one, in an order that is drawn; with what a plan carries over
    from window to window they are somewhat better filled."""
    shuffled = np.random.default_rng(0).permutation(pieces)
    return sum(
        best_fit_decreasing(shuffled[begin : begin + window], seq_len).num_packs
        for begin in range(0, len(shuffled), window)
    )


def _shares(values: Lengths, inner: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each bin; an empty one counts as half a value, so that its logarithm exists."""
    counts = np.bincount(np.searchsorted(inner, values, side="right"), minlength=len(inner) + 1)
    counts = np.maximum(counts, 0.5)
    return np.asarray(counts / counts.sum(), dtype=np.float64)
