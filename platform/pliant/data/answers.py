"""A chat in a template's words, cut where the answers begin and end.

Where the template marks what is generated, that is what an answer is. Else it is found by rendering
the chat up to the answer, asking for one, and then with it: what came to it is the answer. That is
held against the rendering of the whole chat; where the template shows an answer otherwise once the
chat goes on, as those do that drop earlier thoughts, a mark in the content says where it stands.
What cannot be found for certain is refused.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pliant.data.chat import SYSTEM, USER, Chat, Message, TrainOn, parse_tools, with_calls
from pliant.data.document import Turn
from pliant.data.templates import BEGIN, END, ChatTemplate, TemplateFailed, unmarked
from pliant.errors import DataError

THOUGHT_BEGINS, THOUGHT_ENDS = "<think>", "</think>"

_MARKED = re.compile(f"{BEGIN}.*?{END}", re.DOTALL)

Span = tuple[int, int]


def render_chat(template: ChatTemplate, chat: Chat, train_on: TrainOn) -> tuple[Turn, ...]:
    """The turns of a chat. Raises `DataError` where the template does not fit it."""
    if not chat.messages:
        return ()
    chat = replace(chat, messages=tuple(with_calls(message) for message in chat.messages))
    trained = chat.trained(train_on)
    others = train_on == "all"  # then the answers looked for are those that are left out
    wanted = [i for i, m in enumerate(chat.messages) if m.answers and trained[i] != others]
    try:
        view = _view(template, chat)
        spans = _marked_spans(view, wanted) if template.marks_answers else _spans(view, wanted)
    except TemplateFailed as error:
        raise DataError(
            f"{chat.where} does not fit the chat template {template.name}: {error}. Repair the "
            "record, or set data.chat_template to another.",
            where=chat.where,
        ) from None
    return _cut(view.text, spans, others)


@dataclass(frozen=True)
class _View:
    """A chat and its rendering."""

    template: ChatTemplate
    messages: tuple[Message, ...]
    tools: list[dict[str, object]] | None
    marked: str
    text: str
    """Without the marks."""

    def up_to(self, number: int) -> str | None:
        """The rendering of the first messages alone; None where the template refuses them."""
        try:
            return self.template.render(self.messages[:number], self.tools)
        except TemplateFailed:
            return None

    def asked_for(self, number: int) -> int | None:
        """How much of the text stands there when the model is asked for this message; None where
        the text begins otherwise. Some templates show the tools to the last question only."""
        for tools in (self.tools, None) if self.tools else (None,):
            try:
                before = self.template.render(self.messages[:number], tools, ask=True)
            except TemplateFailed:
                continue
            before += self.template.borders.header
            if self.text.startswith(before):
                return len(before) + self._header_at(len(before))
        return None

    def _header_at(self, place: int) -> int:
        """Some templates do not ask again after a tool's result, and show the header even so."""
        found = (o for o in self.template.borders.openers if self.text.startswith(o, place))
        return len(next(found, ""))

    def position(self, number: int) -> int | None:
        """Where the content of a message begins, or its first call; None where that is unknown."""
        for changed in _with_mark(self.messages[number]):
            messages = (*self.messages[:number], changed, *self.messages[number + 1 :])
            try:
                text = self.template.render(messages, self.tools)
            except TemplateFailed:
                continue
            if text.count(BEGIN) == 1 and unmarked(text) == self.text:
                return text.index(BEGIN)
        return None


def _view(template: ChatTemplate, chat: Chat) -> _View:
    tools = parse_tools(chat)
    if tools and not template.shows_tools:
        raise TemplateFailed("it shows no tools, and the record has some")
    marked = template.render(chat.messages, tools, marks=True)
    text = unmarked(marked) if template.marks_answers else marked
    view = _View(template, chat.messages, tools, marked, text)
    _check_shown(view)
    return view


def _check_shown(view: _View) -> None:
    """A template may leave out what it was not made for, and would not say so."""
    words = "".join((m.content or "") + (m.reasoning or "") for m in view.messages)
    if view.template.marks_answers and (BEGIN in words or END in words):
        raise TemplateFailed("the record holds U+FDD0 or U+FDD1, which mark answers here")
    for number, message in enumerate(view.messages, 1):
        given = message.role in (SYSTEM, USER)
        if given and message.content and message.content.strip() not in view.text:
            raise TemplateFailed(f"it does not show the {message.role}'s words, message {number}")


# Where the template marks what is generated


