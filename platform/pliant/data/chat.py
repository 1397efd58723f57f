"""A chat as a record tells it: who says what, which tools there are, and which answers are trained.

The two spellings of a chat, ShareGPT's and OpenAI's, are read into the same messages. A function
call is the assistant's, whichever way it is written.
"""

import json
from dataclasses import dataclass, replace
from typing import Any, Literal

from pliant.data.fields import Fields, as_json, shown
from pliant.errors import DataError

TrainOn = Literal["all", "assistant", "last_assistant"]

ASSISTANT = "assistant"
SYSTEM = "system"
USER = "user"
TOOL = "tool"
FUNCTION_CALL = "function_call"

ROLES = {
    "human": USER,
    "user": USER,
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    FUNCTION_CALL: ASSISTANT,
    "system": SYSTEM,
    "developer": SYSTEM,
    "observation": TOOL,
    "tool": TOOL,
    "function": TOOL,
}
"""What data sets call the speakers, and what they are called in the rendering."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""What data sets call the thoughts before an answer."""
NO_TOOLS = ("", "[]", "null")


@dataclass(frozen=True)
class Call:
    """Of a function, by the assistant."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str | None
    """None beside calls only."""
    weight: int | None = None
    """1: trained, 0: not trained, None: as `train_on` says."""
    calls: tuple[Call, ...] = ()
    raw_call: str | None = None
    """A call as ShareGPT writes it: JSON in the place of the content."""
    reasoning: str | None = None
    name: str | None = None
    call_id: str | None = None
    """Of the call that a tool answers."""
    where: str = ""

    @property
    def answers(self) -> bool:
        return self.role == ASSISTANT

    @property
    def text(self) -> str:
        """All that is said, as the built-in rendering shows it: a call is a line of JSON."""
        thoughts = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else ""
        calls = [as_json({"name": c.name, "arguments": c.arguments}) for c in self.calls]
        words = (self.content, self.raw_call, *calls)
        return thoughts + "\n".join(part for part in words if part)


@dataclass(frozen=True)
class Chat:
    """The messages of a record, and what goes with all of them."""

    messages: tuple[Message, ...]
    where: str
    tools: Any = None
    """A list of function descriptions, or JSON text that holds one."""

    def trained(self, train_on: TrainOn) -> list[bool]:
        """Whether each message carries loss; a message's own weight comes first."""
        answers = [number for number, message in enumerate(self.messages) if message.answers]
        chosen = {
            "all": range(len(self.messages)),
            "assistant": answers,
            "last_assistant": answers[-1:],
        }[train_on]
        return [
            number in chosen if message.weight is None else bool(message.weight)
            for number, message in enumerate(self.messages)
        ]


def read_sharegpt(fields: Fields, train_on: TrainOn) -> Chat:
    return _read_chat(fields, "conversations", "from", "value", train_on)


def read_messages(fields: Fields, train_on: TrainOn) -> Chat:
    return _read_chat(fields, "messages", "role", "content", train_on)


def read_alpaca(fields: Fields) -> Chat:
    """The input below the instruction; earlier rounds are answers too."""
    messages = system_message(fields)
    for question, answer in _history(fields):
        messages += [_said(USER, question, fields), _said(ASSISTANT, answer, fields)]
    question = "\n".join(filter(None, (fields.text("instruction"), fields.optional_text("input"))))
    messages += [_said(USER, question, fields)]
    messages += [_said(ASSISTANT, fields.text("output"), fields)]
    return Chat(tuple(messages), fields.where, fields.optional("tools"))


def system_message(fields: Fields) -> list[Message]:
    """The record's own system prompt, where it has one."""
    text = fields.optional_text("system")
    return [_said(SYSTEM, text, fields)] if text else []


def tools_text(chat: Chat) -> str:
    """The tools as the record lists them."""
    tools = chat.tools
    text = tools if isinstance(tools, str) else as_json(tools)
    return "" if text.strip() in NO_TOOLS else text


