"""Records of every shape become turns, and only answers are trained on."""

import pytest

from pliant.data.document import Document, Turn
from pliant.data.records import Reading, canonical, check_reading, decide_shape
from pliant.errors import DataError, SpecError


def document(shape, record, train_on="assistant", columns=None):
    return Reading(shape, train_on, columns or {}).document(record, "a.jsonl line 7")


def turns(shape, record, train_on="assistant", columns=None):
    return document(shape, record, train_on, columns).turns


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


def test_only_the_last_answer_is_trained_on_where_that_is_asked():
    record = {"instruction": "c", "output": "d", "history": [["a", "b"]]}
    assert trained(turns("alpaca", record, "last_assistant")) == ["d<|im_end|>"]
    record = {"prompt": "a", "completion": "b"}
    assert trained(turns("prompt_completion", record, "last_assistant")) == ["b"]
    assert canonical("completion") == "assistant"


def messages(*said):
    """A record of messages given as (role, content) or (role, content, weight)."""
    names = ("role", "content", "weight")
    return {"messages": [dict(zip(names, item, strict=False)) for item in said]}


CHAT = ("user", "a"), ("assistant", "b", 0), ("user", "c"), ("assistant", "d", 1), ("user", "e")


@pytest.mark.parametrize("train_on", ["assistant", "last_assistant"])
def test_a_weight_comes_before_what_the_data_set_is_trained_on(train_on):
    record = messages(*CHAT, ("assistant", "f", 0))
    assert trained(turns("messages", record, train_on)) == ["d<|im_end|>"]
    made = turns("messages", messages(*CHAT), "all")
    assert [turn.text for turn in made if not turn.trained] == ["b<|im_end|>"]


@pytest.mark.parametrize("said", [("assistant", "a", 0.5), ("user", "a", 1), ("assistant", "a", 2)])
def test_other_weights_are_refused(said):
    with pytest.raises(DataError, match="message 1, has weight"):
        turns("messages", messages(said))


def test_parts_of_text_are_joined_and_others_refused():
    parts = [{"type": "text", "text": "Where is "}, {"type": "text", "text": "Oslo?"}]
    assert "Where is Oslo?<|im_end|>" in text_of(turns("messages", messages(("user", parts))))
    parts.append({"type": "image_url", "image_url": {"url": "a.png"}})
    with pytest.raises(DataError, match=r"message 1, has content .* a part of type text"):
        turns("messages", messages(("user", parts)))


def test_tool_calls_are_lines_of_json_after_the_words():
    call = {"type": "function", "function": {"name": "get", "arguments": '{"day": "今天"}'}}
    shown = '{"name": "get", "arguments": {"day": "今天"}}'
    for content, expected in ((None, shown), ("Let me see.", f"Let me see.\n{shown}")):
        said = {"role": "assistant", "content": content, "tool_calls": [call]}
        assert trained(turns("messages", {"messages": [said]})) == [expected + "<|im_end|>"]
    older = {"role": "assistant", "content": None, "function_call": call["function"]}
    assert trained(turns("messages", {"messages": [older]})) == [shown + "<|im_end|>"]


def test_thoughts_come_before_the_answer():
    said = {"role": "assistant", "reasoning": "Hm.", "content": "Yes."}
    assert trained(turns("messages", {"messages": [said]})) == [
        "<think>\nHm.\n</think>\n\nYes.<|im_end|>"
    ]


@pytest.mark.parametrize(
    "calls", ["get()", [{"name": "get"}], [{"function": {"name": "get", "arguments": "no"}}]]
)
def test_a_tool_call_that_cannot_be_read_is_refused(calls):
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    with pytest.raises(DataError, match="message 1, has tool_calls"):
        turns("messages", {"messages": [said]})


def test_an_empty_answer_trains_its_end():
    made = turns("messages", messages(("user", "a"), ("assistant", "")))
    assert trained(made) == ["<|im_end|>"]


