"""Answers are found in whatever a template makes of a chat, or the chat is refused."""

import json

import pytest

from fakes import chat_templates
from fakes.chat_templates import BARE, GEMMA2, LLAMA31
from fakes.corpora import real
from pliant.data.answers import render_chat
from pliant.data.chat import Call, Chat, Message
from pliant.data.named_templates import SOURCES
from pliant.data.records import Reading
from pliant.data.templates import ChatTemplate
from pliant.errors import DataError

BOS = (("bos_token", "<s>"), ("eos_token", "</s>"))
TOOLS = '[{"name": "get"}]'
CALL = Message("assistant", None, calls=(Call("get", {"day": "今天"}, "call00001"),))
RESULT = Message("tool", '{"sky": "sunny"}', call_id="call00001")
THOUGHT = "<think>\nHm.\n</think>\n\n"


def system(text):
    return Message("system", text)


def user(text):
    return Message("user", text)


def answer(text, weight=None):
    return Message("assistant", text, weight)


def turns(source, *messages, train_on="assistant", tools=None):
    chat = Chat(messages, "a.jsonl line 7", tools)
    return render_chat(ChatTemplate("odd", source, BOS), chat, train_on)


def text_of(turns):
    return "".join(turn.text for turn in turns)


def turns_or_none(source, *messages, tools):
    """None where the chat is refused."""
    try:
        return turns(source, *messages, tools=tools)
    except DataError:
        return None


def trained(*args, **kwargs):
    return [turn.text for turn in turns(*args, **kwargs) if turn.trained]


