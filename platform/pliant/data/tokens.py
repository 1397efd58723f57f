"""Turns of text to pieces: at most `seq_len` tokens, each a target or not, every token counted."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pliant.data.records import Turn
from pliant.errors import DataError

Overlong = Literal["split", "truncate", "drop", "error"]


@dataclass(frozen=True)
class Piece:
    """A segment of a packed row: a sample, or a part of a long one."""

    tokens: NDArray[np.int32]
    trained: NDArray[np.uint8]
    """1 where the token is a target. The first never is: nothing before it predicts it."""


@dataclass(frozen=True)
class Accounting:
    """Where every record and token went; the counts of two parts of a data set add up."""

    samples: int = 0
    """Records that were tokenized."""
    filtered: int = 0
    """Records that the transform dropped before."""
    skipped: int = 0
    """Samples of which nothing was kept."""
    pieces: int = 0
    tokens: int = 0
    """Tokens of all samples, the end of text of each included."""
    trained: int = 0
    """Tokens that are targets."""
    masked: int = 0
    """Tokens that are kept and are no targets."""
    overlong_truncated: int = 0
    """Tokens cut off beyond seq_len."""
    overlong_dropped: int = 0
    """Tokens of samples dropped for being longer than seq_len."""
    no_targets: int = 0
    """Tokens of pieces without any target."""
    empty: int = 0
    """Tokens of samples without text."""

    def __add__(self, other: "Accounting") -> "Accounting":
        return Accounting(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    @property
    def dropped(self) -> int:
        """Tokens that were not kept."""
        return self.overlong_truncated + self.overlong_dropped + self.no_targets + self.empty

    @property
    def adds_up(self) -> bool:
        return self.tokens == self.trained + self.masked + self.dropped

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def build_pieces(
    turns: Sequence[Turn],
    ids: Sequence[Sequence[int]],
    eos_id: int,
    seq_len: int,
    overlong: Overlong,
    where: str,
) -> tuple[list[Piece], Accounting]:
    """The pieces of one sample from the token ids of its turns, and what became of its tokens.

    The end of text is appended unless it is there already, and trained as the last turn is. Raises
    `DataError` at a sample longer than `seq_len` where `overlong` is "error".
    """
    tokens, trained = _lay_out(turns, ids, eos_id)
    total = len(tokens)
    if not any(ids):
        return [], Accounting(samples=1, skipped=1, tokens=total, empty=total)
    if total > seq_len and overlong == "error":
        raise DataError(
            f"{where} has {total} tokens, and data.seq_len is {seq_len}. Raise data.seq_len, or "
            "let data.overlong split, truncate or drop such samples.",
            where=where,
            tokens=total,
        )
    if total > seq_len and overlong == "drop":
        return [], Accounting(samples=1, skipped=1, tokens=total, overlong_dropped=total)
    kept = min(total, seq_len) if overlong == "truncate" else total
    pieces = _cut(tokens[:kept], trained[:kept], seq_len)
    return pieces, _account(pieces, total, kept)


def _lay_out(
    turns: Sequence[Turn], ids: Sequence[Sequence[int]], eos_id: int
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    flags = [turn.trained for turn in turns]
    lengths = [len(part) for part in ids]
    tail = [] if ids and ids[-1] and ids[-1][-1] == eos_id else [eos_id]
    tokens = np.fromiter(chain(*ids, tail), dtype=np.int32, count=sum(lengths) + len(tail))
    trained = np.repeat(
        np.array([*flags, bool(flags and flags[-1])], dtype=np.uint8), [*lengths, len(tail)]
    )
    return tokens, trained


def _cut(tokens: NDArray[np.int32], trained: NDArray[np.uint8], seq_len: int) -> list[Piece]:
    """Runs of `seq_len` tokens; those that have no target are left out."""
    pieces = []
    for begin in range(0, len(tokens), seq_len):
        flags = trained[begin : begin + seq_len]
        flags[0] = 0
        if flags.any():
            pieces.append(Piece(tokens[begin : begin + seq_len], flags))
    return pieces


def _account(pieces: list[Piece], total: int, kept: int) -> Accounting:
    in_pieces = sum(len(piece.tokens) for piece in pieces)
    trained = sum(int(piece.trained.sum()) for piece in pieces)
    return Accounting(
        samples=1,
        skipped=0 if pieces else 1,
        pieces=len(pieces),
        tokens=total,
        trained=trained,
        masked=in_pieces - trained,
        overlong_truncated=total - kept,
        no_targets=kept - in_pieces,
    )