def test_turns_of_one_role_in_a_row_each_have_a_header():
    made = turns("messages", messages(("user", "a"), ("user", "b"), ("assistant", "c")))
    assert text_of(made).count("<|im_start|>user") == 2
    made = turns("messages", messages(("assistant", "a"), ("assistant", "b")))
    assert trained(made) == ["a<|im_end|>", "b<|im_end|>"]


def test_tools_stand_below_the_system_prompt_of_the_messages():
    record = messages(("system", "Be brief."), ("user", "a")) | {"tools": [{"name": "get"}]}
    start = '<|im_start|>system\nBe brief.\n\n[{"name": "get"}]<|im_end|>\n<|im_start|>user'
    assert text_of(turns("messages", record)).startswith(start)


def test_a_chat_without_messages_says_nothing():
    assert turns("messages", {"messages": []}) == ()


def test_token_ids_are_taken_as_they_are():
    record = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
    asked, answered = Turn("", False, (5, 6)), Turn("", True, (7, 8))
    assert document("input_ids", record) == Document((asked, answered), whole=True, closed=True)
    masked = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, True]}
    assert document("input_ids", masked) == document("input_ids", record)
    assert [turn.trained for turn in turns("input_ids", record, "all")] == [True]


def test_token_ids_without_labels_are_text():
    made = document("input_ids", {"input_ids": [5, 6], "attention_mask": [1, 1]})
    assert made == Document((Turn("", True, (5, 6)),), closed=True)
    assert turns("input_ids", {"input_ids": []}) == ()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"input_ids": "5 6"}, "a list of token ids was needed"),
        ({"input_ids": [5, 6.5]}, "a list of token ids"),
        ({"input_ids": [5, True, "a"]}, "a list of token ids"),
        ({"input_ids": [[5], [6, 7]]}, "a list of token ids"),
        ({"input_ids": [5, -1]}, "a list of token ids"),
        ({"input_ids": [5, 2**40]}, "a list of token ids"),
        ({"labels": [5]}, "at each place the token itself or -100"),
        ({"labels": [6, 5]}, "at each place the token itself or -100"),
        ({"loss_mask": [1]}, "a 0 or 1 for each token"),
        ({"loss_mask": [1, 0.5]}, "a 0 or 1 for each token"),
        ({"attention_mask": [1, 0]}, "token ids without padding"),
    ],
)
def test_token_ids_that_cannot_be_used_are_refused(change, expected):
    with pytest.raises(DataError, match=f"a.jsonl line 7 has .*{expected}"):
        turns("input_ids", {"input_ids": [5, 6]} | change)


@pytest.mark.parametrize(
    ("reading", "overlong", "trains_tokenizer", "expected"),
    [
        (Reading("messages", "all"), "split", False, "answer without its question"),
        (Reading("alpaca", "assistant"), "split", False, "answer without its question"),
        (Reading("input_ids", "last_assistant"), "auto", False, "do not say who speaks"),
        (Reading("input_ids", "all"), "auto", True, "another tokenizer"),
    ],
)
def test_settings_that_do_not_fit_the_records_are_refused(
    reading, overlong, trains_tokenizer, expected
):
    with pytest.raises(SpecError, match=expected):
        check_reading(reading, overlong, trains_tokenizer)


def test_settings_that_fit_the_records_pass():
    check_reading(Reading("text", "last_assistant"), "split", True)
    check_reading(Reading("messages", "last_assistant"), "truncate", True)
    check_reading(Reading("prompt_completion", "assistant"), "split", True)


@pytest.mark.parametrize(
    ("record", "columns", "shape"),
    [
        ({"text": "a"}, {}, "text"),
        ({"prompt": "a", "completion": "b"}, {}, "prompt_completion"),
        ({"instruction": "a", "output": "b"}, {}, "alpaca"),
        ({"conversations": [], "tools": "", "text": ""}, {}, "sharegpt"),
        ({"messages": []}, {}, "messages"),
        ({"input_ids": [], "labels": [], "text": ""}, {}, "input_ids"),
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
