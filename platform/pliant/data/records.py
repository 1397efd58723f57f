"""What a raw record says: turns of text, each trained on or not.

A chat is rendered in one built-in way, like ChatML:

    <|im_start|>user
    Where is Oslo?<|im_end|>
    <|im_start|>assistant
    In Norway.<|im_end|>

An answer and its end marker are trained on; the header before it is given, as it is when the model
is asked. A function call is the assistant's, since the header cannot tell it from an answer.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pliant.data.sources import Record
from pliant.errors import DataError, SpecError

Shape = Literal["text", "prompt_completion", "alpaca", "sharegpt", "messages"]

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
ASSISTANT = "assistant"

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "function_call": ASSISTANT,
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}
"""What data sets call the speakers, and what they are called in the rendering."""

NEEDED: dict[Shape, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
"""The fields by which a shape is known, the most telling shape first."""
OPTIONAL = ("input", "system", "history", "tools", "from", "value", "role", "content")

NO_TOOLS = ("", "[]", "null")


@dataclass(frozen=True)
class Turn:
    """A stretch of text that is tokenized by itself."""

    text: str
    trained: bool


@dataclass(frozen=True)
class Reading:
    """How the records of a data set are read."""

    shape: Shape
    train_on: Literal["all", "completion"]
    columns: Mapping[str, str] = field(default_factory=dict)
    """The column that holds a field, where it is called otherwise."""

    def turns(self, record: Record, where: str) -> tuple[Turn, ...]:
        """The turns of one record. Raises `DataError` with `where` if it has another shape."""
        turns = _RENDERINGS[self.shape](_Fields(record, self, where))
        if self.train_on == "all":
            return tuple(Turn(turn.text, True) for turn in turns)
        return tuple(turns)


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
        f"{where} has the columns {_listed(record)}, which fit no known shape ({known}). Say which "
        "column holds which field in data.columns.",
        where=where,
    )


@dataclass(frozen=True)
class _Fields:
    """A record, or one message of it, by field names; its errors say where it lies."""

    record: Record
    reading: Reading
    where: str

    def value(self, name: str) -> Any:
        column = self.reading.columns.get(name, name)
        try:
            return self.record[column]
        except KeyError:
            raise DataError(
                f"{self.where} has no column {column}, which the shape {self.reading.shape} needs; "
                f"it has {_listed(self.record)}. Repair the record, or set data.shape or "
                "data.columns.",
                where=self.where,
                column=column,
            ) from None

    def optional(self, name: str) -> Any:
        """The value, or None where there is none."""
        return self.record.get(self.reading.columns.get(name, name))

    def text(self, name: str) -> str:
        return self._checked(name, self.value(name))

    def optional_text(self, name: str) -> str:
        value = self.optional(name)
        return "" if value is None else self._checked(name, value)

    def messages(self, name: str) -> list["_Fields"]:
        """The messages of a chat, each as fields."""
        value = self.value(name)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.wrong(name, value, "a list of messages")
        return [
            _Fields(item, self.reading, f"{self.where}, message {number},")
            for number, item in enumerate(value, 1)
        ]

    def wrong(self, name: str, value: Any, needed: str) -> DataError:
        column = self.reading.columns.get(name, name)
        return DataError(
            f"{self.where} has {column} {_shown(value)}, and {needed} was needed. Repair the "
            "record, or set data.shape or data.columns.",
            where=self.where,
            column=column,
        )

    def _checked(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.wrong(name, value, "text")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.wrong(name, value, "text without half characters (surrogates)") from None
        return value


@dataclass(frozen=True)
class _Message:
    role: str
    text: str


def _text(fields: _Fields) -> list[Turn]:
    return [Turn(fields.text("text"), True)]


def _prompt_completion(fields: _Fields) -> list[Turn]:
    """Joined as they are: what parts them belongs to the data."""
    return [Turn(fields.text("prompt"), False), Turn(fields.text("completion"), True)]


def _alpaca(fields: _Fields) -> list[Turn]:
    chat = _system(fields)
    for question, answer in _history(fields):
        chat += [_Message("user", question), _Message(ASSISTANT, answer)]
    question = _paragraphs("\n", fields.text("instruction"), fields.optional_text("input"))
    chat += [_Message("user", question), _Message(ASSISTANT, fields.text("output"))]
    return _render(chat)


def _history(fields: _Fields) -> list[tuple[str, str]]:
    """Earlier rounds, [[question, answer], ...]; their answers are answers too."""
    value = fields.optional("history") or []
    for item in value if isinstance(value, list) else [value]:
        pair = isinstance(item, list) and len(item) == 2
        if not pair or not all(isinstance(text, str) for text in item):
            raise fields.wrong("history", value, "a list of [question, answer]")
    return [(question, answer) for question, answer in value]


def _sharegpt(fields: _Fields) -> list[Turn]:
    return _chat(fields, "conversations", "from", "value")


def _messages(fields: _Fields) -> list[Turn]:
    return _chat(fields, "messages", "role", "content")


def _chat(fields: _Fields, messages: str, role: str, content: str) -> list[Turn]:
    chat = _system(fields)
    for message in fields.messages(messages):
        speaker = message.text(role)
        if speaker not in ROLES:
            raise message.wrong(role, speaker, f"one of {', '.join(ROLES)}")
        chat.append(_Message(ROLES[speaker], message.text(content)))
    return _render(chat)


def _system(fields: _Fields) -> list[_Message]:
    """The record's own system prompt, followed by the tools that it offers."""
    tools = fields.optional("tools")
    listing = tools if isinstance(tools, str) else json.dumps(tools, ensure_ascii=False)
    listing = "" if listing in NO_TOOLS else listing
    text = _paragraphs("\n\n", fields.optional_text("system"), listing)
    return [_Message("system", text)] if text else []


def _render(chat: list[_Message]) -> list[Turn]:
    """The newline after an end marker opens the next header, so a last answer stays last."""
    turns = []
    for number, message in enumerate(chat):
        header = f"{TURN_START}{message.role}\n"
        turns.append(Turn("\n" + header if number else header, False))
        turns.append(Turn(message.text + TURN_END, message.role == ASSISTANT))
    return turns


def _paragraphs(separator: str, *texts: str) -> str:
    return separator.join(text for text in texts if text)


def _listed(record: Record) -> str:
    return ", ".join(map(str, record)) or "none"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_RENDERINGS = {
    "text": _text,
    "prompt_completion": _prompt_completion,
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
    "messages": _messages,
}