MARKERS = {
    "llama3, unmarked": "<|eot_id|>",
    "qwen3, unmarked": "<|im_end|>",
    "gemma, unmarked": "<end_of_turn>",
    "mistral, unmarked": "</s>",
    "llama 3.1": "<|eot_id|>",
    "gemma 2": "<end_of_turn>",
}
PLAIN = {**BARE, "llama 3.1": LLAMA31, "gemma 2": GEMMA2}
CHATS = {
    "one round": (user("Where is Oslo?"), answer("In Norway.")),
    "space around": (user(" Where? "), answer("  In Norway.\n")),
    "three rounds": (user("a"), answer("b"), user("c"), answer("d"), user("e"), answer("f")),
    "an answer like another": (user("a"), answer("a"), user("a"), answer("a")),
    "an empty answer": (user("a"), answer(""), user("b"), answer("c")),
    "a question at the end": (user("a"), answer("b"), user("c")),
    "Chinese": (user("挪威在哪里？"), answer("在北欧。🎈")),
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", PLAIN)
def test_an_answer_and_its_end_marker_are_trained_and_no_header(name, chat):
    expected = [m.content.strip() + MARKERS[name] for m in CHATS[chat] if m.role == "assistant"]
    found = trained(PLAIN[name], *CHATS[chat])
    bare = [text.removeprefix("<think>\n\n</think>\n\n").strip() for text in found]
    assert [text.replace(" ", "").replace("\n", "") for text in bare] == [
        text.replace(" ", "").replace("\n", "") for text in expected
    ]


ALL_CHATS = {
    **CHATS,
    "a system prompt": (system("Be brief."), user("a"), answer("b")),
    "a call": (user("Weather?"), CALL, RESULT, answer("It is sunny.")),
    "a call, then more": (user("a"), CALL, RESULT, answer("b"), user("c"), answer("d")),
    "calls in a row": (user("a"), CALL, RESULT, CALL, RESULT, RESULT, answer("b")),
    "answers in a row": (user("a"), answer("b"), answer("c"), user("d"), answer("e")),
    "questions in a row": (user("a"), user("b"), answer("c")),
    "an answer first": (answer("a"), user("b"), answer("c")),
    "thoughts": (user("a"), answer(THOUGHT + "b"), user("c"), answer(THOUGHT + "d")),
    "thoughts once": (user("a"), answer(THOUGHT + "b"), user("c"), answer("d")),
    "a thoughtful call": (
        user("a"),
        Message("assistant", THOUGHT, calls=CALL.calls),
        RESULT,
        answer("b"),
        user("c"),
        answer(THOUGHT + "d"),
    ),
}


@pytest.mark.parametrize("chat", ALL_CHATS)
@pytest.mark.parametrize("name", SOURCES)
def test_what_is_found_is_what_the_template_would_have_marked(name, chat):
    """Or both are refused."""
    messages = ALL_CHATS[chat]
    tools = TOOLS if CALL in messages else None
    marked = turns_or_none(SOURCES[name], *messages, tools=tools)
    found = turns_or_none(BARE[f"{name}, unmarked"], *messages, tools=tools)
    assert found == marked
    assert found or name in ("gemma", "mistral")


def test_llama31_shows_calls_and_a_fixed_date():
    made = turns(LLAMA31, *ALL_CHATS["a call, then more"], tools=TOOLS)
    assert [turn.text for turn in made if turn.trained] == [
        '{"name": "get", "parameters": {"day": "今天"}}<|eot_id|>',
        "b<|eot_id|>",
        "d<|eot_id|>",
    ]
    assert text_of(made).startswith("<s><|start_header_id|>system<|end_header_id|>\n\nEnvironment")
    assert "Today Date: 26 Jul 2024" in text_of(made)


def test_qwen3_shows_thoughts_in_the_last_answer_only():
    found = trained(BARE["qwen3, unmarked"], *ALL_CHATS["thoughts"])
    assert found == ["b<|im_end|>", THOUGHT + "d<|im_end|>"]
    found = trained(BARE["qwen3, unmarked"], *ALL_CHATS["a call"], tools=TOOLS)
    call = '<tool_call>\n{"name": "get", "arguments": {"day": "今天"}}\n</tool_call><|im_end|>'
    assert found == [call, "<think>\n\n</think>\n\nIt is sunny.<|im_end|>"]


def test_gemma_shows_the_system_prompt_in_the_first_question():
    made = turns(BARE["gemma, unmarked"], *ALL_CHATS["a system prompt"])
    question = "<s><start_of_turn>user\nBe brief.\n\na<end_of_turn>\n"
    assert text_of(made) == question + "<start_of_turn>model\nb<end_of_turn>\n"
    assert [turn.text for turn in made if turn.trained] == ["b<end_of_turn>"]


@pytest.mark.parametrize(
    ("chat", "expected"),
    [
        ("a system prompt", "System role not supported"),
        ("answers in a row", "Conversation roles must alternate"),
        ("a call", "it shows no tools, and the record has some"),
    ],
)
def test_what_a_template_refuses_is_refused_in_its_words(chat, expected):
    tools = TOOLS if chat == "a call" else None
    with pytest.raises(DataError, match=expected):
        turns(GEMMA2, *ALL_CHATS[chat], tools=tools)


def test_calls_that_are_not_shown_are_refused():
    with pytest.raises(DataError, match="does not show all of the answer in message 2"):
        turns(chat_templates.MERGING, user("a"), CALL)


def test_words_that_are_not_shown_are_refused():
    with pytest.raises(DataError, match="does not show the system's words, message 1"):
        turns(chat_templates.FORGETFUL, system("Be brief."), user("a"), answer("b"))
    said = Message("assistant", "Let me see.", calls=CALL.calls)
    with pytest.raises(DataError, match="does not show all of the answer in message 2"):
        turns(LLAMA31, user("a"), said, RESULT, answer("b"))


def test_a_template_that_drops_thoughts_trains_what_it_shows():
    assert trained(chat_templates.THINKING, *ALL_CHATS["thoughts"]) == ["\n\nb<end>", "\n\nd<end>"]
    assert trained(chat_templates.THINKING, user("a"), answer("<b"), user("c"), answer("d")) == [
        "<b<end>",
        "d<end>",
    ]


def test_traces_of_dropped_thoughts_are_trained_after_what_asks_for_thoughts():
    thinking = [Message("assistant", text, reasoning="Hm.") for text in "bd"]
    messages = user("a"), thinking[0], user("c"), thinking[1]
    source = chat_templates.EMPTY_THOUGHTS
    assert trained(source, *messages) == ["</think>b<|im_end|>", "Hm.\n</think>d<|im_end|>"]
    assert trained(source, *ALL_CHATS["a call"], tools=TOOLS) == [
        '</think><call>{"name": "get", "arguments": {"day": "今天"}}</call><|im_end|>',
        "</think>It is sunny.<|im_end|>",
    ]


def test_an_end_of_the_whole_chat_is_no_part_of_an_answer():
    made = turns(chat_templates.END_OF_ALL, *CHATS["three rounds"])
    assert [turn.text for turn in made if turn.trained] == ["b<|end|>", "d<|end|>", "f<|end|>"]
    assert text_of(made).endswith("f<|end|>\n</s>")


def test_a_header_is_not_trained_where_the_template_does_not_ask_for_the_answer():
    found = trained(chat_templates.RETURNING, *ALL_CHATS["a call, then more"])
    assert [text.partition("<turn|>")[0] for text in found[1:]] == ["b", "d"]


def test_tools_that_move_to_the_last_question_do_not_hide_answers():
    messages = ALL_CHATS["a call, then more"]
    made = turns(chat_templates.TOOLS_LAST, *messages, tools=TOOLS)
    assert text_of(made).index("[TOOLS]") > text_of(made).index("b</s>")
    assert [turn.text for turn in made if turn.trained] == [
        '[CALLS] [{"name": "get", "arguments": {"day": "今天"}}]</s>',
        "b</s>",
        "d</s>",
    ]


def test_a_header_is_not_trained_where_the_template_cannot_ask():
    assert trained(chat_templates.HEADLESS, *CHATS["three rounds"]) == [
        "b<end>",
        "d<end>",
        "f<end>",
    ]


@pytest.mark.parametrize(
    ("source", "closed"), [(LLAMA31, True), ("{{ messages[-1].content + '\n' }}", False)]
)
def test_an_end_of_text_is_appended_where_the_template_has_no_end_marker(source, closed):
    reading = Reading("messages", "all", template=ChatTemplate("odd", source))
    record = {"messages": [{"role": "user", "content": "a"}]}
    assert reading.document(record, "here").closed == closed


def test_answers_that_are_merged_are_refused():
    assert trained(chat_templates.MERGING, *CHATS["three rounds"]) == ["b<end>", "d<end>", "f<end>"]
    with pytest.raises(DataError, match="begins or ends cannot be told from its rendering"):
        turns(chat_templates.MERGING, *ALL_CHATS["answers in a row"])


def test_marks_within_macros_and_filters_are_where_they_say():
    source = chat_templates.MACRO
    assert trained(source, *CHATS["three rounds"]) == ["b<end>", "d<end>", "f<end>"]
    assert text_of(turns(source, user("a"), answer("b"))) == "<user>a<end><assistant>b<end>"


@pytest.mark.parametrize("name", ["qwen3", "qwen3, unmarked"])
def test_the_last_answer_or_those_with_a_weight_are_trained(name):
    source = {**SOURCES, **BARE}[name]
    rounds = user("a"), answer("b", 1), user("c"), answer("d"), user("e"), answer("f", 0), user("g")
    assert trained(source, *rounds) == ["b<|im_end|>", "d<|im_end|>"]
    assert trained(source, *rounds, train_on="last_assistant") == ["b<|im_end|>"]
    [left_out] = [turn for turn in turns(source, *rounds, train_on="all") if not turn.trained]
    assert left_out.text == "f<|im_end|>"


def test_training_on_all_changes_no_text():
    for source in SOURCES.values():
        answers = turns(source, *CHATS["three rounds"])
        [everything] = turns(source, *CHATS["three rounds"], train_on="all")
        assert everything.text == text_of(answers)
        assert everything.trained


def test_a_chat_without_answers_trains_nothing():
    assert not trained(LLAMA31, user("a"))
    assert turns(LLAMA31) == ()


def test_the_marks_themselves_are_refused_in_a_chat():
    with pytest.raises(DataError, match=r"U\+FDD0 or U\+FDD1, which mark answers"):
        turns(SOURCES["qwen3"], user("a\ufdd0"), answer("b"))
    assert trained(LLAMA31, user("a\ufdd0"), answer("b\ufdd0")) == ["b\ufdd0<|eot_id|>"]


@pytest.mark.parametrize("name", ["llama 3.1", "qwen3", "qwen3, unmarked"])
def test_real_chats_with_tools_train_on_answers_and_calls(name):
    source = {**SOURCES, **PLAIN}[name]
    path = real("lf_glaive_toolcall_en_demo.json")
    reading = Reading("sharegpt", "assistant", template=ChatTemplate(name, source, BOS))
    for record in json.loads(path.read_text(encoding="utf-8"))[:60]:
        made = reading.document(record, path.name).turns
        found = [turn.text for turn in made if turn.trained]
        said = [
            turn for turn in record["conversations"] if turn["from"] in ("gpt", "function_call")
        ]
        assert len(found) == len(said)
        for text, turn in zip(found, said, strict=True):
            calls = turn["from"] == "function_call"
            assert (json.loads(turn["value"])["name"] if calls else turn["value"].strip()) in text
            assert text.endswith(("<|eot_id|>", "<|im_end|>"))
