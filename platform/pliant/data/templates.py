"""Chat templates: Jinja, rendered in the environment that transformers renders them in.

A template is the tokenizer's own, a file, or one of those that pliant knows by name. Without any of
these a chat is rendered by `pliant.data.chatml`.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pliant.data import named_templates
from pliant.data.chat import ASSISTANT, REASONING, USER, Message
from pliant.data.tokenizer import Tokenizer
from pliant.errors import SpecError

CHATML = "chatml"
NAMED = (CHATML, *named_templates.SOURCES)
ENDING = ".jinja"

BEGIN, END = "\ufdd0", "\ufdd1"
"""Around what a template marks as generated. Unicode keeps them free for uses like this one."""
TODAY = datetime(2024, 7, 26)
"""What every template takes for today, so that a data set does not change overnight; the date that
Llama's templates have where they are told none."""

_GENERATION = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")


class TemplateFailed(Exception):
    """A template cannot render a chat, for the reason it gives."""


@dataclass(frozen=True)
class Borders:
    """What a template puts around an answer."""

    openers: tuple[str, ...]
    """What both asks for an answer and stands before one, the longest first. None where the
    template does not know how to ask."""
    header: str
    """What comes between a question and the answer where the template does not know how to ask."""
    closer: str
    """After the last answer."""
    end_marker: str
    """The part of `closer` that a model has to say: it ends other answers too, and what is left of
    it opens the next turn."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, and the special tokens that it is told."""

    name: str
    source: str
    tokens: tuple[tuple[str, str], ...] = ()
    """("bos_token", "<s>") and so on."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that decides what it renders."""
        content = json.dumps([self.source, self.tokens, TODAY.isoformat()])
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def marks_answers(self) -> bool:
        """Whether it says itself what is generated."""
        return _GENERATION.search(self.source) is not None

    @property
    def shows_tools(self) -> bool:
        return "tools" in self.source

    @cached_property
    def borders(self) -> Borders:
        """Found by one plain question and answer. Raises `TemplateFailed`."""
        asked, answer = "pliantasks", "pliantanswers"
        chat = [Message(USER, asked), Message(ASSISTANT, answer), Message(USER, asked)]
        text = self.render(chat[:2])
        if text.count(answer) != 1:
            raise TemplateFailed("it does not show the answer to a question once")
        bare, asking = self.render(chat[:1]), self.render(chat[:1], ask=True)
        begun, closer = text.split(answer)
        try:
            longer = self.render(chat)
        except TemplateFailed:
            longer = text
        begun_earlier, _, rest = longer.partition(answer)
        knows = bare != asking
        shared = {_shared(asking, before) for before in (begun, begun_earlier) if knows}
        openers = {before.removeprefix(bare) for before in shared if before.startswith(bare)}
        header = begun.removeprefix(bare) if not knows and begun.startswith(bare) else ""
        return Borders(
            tuple(sorted(filter(str.strip, openers), key=len, reverse=True)),
            header if header.strip() else "",
            closer,
            self._end_marker(closer, rest),
        )

    def _end_marker(self, closer: str, rest: str) -> str:
        """From what follows the last answer, and `rest`, what follows another one. Some templates
        append an end of text to the whole chat."""
        bare = closer.removesuffix(dict(self.tokens).get("eos_token") or "")
        inner = bare if bare.strip() and not rest.startswith(closer) else closer
        return inner.rstrip() or inner

    @cached_property
    def closes(self) -> bool:
        """Whether it ends an answer with something that a model can say to stop."""
        try:
            return bool(self.borders.closer.strip())
        except TemplateFailed:
            return True

    def render(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        ask: bool = False,
        marks: bool = False,
    ) -> str:
        """The text of a chat; with `ask`, up to where the assistant's next answer begins.

        With `marks`, what the template says is generated stands between `BEGIN` and `END`. Raises
        `TemplateFailed`.
        """
        values: dict[str, Any] = dict(self.tokens)
        values |= {"messages": [as_dict(m) for m in messages], "tools": tools, "documents": None}
        values |= {"add_generation_prompt": ask, "strftime_now": TODAY.strftime}
        try:
            text = str(_compiled(self.source).render(**values))
        except Exception as error:  # whatever a foreign template makes Jinja or Python raise
            raise TemplateFailed(str(error) or repr(error)) from None
        return text if marks or not self.marks_answers else unmarked(text)


def choose_template(asked: str, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """The template that `data.chat_template` names: "tokenizer" for the tokenizer's own, a name, or
    the path of a .jinja file. None: chats are rendered as `pliant.data.chatml` does.

    `tokenizer` is None where one is still to be trained. Raises `SpecError`.
    """
    tokens = tokenizer.special_tokens if tokenizer else {}
    if asked == "tokenizer":
        own = tokenizer.chat_template if tokenizer else None
        return _checked("of the tokenizer", own, tokens) if own else None
    if asked == CHATML:
        return None
    if asked in named_templates.SOURCES:
        return _checked(asked, named_templates.SOURCES[asked], tokens)
    return _checked(asked, _read(asked), tokens)


def as_dict(message: Message) -> dict[str, Any]:
    """A message as templates expect it; what it does not have is left out."""
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        | ({"id": call.id} if call.id else {})
        for call in message.calls
    ]
    values = {
        "role": message.role,
        "content": message.content,
        "tool_calls": calls or None,
        "name": message.name,
        "tool_call_id": message.call_id,
        **dict.fromkeys(REASONING[:2], message.reasoning),
    }
    return {key: value for key, value in values.items() if value is not None}


def unmarked(text: str) -> str:
    return text.replace(BEGIN, "").replace(END, "")


def _shared(one: str, other: str) -> str:
    """What both begin with."""
    differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[: next(differing, min(len(one), len(other)))]


def _read(asked: str) -> str:
    path = Path(asked).expanduser()
    if path.suffix != ENDING or not path.is_file():
        raise SpecError(
            f"data.chat_template is {asked}, and there is no such template. Use auto, a name "
            f"({', '.join(NAMED)}), or the path of a {ENDING} file.",
            key="data.chat_template",
        )
    return path.read_text(encoding="utf-8")


def _checked(name: str, source: str, tokens: Mapping[str, str]) -> ChatTemplate:
    template = ChatTemplate(name, source, tuple(sorted(tokens.items())))
    try:
        _compiled(source)
    except Exception as error:  # its syntax may fail in more than one way
        raise SpecError(
            f"The chat template {name} is no Jinja template: {error}. Repair it, or set "
            "data.chat_template to another.",
            key="data.chat_template",
        ) from None
    return template


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    """In transformers' environment, with our own way to mark what is generated: theirs counts
    characters while it renders, and goes wrong within a macro or a filter."""
    # Imported here: it takes a second, and text needs no template.
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from transformers.utils.chat_template_utils import _compile_jinja_template

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012
        priority = 200  # above theirs

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("mark")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def mark(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    environment = _compile_jinja_template("").environment
    return environment.overlay(extensions=[Generation]).from_string(source)
