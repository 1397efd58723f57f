"""What a raw record says, in each of the shapes that data sets come in, as one document."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from pliant.data.answers import render_chat
from pliant.data.chat import Chat, TrainOn, read_alpaca, read_messages, read_sharegpt
from pliant.data.chatml import render_chatml
from pliant.data.document import Document, Turn
from pliant.data.fields import Fields, listed
from pliant.data.sources import Record
from pliant.data.templates import ChatTemplate
from pliant.errors import DataError, SpecError

Shape = Literal["text", "prompt_completion", "alpaca", "sharegpt", "messages", "input_ids"]

NEEDED: dict[Shape, tuple[str, ...]] = {
    "input_ids": ("input_ids",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
"""The fields by which a shape is known, the most telling shape first."""
OF_RECORDS = ("input", "system", "history", "tools", "labels", "loss_mask", "attention_mask")
OF_MESSAGES = ("from", "value", "role", "content", "weight", "tool_calls", "function_call", "name")
OF_MESSAGES_TOO = ("tool_call_id", "reasoning_content", "thinking", "reasoning")
OPTIONAL = (*OF_RECORDS, *OF_MESSAGES, *OF_MESSAGES_TOO)

CHATS: tuple[Shape, ...] = ("messages", "sharegpt", "alpaca")
"""Shapes of questions and answers: their records are never split."""

NOT_TRAINED = -100
"""Among labels: the token at this place carries no loss."""
MAX_ID = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Reading:
    """How the records of a data set are read."""

    shape: Shape
    train_on: TrainOn
    columns: Mapping[str, str] = field(default_factory=dict)
    """The column that holds a field, where it is called otherwise."""
    template: ChatTemplate | None = None
    """None: chats are rendered as `pliant.data.chatml` does."""

    def document(self, record: Record, where: str) -> Document:
        """What one record says. Raises `DataError` with `where` if it cannot be used."""
        fields = Fields(record, self.columns, self.shape, where)
        return _READERS[self.shape](fields, self)


def decide_shape(
    asked: Shape | Literal["auto"], columns: Mapping[str, str], record: Record, where: str
) -> Shape:
    """The shape of a data set: the one asked for, else by the columns of its first record."""
    fields = [name for names in NEEDED.values() for name in names] + list(OPTIONAL)
    unknown = sorted(set(columns) - set(fields))
    if unknown:
        raise SpecError(
            f"data.columns.{unknown[0]} names no field of a record. It maps a field to the column "
            f"that holds it; the fields are {', '.join(fields)}.",
            keys=unknown,
        )
    if asked != "auto":
        return asked
    for shape, names in NEEDED.items():
        if all(columns.get(name, name) in record for name in names):
            return shape
    known = "; ".join(f"{shape}: {', '.join(names)}" for shape, names in NEEDED.items())
    raise DataError(
        f"{where} has the columns {listed(record)}, which fit no known shape ({known}). Say which "
        "column holds which field in data.columns.",
        where=where,
    )


def canonical(asked: TrainOn | Literal["completion"]) -> TrainOn:
    """A completion is what the assistant says."""
    return "assistant" if asked == "completion" else asked


def check_reading(reading: Reading, overlong: str, trains_tokenizer: bool) -> None:
    """Raises `SpecError` where settings do not go together with what the records are."""
    if overlong == "split" and reading.shape in CHATS:
        raise SpecError(
            f"data.overlong is split, and the records are chats ({reading.shape}): a part of one "
            "could hold an answer without its question. Use truncate, drop or error.",
            key="data.overlong",
        )
    if reading.shape == "input_ids" and reading.train_on == "last_assistant":
        raise SpecError(
            "data.train_on is last_assistant, and token ids do not say who speaks. Use assistant, "
            "which goes by their labels, or all.",
            key="data.train_on",
        )
    if reading.shape == "input_ids" and trains_tokenizer:
        raise SpecError(
            "data.tokenizer.train_vocab_size is set, and the records hold the token ids of another "
            "tokenizer. Name that one in data.tokenizer.path.",
            key="data.tokenizer",
        )


def _text(fields: Fields, reading: Reading) -> Document:
    return Document((Turn(fields.text("text"), True),))


def _prompt_completion(fields: Fields, reading: Reading) -> Document:
    """Joined as they are: what parts them belongs to the data."""
    prompt = Turn(fields.text("prompt"), reading.train_on == "all")
    return Document((prompt, Turn(fields.text("completion"), True)), whole=True)


def _alpaca(fields: Fields, reading: Reading) -> Document:
    return _chat(read_alpaca(fields), reading)


def _sharegpt(fields: Fields, reading: Reading) -> Document:
    return _chat(read_sharegpt(fields, reading.train_on), reading)


def _messages(fields: Fields, reading: Reading) -> Document:
    return _chat(read_messages(fields, reading.train_on), reading)


def _chat(chat: Chat, reading: Reading) -> Document:
    """A template that ends its answers itself ends a chat, too."""
    template = reading.template
    if template is None:
        return Document(render_chatml(chat, reading.train_on), whole=True)
    turns = render_chat(template, chat, reading.train_on)
    return Document(turns, whole=True, closed=template.closes)


def _input_ids(fields: Fields, reading: Reading) -> Document:
    """Taken as they are. Without labels or a mask they are text, all of it trained."""
    ids = _integers(fields, "input_ids")
    if ids.size and (ids.min() < 0 or ids.max() > MAX_ID):
        raise fields.wrong("input_ids", fields.value("input_ids"), "a list of token ids")
    if 0 in _flags(fields, "attention_mask", ids):
        raise fields.wrong(
            "attention_mask", fields.value("attention_mask"), "token ids without padding"
        )
    trained = _label_flags(fields, ids) & _flags(fields, "loss_mask", ids)
    whole = not trained.all()
    if reading.train_on == "all":
        trained[:] = True
    borders = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    turns = [
        Turn("", bool(trained[begin]), tuple(ids[begin:end].tolist()))
        for begin, end in pairwise(borders)
        if begin < end
    ]
    return Document(tuple(turns), whole, closed=True)


def _label_flags(fields: Fields, ids: Any) -> Any:
    """Where the labels are the tokens themselves, and not -100."""
    if fields.optional("labels") is None:
        return np.ones(len(ids), dtype=bool)
    labels = _integers(fields, "labels")
    if len(labels) != len(ids) or not ((labels == ids) | (labels == NOT_TRAINED)).all():
        raise fields.wrong(
            "labels", fields.value("labels"), f"at each place the token itself or {NOT_TRAINED}"
        )
    return labels != NOT_TRAINED


def _flags(fields: Fields, name: str, ids: Any) -> Any:
    """A 0 or 1 for each token; ones where there are none."""
    value = fields.optional(name)
    if value is None:
        return np.ones(len(ids), dtype=bool)
    known = isinstance(value, list) and len(value) == len(ids)
    if not known or any(flag not in (0, 1) for flag in value):
        raise fields.wrong(name, value, "a 0 or 1 for each token")
    return np.array(value, dtype=bool)


def _integers(fields: Fields, name: str) -> Any:
    value = fields.value(name)
    try:
        array = np.array(value) if value else np.empty(0, dtype=np.int64)
    except ValueError:  # lists of unequal lengths
        array = np.empty(0)
    if not isinstance(value, list) or array.ndim != 1 or array.dtype.kind != "i":
        raise fields.wrong(name, value, "a list of token ids")
    return array


_READERS = {
    "text": _text,
    "prompt_completion": _prompt_completion,
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
    "messages": _messages,
    "input_ids": _input_ids,
}
