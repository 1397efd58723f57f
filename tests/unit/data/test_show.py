"""A piece is shown as text whose trained parts are told apart."""

from pliant.data.show import Span, decode_spans
from pliant.data.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer([], 300)
"""A token for each byte."""


def spans(text, *trained):
    """Spans of a text whose bytes are trained as given, the last flag for all that are left."""
    [ids] = TOKENIZER.encode_batch([text])
    flags = [*trained, *[trained[-1]] * len(ids)][: len(ids)]
    return decode_spans(TOKENIZER, ids, flags)


def test_spans_end_where_training_begins_or_ceases():
    assert spans("abcd", 0, 1, 1, 0) == [Span("a", False), Span("bc", True), Span("d", False)]
    assert spans("abc", 1) == [Span("abc", True)]
    assert decode_spans(TOKENIZER, [], []) == []


def test_a_character_stands_on_the_side_where_it_begins():
    assert spans("a细b", 0, 0, 1) == [Span("a细", False), Span("b", True)]
    assert spans("a细胞b", 0, 0, 1) == [Span("a细", False), Span("胞b", True)]
    assert spans("a细", 0, 0, 0, 1) == [Span("a细", False)]
    assert spans("🎈🎈", 0, 1, 0) == [Span("🎈", False), Span("🎈", False)]


def test_the_spans_are_the_whole_text():
    text = "a细🎈 naïve <|im_end|>\n"
    size = len(TOKENIZER.encode_batch([text])[0])
    for border in range(size):
        flags = [int(i >= border) for i in range(size)]
        [ids] = TOKENIZER.encode_batch([text])
        assert "".join(span.text for span in decode_spans(TOKENIZER, ids, flags)) == text


def test_a_character_that_is_cut_off_is_shown_as_such():
    [ids] = TOKENIZER.encode_batch(["a细"])
    assert decode_spans(TOKENIZER, ids[:3], [0, 1, 1]) == [Span("a", False), Span("\ufffd", True)]
