"""The built-in rendering of a chat, like ChatML, for tokenizers without a template of their own:

    <|im_start|>user
    Where is Oslo?<|im_end|>
    <|im_start|>assistant
    In Norway.<|im_end|>

An answer and its end marker are trained on; the header before it is given, as it is when the model
is asked.
"""

from dataclasses import replace

from pliant.data.chat import SYSTEM, Chat, Message, TrainOn, tools_text
from pliant.data.document import Turn

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"


def render_chatml(chat: Chat, train_on: TrainOn) -> tuple[Turn, ...]:
    """The newline after an end marker opens the next header, so a last answer stays last."""
    turns: list[Turn] = []
    for message, trained in zip(_with_tools(chat), _trained(chat, train_on), strict=True):
        header = f"{TURN_START}{message.role}\n"
        turns.append(Turn("\n" + header if turns else header, train_on == "all"))
        turns.append(Turn(message.text + TURN_END, trained))
    return tuple(turns)


def _with_tools(chat: Chat) -> list[Message]:
    """The tools stand below the system prompt, or in its place."""
    messages, tools = list(chat.messages), tools_text(chat)
    if not tools:
        return messages
    if messages and messages[0].role == SYSTEM:
        below = "\n\n".join(filter(None, (messages[0].content, tools)))
        return [replace(messages[0], content=below), *messages[1:]]
    return [Message(SYSTEM, tools), *messages]


def _trained(chat: Chat, train_on: TrainOn) -> list[bool]:
    trained = chat.trained(train_on)
    return [train_on == "all"] * (len(_with_tools(chat)) - len(trained)) + trained
