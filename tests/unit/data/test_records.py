"""Records of every shape become turns, and only answers are trained on."""

import pytest

from pliant.data.records import Reading, Turn, decide_shape
from pliant.errors import DataError, SpecError


def turns(shape, record, train_on="completion", columns=None):
    return Reading(shape, train_on, columns or {}).turns(record, "a.jsonl line 7")


def text_of(turns):
    return "".join(turn.text for turn in turns)


def trained(turns):
    return [turn.text for turn in turns if turn.trained]


def test_text_is_always_trained_on():
    assert turns("text", {"text": "hello"}) == (Turn("hello", True),)


def test_a_completion_follows_its_prompt_as_it_is():
    record = {"question": "1+1?", "answer": "2"}
    columns = {"prompt": "question", "completion": "answer"}
    expected = (Turn("1+1?", False), Turn("2", True))
    assert turns("prompt_completion", record, columns=columns) == expected


def test_alpaca_is_a_chat_with_its_input_below_the_instruction():
    record = {"instruction": "Add.", "input": "1 and 1", "output": "2", "system": "Be brief."}
    made = turns("alpaca", record)
    assert text_of(made) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAdd.\n1 and 1<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>"
    )
    assert trained(made) == ["2<|im_end|>"]


def test_alpaca_history_comes_first_and_its_answers_are_trained_on():
    record = {"instruction": "c", "output": "d", "input": None, "history": [["a", "b"]]}
    made = turns("alpaca", record)
    assert trained(made) == ["b<|im_end|>", "d<|im_end|>"]
    assert text_of(made).index("a<|im_end|>") < text_of(made).index("b<|im_end|>")


def test_sharegpt_trains_on_answers_and_function_calls():
    chat = [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": "get()"},
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "It is sunny."},
    ]
    made = turns("sharegpt", {"conversations": chat, "tools": '[{"name": "get"}]'})
    assert trained(made) == ["get()<|im_end|>", "It is sunny.<|im_end|>"]
    assert text_of(made).startswith('<|im_start|>system\n[{"name": "get"}]<|im_end|>\n')
    assert "<|im_start|>tool\nsunny" in text_of(made)


@pytest.mark.parametrize("tools", ["", "[]", None, []])
def test_no_tools_are_no_system_prompt(tools):
    record = {"conversations": [{"from": "human", "value": "a"}], "tools": tools}
    assert "system" not in text_of(turns("sharegpt", record))


def test_messages_with_other_column_names():
    record = {"chat": [{"who": "user", "content": "a"}, {"who": "assistant", "content": "b"}]}
    made = turns("messages", record, columns={"messages": "chat", "role": "who"})
    assert trained(made) == ["b<|im_end|>"]


def test_training_on_all_changes_no_text():
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    answers, everything = turns("messages", record), turns("messages", record, train_on="all")
    assert [turn.text for turn in answers] == [turn.text for turn in everything]
    assert all(turn.trained for turn in everything)


@pytest.mark.parametrize(
    ("record", "columns", "shape"),
    [
        ({"text": "a"}, {}, "text"),
        ({"prompt": "a", "completion": "b"}, {}, "prompt_completion"),
        ({"instruction": "a", "output": "b"}, {}, "alpaca"),
        ({"conversations": [], "tools": "", "text": ""}, {}, "sharegpt"),
        ({"messages": []}, {}, "messages"),
        ({"q": "a", "a": "b"}, {"prompt": "q", "completion": "a"}, "prompt_completion"),
        ({"body": "a"}, {"text": "body"}, "text"),
    ],
)
def test_the_shape_is_known_by_the_columns(record, columns, shape):
    assert decide_shape("auto", columns, record, "here") == shape


def test_an_unknown_shape_lists_what_was_found():
    with pytest.raises(DataError, match="here has the columns q, a, which fit no known shape"):
        decide_shape("auto", {}, {"q": 1, "a": 2}, "here")


def test_columns_the_wrong_way_round_are_refused():
    with pytest.raises(SpecError, match=r"data\.columns\.question names no field"):
        decide_shape("auto", {"question": "prompt"}, {"question": ""}, "here")


@pytest.mark.parametrize(
    ("shape", "record", "expected"),
    [
        (
            "text",
            {"body": "a"},
            "line 7 has no column text, which the shape text needs; it has body",
        ),
        ("text", {"text": 5}, "line 7 has text 5, and text was needed"),
        ("text", {"text": None}, "has text None"),
        ("text", {"text": "\ud800"}, "surrogates"),
        ("alpaca", {"instruction": "a", "output": "b", "history": [["c"]]}, "has history"),
        ("sharegpt", {"conversations": "a"}, "a list of messages was needed"),
        (
            "sharegpt",
            {"conversations": [{"from": "cat", "value": ""}]},
            "message 1, has from 'cat'",
        ),
        ("messages", {"messages": [{"role": "user"}]}, "message 1, has no column content"),
    ],
)
def test_a_record_of_another_shape_is_named_with_its_place(shape, record, expected):
    with pytest.raises(DataError) as caught:
        turns(shape, record)
    assert "a.jsonl line 7" in str(caught.value)
    assert expected in str(caught.value)