def parse_tools(chat: Chat) -> list[dict[str, Any]] | None:
    """The tools as chat templates expect them: each of type "function", as OpenAI has it.

    Raises `DataError` where they are no list of descriptions.
    """
    if not tools_text(chat):
        return None
    tools = _json(chat.tools) if isinstance(chat.tools, str) else chat.tools
    tools = [tools] if isinstance(tools, dict) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            f"{chat.where} has tools {shown(chat.tools)}, and a JSON list of function descriptions "
            "was needed. Repair the record.",
            where=chat.where,
        )
    return [t if t.get("function") else {"type": "function", "function": t} for t in tools]


def with_calls(message: Message) -> Message:
    """A message whose ShareGPT call is read. Raises `DataError` where it is no call."""
    if message.raw_call is None:
        return message
    value = _json(message.raw_call)
    calls = value if isinstance(value, list) else [value]
    read = [_as_call(call) for call in calls]
    if not read or None in read:
        raise DataError(
            f"{message.where} has the function call {shown(message.raw_call)}, and JSON with name "
            "and arguments was needed. Repair the record.",
            where=message.where,
        )
    return replace(message, calls=tuple(filter(None, read)), raw_call=None)


def _read_chat(fields: Fields, messages: str, role: str, content: str, train_on: TrainOn) -> Chat:
    read = system_message(fields)
    read += [_message(item, role, content, train_on) for item in fields.within(messages)]
    return Chat(tuple(read), fields.where, fields.optional("tools"))


def _message(fields: Fields, role: str, content: str, train_on: TrainOn) -> Message:
    speaker = fields.text(role)
    if speaker not in ROLES:
        raise fields.wrong(role, speaker, f"one of {', '.join(ROLES)}")
    calls = _calls(fields)
    silent = bool(calls) and fields.optional(content) is None
    text = None if silent else fields.content(content)
    raw = text if speaker == FUNCTION_CALL else None
    return Message(
        ROLES[speaker],
        None if raw is not None else text,
        _weight(fields, ROLES[speaker], train_on),
        calls,
        raw,
        next((text for name in REASONING if (text := fields.optional_text(name))), None),
        fields.optional_text("name") or None,
        fields.optional_text("tool_call_id") or None,
        fields.where,
    )


def _weight(fields: Fields, role: str, train_on: TrainOn) -> int | None:
    value = fields.optional("weight")
    if value is None:
        return None
    if value not in (0, 1):
        raise fields.wrong("weight", value, "0 (not trained) or 1 (trained)")
    if role != ASSISTANT and bool(value) != (train_on == "all"):
        raise fields.wrong(
            "weight", value, f"a weight at the assistant's messages only, not at {role},"
        )
    return int(value) if role == ASSISTANT else None


def _calls(fields: Fields) -> tuple[Call, ...]:
    """OpenAI's tool calls, or the single function call that came before them."""
    single = fields.optional(FUNCTION_CALL)
    calls = fields.optional("tool_calls") or ([{"function": single}] if single else [])
    items = calls if isinstance(calls, list) else [calls]
    known = [call if isinstance(call, dict) else {} for call in items]
    read = [_as_call(call.get("function"), call.get("id")) for call in known]
    if None in read:
        needed = "a list of calls with a function's name and its arguments in a JSON object"
        raise fields.wrong("tool_calls", calls, needed)
    return tuple(filter(None, read))


def _as_call(value: Any, call_id: str | None = None) -> Call | None:
    """None where it is no call. The arguments are an object, or the JSON text of one."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get("arguments")
    arguments = _json(given) if isinstance(given, str) else given
    return Call(value["name"], arguments, call_id) if isinstance(arguments, dict) else None


def _json(text: str) -> Any:
    """What the text says, or None where it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _history(fields: Fields) -> list[tuple[str, str]]:
    """Earlier rounds, [[question, answer], ...]."""
    value = fields.optional("history") or []
    for item in value if isinstance(value, list) else [value]:
        pair = isinstance(item, list) and len(item) == 2
        if not pair or not all(isinstance(text, str) for text in item):
            raise fields.wrong("history", value, "a list of [question, answer]")
    return [
        (fields.checked_text("history", question), fields.checked_text("history", answer))
        for question, answer in value
    ]


def _said(role: str, text: str, fields: Fields) -> Message:
    return Message(role, text, where=fields.where)
