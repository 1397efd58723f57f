"""What one record says: turns of text or token ids, in order, each trained on or not."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """A stretch of text that is tokenized by itself."""

    text: str
    trained: bool
    ids: tuple[int, ...] | None = None
    """Token ids that the record itself holds; then there is no text."""


@dataclass(frozen=True)
class Document:
    """A record as the model reads it."""

    turns: tuple[Turn, ...]
    whole: bool = False
    """Its answers rest on what stands before them, so it is not split unless that is asked for."""
    closed: bool = False
    """Its end is written in it already, so no end of text is appended."""