def _marked_spans(view: _View, wanted: Sequence[int]) -> list[Span]:
    found = enumerate(_MARKED.finditer(view.marked))
    spans = [(match.start() - 2 * i, match.end() - 2 * i - 2) for i, match in found]
    answers = [i for i, message in enumerate(view.messages) if message.answers]
    if len(spans) == len(answers):
        chosen = [(i, span) for i, span in zip(answers, spans, strict=True) if i in wanted]
        return [_checked(view, i, span) for i, span in chosen]
    if wanted == answers and spans:
        return spans
    if not wanted:
        return []
    raise TemplateFailed(
        f"it marks {len(spans)} stretches as generated and the chat has {len(answers)} answers, so "
        "which are to be trained is unknown"
    )


# Where it does not


def _spans(view: _View, wanted: Sequence[int]) -> list[Span]:
    spans: list[Span] = []
    for number in wanted:
        span = _by_prefix(view, number) or _by_marks(view, number)
        if span is None or (spans and span[0] < spans[-1][1]):
            raise TemplateFailed(
                f"where the answer in message {number + 1} begins or ends cannot be told from its "
                "rendering. A template that marks answers with {% generation %} says it"
            )
        spans.append(_checked(view, number, span))
    return spans


def _by_prefix(view: _View, number: int) -> Span | None:
    """What the answer adds to the question, where the rest of the chat changes nothing of it."""
    begin = view.asked_for(number)
    through = view.text if number + 1 == len(view.messages) else view.up_to(number + 1)
    if begin is None or through is None or not view.text.startswith(through):
        return None
    closer, end_marker = view.template.borders.closer, view.template.borders.end_marker
    end = len(through)
    if closer and through.endswith(closer):
        end -= len(closer) - len(end_marker)
    return (begin, end) if begin <= end else None


def _by_marks(view: _View, number: int) -> Span | None:
    """From where it is asked for to the end marker before the next message."""
    begin = view.asked_for(number)
    if begin is None:
        begin = _opened(view, number)
    if begin is None:
        return None
    following = (view.position(i) for i in range(number + 1, len(view.messages)))
    limit = next((place for place in following if place is not None), len(view.text))
    end_marker = view.template.borders.end_marker
    if not end_marker.strip() or view.text.count(end_marker, begin, limit) != 1:
        return None
    return begin, view.text.index(end_marker, begin, limit) + len(end_marker)


def _opened(view: _View, number: int) -> int | None:
    """Where the words that ask for an answer end before this one, or else where its content
    begins; None where that is unknown."""
    place = view.position(number)
    if place is None:
        return None
    earlier = (view.position(i) for i in reversed(range(number)))
    limit = next((position for position in earlier if position is not None), 0)
    for opener in view.template.borders.openers:
        if view.text.count(opener, limit, place) == 1:
            return view.text.index(opener, limit, place) + len(opener)
    return place if view.messages[number].content else None


def _with_mark(message: Message) -> list[Message]:
    """The message with a mark before its words, each of these ways until one is shown as it is.

    Space around the words stays around the mark, so that a template may trim it; thoughts before
    the words may be dropped.
    """
    content = message.content or ""
    thoughts = content.rfind(THOUGHT_ENDS)
    places = [0] if thoughts < 0 else [0, thoughts + len(THOUGHT_ENDS)]
    starts = [len(content) - len(content[place:].lstrip()) for place in places]
    changed = [
        replace(message, content=content[:start] + BEGIN + content[start:])
        for start in starts
        if start < len(content)
    ]
    if not changed and message.calls:
        call = replace(message.calls[0], name=BEGIN + message.calls[0].name)
        changed = [replace(message, calls=(call, *message.calls[1:]))]
    return changed


def _checked(view: _View, number: int, span: Span) -> Span:
    """The span, which must hold what the assistant says and does."""
    message, shown = view.messages[number], view.text[slice(*span)]
    words = (message.content or "").rpartition(THOUGHT_ENDS)[2].strip()
    parts = (words, *(call.name for call in message.calls))
    if not shown or any(part not in shown for part in parts):
        raise TemplateFailed(f"it does not show all of the answer in message {number + 1}")
    before = view.text[: span[0]].rstrip().removesuffix(THOUGHT_ENDS).rstrip()
    thoughts = _thoughts(message)
    if thoughts and before.endswith(thoughts):
        raise TemplateFailed(
            f"where the thoughts of the answer in message {number + 1} begin is unknown"
        )
    return span


def _thoughts(message: Message) -> str:
    within, end, _ = (message.content or "").rpartition(THOUGHT_ENDS)
    written = within.rpartition(THOUGHT_BEGINS)[2] if end else ""
    return (message.reasoning or written).strip()


def _cut(text: str, spans: Sequence[Span], others: bool) -> tuple[Turn, ...]:
    """The spans and what lies between them; `others` says whether the latter is trained."""
    turns = []
    place = 0
    for begin, end in spans:
        turns += [Turn(text[place:begin], others), Turn(text[begin:end], not others)]
        place = end
    turns.append(Turn(text[place:], others))
    return tuple(turn for turn in turns if turn.text)
