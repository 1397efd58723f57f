"""Documents to pieces: at most `seq_len` tokens, each a target or not, every token counted."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pliant.data.document import Document
from pliant.data.tokenizer import Tokenizer
from pliant.errors import DataError
from pliant.spec.data import Overlong

"""What happens to a sample longer than seq_len. "auto" splits text, and truncates where answers
rest on what stands before them. `check_reading` refuses "split" for chats."""


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
    bad: int = 0
    """Records that could not be used and were skipped."""
    samples_truncated: int = 0
    """Samples that were cut off at seq_len."""
    samples_overlong: int = 0
    """Samples dropped for being longer than seq_len."""
    samples_untrained: int = 0
    """Samples dropped for having no target."""
    samples_empty: int = 0
    """Samples dropped for having no text."""
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
    """Tokens of samples, or of pieces of one, without any target."""
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
    def skipped(self) -> int:
        """Samples of which nothing was kept."""
        return self.samples_overlong + self.samples_untrained + self.samples_empty

    @property
    def adds_up(self) -> bool:
        return self.tokens == self.trained + self.masked + self.dropped

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def encode_documents(
    documents: Sequence[Document], tokenizer: Tokenizer
) -> list[list[Sequence[int]]]:
    """The token ids of each turn of each document, in one call that uses all the tokenizer's
    threads."""
    turns = [(turn, i > 0) for document in documents for i, turn in enumerate(document.turns)]
    texts = [turn.text for turn, _ in turns if turn.ids is None]
    follows = [later for turn, later in turns if turn.ids is None]
    ids = iter(tokenizer.encode_batch(texts, follows))
    return [
        [next(ids) if turn.ids is None else turn.ids for turn in document.turns]
        for document in documents
    ]


def build_pieces(
    document: Document,
    ids: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    seq_len: int,
    overlong: Overlong,
    where: str,
) -> tuple[list[Piece], Accounting]:
    """The pieces of one sample from the token ids of its turns, and what became of its tokens.

    The end of text is appended unless the document is closed or has it already, and trained as the
    last turn is. A sample that is truncated keeps its beginning; without a target in it, it is
    dropped. Raises `DataError` at ids that the tokenizer does not know, and at a sample longer than
    `seq_len` where `overlong` is "error".
    """
    tokens, trained = _lay_out(document, ids, tokenizer.eos_id)
    _check_ids(document, tokens, tokenizer, where)
    total = len(tokens)
    trained[:1] = 0  # nothing before the first predicts it
    if not any(ids):
        return [], Accounting(samples=1, samples_empty=1, tokens=total, empty=total)
    if not trained.any():
        return [], Accounting(samples=1, samples_untrained=1, tokens=total, no_targets=total)
    if total <= seq_len:
        return _account([Piece(tokens, trained)], total)
    policy = _decide(document, total, seq_len, overlong, where)
    if policy == "split":
        return _account(_split(tokens, trained, seq_len), total)
    if policy == "drop" or not trained[:seq_len].any():
        return [], Accounting(samples=1, samples_overlong=1, tokens=total, overlong_dropped=total)
    return _account([Piece(tokens[:seq_len], trained[:seq_len])], total, total - seq_len)


def _lay_out(
    document: Document, ids: Sequence[Sequence[int]], eos_id: int
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    flags = [turn.trained for turn in document.turns]
    lengths = [len(part) for part in ids]
    ended = document.closed or bool(ids and ids[-1] and ids[-1][-1] == eos_id)
    tail = [] if ended else [eos_id]
    tokens = np.fromiter(chain(*ids, tail), dtype=np.int32, count=sum(lengths) + len(tail))
    trained = np.repeat(
        np.array([*flags, bool(flags and flags[-1])], dtype=np.uint8), [*lengths, len(tail)]
    )
    return tokens, trained


def _check_ids(
    document: Document, tokens: NDArray[np.int32], tokenizer: Tokenizer, where: str
) -> None:
    given = any(turn.ids is not None for turn in document.turns)
    if given and tokens.max() >= tokenizer.vocab_size:
        raise DataError(
            f"{where} holds the token id {tokens.max()}, and the tokenizer has "
            f"{tokenizer.vocab_size}. Name the tokenizer that made the ids in data.tokenizer.path.",
            where=where,
        )


def _decide(
    document: Document, total: int, seq_len: int, overlong: Overlong, where: str
) -> Literal["split", "truncate", "drop"]:
    """What happens to this sample, which is too long."""
    if overlong == "auto":
        return "truncate" if document.whole else "split"
    if overlong == "error":
        raise DataError(
            f"{where} has {total} tokens, and data.seq_len is {seq_len}. Raise data.seq_len, or "
            "let data.overlong split, truncate or drop such samples.",
            where=where,
            tokens=total,
        )
    return overlong


def _split(tokens: NDArray[np.int32], trained: NDArray[np.uint8], seq_len: int) -> list[Piece]:
    """Runs of `seq_len` tokens. One left over is no run, since nothing in it is predicted: it takes
    the token before it along. Runs without a target are left out."""
    borders = [*range(0, len(tokens), seq_len), len(tokens)]
    if borders[-1] - borders[-2] == 1 and seq_len > 2:
        borders[-2] -= 1
    pieces = []
    for begin, end in pairwise(borders):
        flags = trained[begin:end]
        flags[0] = 0
        if flags.any():
            pieces.append(Piece(tokens[begin:end], flags))
    return pieces


def _account(pieces: list[Piece], total: int, truncated: int = 0) -> tuple[list[Piece], Accounting]:
    in_pieces = sum(len(piece.tokens) for piece in pieces)
    trained = sum(int(piece.trained.sum()) for piece in pieces)
    return pieces, Accounting(
        samples=1,
        samples_truncated=1 if truncated else 0,
        pieces=len(pieces),
        tokens=total,
        trained=trained,
        masked=in_pieces - trained,
        overlong_truncated=truncated,
        no_targets=total - truncated - in_pieces,
    )
