"""What a piece says, in readable text with the trained parts told apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pliant.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Span:
    """A stretch of text that is trained, or that is not."""

    text: str
    trained: bool


def decode_spans(tokenizer: Tokenizer, tokens: Sequence[int], trained: Sequence[int]) -> list[Span]:
    """The text of a piece, cut where its tokens begin or cease to be trained.

    A character whose bytes lie on both sides of such a border stands on the side where it begins.
    """
    ids = [int(token) for token in tokens]
    text = tokenizer.decode(ids)
    changes = [i for i in range(1, len(ids)) if bool(trained[i]) != bool(trained[i - 1])]
    borders = [0, *changes]
    places = [0, *(_length_of(tokenizer, ids, text, change) for change in changes), len(text)]
    spans = [
        Span(text[begin:end], bool(trained[first]))
        for first, (begin, end) in zip(borders, pairwise(places), strict=True)
        if ids
    ]
    return [span for span in spans if span.text]


def _length_of(tokenizer: Tokenizer, ids: list[int], text: str, number: int) -> int:
    """Characters of `text` that the first tokens make, the last of them whole."""
    for count in range(number, len(ids)):
        beginning = tokenizer.decode(ids[:count])
        if text.startswith(beginning):
            return len(beginning)
    return len(text)
