"""A chat template is the tokenizer's own, a file or a named one, and renders the same every day."""

import pickle

import pytest

from pliant.data.chat import Call, Message
from pliant.data.named_templates import SOURCES
from pliant.data.templates import ChatTemplate, TemplateFailed, as_dict, choose_template
from pliant.data.tokenizer import Tokenizer
from pliant.errors import SpecError

OWN = Tokenizer(None, 0, 0, "{{ bos_token }}own", {"bos_token": "<s>", "eos_token": "</s>"})
BARE = Tokenizer(None, 0, 0)


def test_the_tokenizers_own_template_is_taken_where_it_has_one():
    template = choose_template("tokenizer", OWN)
    assert template.render([]) == "<s>own"
    assert choose_template("tokenizer", BARE) is None
    assert choose_template("tokenizer", None) is None
    assert choose_template("chatml", OWN) is None


@pytest.mark.parametrize("name", SOURCES)
def test_a_named_template_is_told_the_tokenizers_tokens(name):
    chat = [Message("user", "a"), Message("assistant", "b")]
    begins = choose_template(name, OWN).render(chat).startswith("<s>")
    assert begins == (name != "qwen3")
    assert choose_template(name, None).marks_answers


def test_a_template_may_be_a_file(tmp_path):
    path = tmp_path / "odd.jinja"
    path.write_text("{{ messages[0].content }}细", encoding="utf-8")
    template = choose_template(str(path), BARE)
    assert template.render([Message("user", "a")]) == "a细"


@pytest.mark.parametrize("asked", ["llama5", "/nowhere/odd.jinja", ""])
def test_a_template_that_is_not_there_is_refused(asked):
    with pytest.raises(SpecError, match=r"there is no such template. Use auto, a name \(chatml, "):
        choose_template(asked, BARE)


def test_a_template_that_is_no_jinja_is_refused(tmp_path):
    path = tmp_path / "odd.jinja"
    path.write_text("{% for %}")
    with pytest.raises(SpecError, match=r"odd\.jinja is no Jinja template: "):
        choose_template(str(path), BARE)


def test_the_digest_tells_what_is_rendered_apart():
    digests = {
        template.digest
        for template in (
            ChatTemplate("a", "x"),
            ChatTemplate("a", "y"),
            ChatTemplate("a", "x", (("bos_token", "<s>"),)),
        )
    }
    assert len(digests) == 3
    assert ChatTemplate("b", "x").digest == ChatTemplate("a", "x").digest


def test_a_template_survives_pickling_after_use():
    template = choose_template("qwen3", OWN)
    text = template.render([Message("user", "a")], ask=True)
    assert template.borders.end_marker == "<|im_end|>"
    assert pickle.loads(pickle.dumps(template)).render([Message("user", "a")], ask=True) == text


def test_today_is_always_the_same_day():
    source = "{{ strftime_now('%Y-%m-%d') }}"
    assert ChatTemplate("a", source).render([]) == "2024-07-26"


def test_a_failure_is_told_in_the_templates_words():
    with pytest.raises(TemplateFailed, match="No tools here"):
        ChatTemplate("a", "{{ raise_exception('No tools here') }}").render([])
    with pytest.raises(TemplateFailed, match="has no attribute 'content'"):
        ChatTemplate("a", "{{ messages[0].content + 'a' }}").render([Message("assistant", None)])


def test_a_message_has_the_keys_that_templates_look_for():
    call = Call("get", {"a": 1}, "x")
    assert as_dict(Message("assistant", None, calls=(call,), reasoning="Hm.")) == {
        "role": "assistant",
        "tool_calls": [
            {"type": "function", "function": {"name": "get", "arguments": {"a": 1}}, "id": "x"}
        ],
        "reasoning_content": "Hm.",
        "thinking": "Hm.",
    }
    assert as_dict(Message("tool", "", call_id="x", name="get")) == {
        "role": "tool",
        "content": "",
        "tool_call_id": "x",
        "name": "get",
    }


def test_a_template_that_never_shows_answers_is_refused():
    with pytest.raises(TemplateFailed, match="does not show the answer"):
        _ = ChatTemplate("a", "{{ messages[0].content }}").borders
