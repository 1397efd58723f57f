"""Every token is kept or counted as dropped, and only what can be predicted is a target."""

import itertools
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.chat_templates import BARE as BARE_TEMPLATES
from fakes.corpora import real
from pliant.data.chat import Message
from pliant.data.document import Document, Turn
from pliant.data.records import Reading, decide_shape
from pliant.data.sources import cut, find_files, read_chunk
from pliant.data.templates import ChatTemplate
from pliant.data.tokenizer import Tokenizer, train_tokenizer
from pliant.data.tokens import Accounting, build_pieces, encode_documents
from pliant.errors import DataError

EOS = 0
BARE = Tokenizer(None, eos_id=EOS, pad_id=EOS)
"""For ids that are given."""


def build(*turns, seq_len=8, overlong="split", whole=False, closed=False):
    """Pieces of turns given as (ids, trained)."""
    document = Document(tuple(Turn("", trained) for _, trained in turns), whole, closed)
    ids = [ids for ids, _ in turns]
    return build_pieces(document, ids, BARE, seq_len, overlong, "a.jsonl line 7")


def test_the_end_of_text_is_trained_as_the_last_turn_is():
    [piece], account = build(([5, 6], False), ([7, 8], True))
    assert piece.tokens.tolist() == [5, 6, 7, 8, EOS]
    assert piece.trained.tolist() == [0, 0, 1, 1, 1]
    assert (piece.tokens.dtype, piece.trained.dtype) == (np.int32, np.uint8)
    assert account == Accounting(samples=1, pieces=1, tokens=5, trained=3, masked=2)
    [piece], _ = build(([5], False), ([6], True), ([7], False))
    assert piece.trained.tolist() == [0, 1, 0, 0]


def test_an_end_of_text_that_is_there_is_not_repeated():
    [piece], _ = build(([5], False), ([6, EOS], True))
    assert piece.tokens.tolist() == [5, 6, EOS]


def test_the_first_token_of_every_piece_is_no_target():
    pieces, account = build((list(range(1, 20)), True), seq_len=8)
    assert [len(piece.tokens) for piece in pieces] == [8, 8, 4]
    assert all(piece.trained.tolist() == [0] + [1] * (len(piece.tokens) - 1) for piece in pieces)
    assert (account.trained, account.masked) == (17, 3)


def test_pieces_without_a_target_are_skipped_and_counted():
    pieces, account = build((list(range(1, 11)), False), ([9] * 3, True), seq_len=8)
    assert len(pieces) == 1
    assert account == Accounting(samples=1, pieces=1, tokens=14, trained=4, masked=2, no_targets=8)
    pieces, account = build(([1, 2], False))
    assert pieces == []
    assert account == Accounting(samples=1, samples_untrained=1, tokens=3, no_targets=3)
    assert account.skipped == 1


def test_a_sample_without_text_is_empty():
    assert build(([], False), ([], True)) == (
        [],
        Accounting(samples=1, samples_empty=1, tokens=1, empty=1),
    )


def test_overlong_samples_are_truncated_dropped_or_refused():
    long = (list(range(1, 12)), True)
    [piece], account = build(long, overlong="truncate")
    assert piece.tokens.tolist() == list(range(1, 9))
    assert (account.overlong_truncated, account.samples_truncated) == (4, 1)
    assert build(long, overlong="drop")[1].overlong_dropped == 12
    with pytest.raises(DataError, match=r"line 7 has 12 tokens, and data\.seq_len is 8"):
        build(long, overlong="error")


def test_a_closed_document_gets_no_end_of_text():
    [piece], _ = build(([5], False), ([6], True), closed=True)
    assert piece.tokens.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("overlong", "lengths", "lost"),
    [("split", [2, 2, 2, 3], 1), ("truncate", [3, 2, 3], 2), ("drop", [2, 3], 5)],
)
def test_short_rows_lose_no_token_unless_they_are_cut_on_purpose(overlong, lengths, lost):
    total, found = Accounting(), []
    for length in (4, 2, 3, 1):
        turns = ([9] * length, True)
        pieces, account = build(turns, seq_len=3, overlong=overlong, closed=True)
        found += [len(piece.tokens) for piece in pieces]
        total += account
    assert found == lengths
    assert total.adds_up
    assert total.dropped == lost  # one token of them stands alone: nothing predicts it
    assert (total.no_targets, total.tokens) == (1, 10)


def test_one_token_left_over_takes_another_along():
    pieces, account = build((list(range(1, 17)), True))
    assert [piece.tokens.tolist() for piece in pieces] == [
        list(range(1, 9)),
        list(range(9, 16)),
        [16, EOS],
    ]
    assert account.dropped == 0


def test_text_is_split_and_answers_are_truncated_by_default():
    long = ([1] * 6, False), ([2] * 6, True)
    assert len(build(*long, overlong="auto")[0]) == 2
    [piece], account = build(*long, overlong="auto", whole=True)
    assert piece.trained.tolist() == [0] * 6 + [1] * 2  # the part of the answer that is kept
    assert account == Accounting(
        samples=1,
        samples_truncated=1,
        pieces=1,
        tokens=13,
        trained=2,
        masked=6,
        overlong_truncated=5,
    )


def test_a_sample_whose_answer_is_cut_off_is_dropped():
    pieces, account = build(([1] * 9, False), ([2] * 3, True), overlong="truncate", whole=True)
    assert pieces == []
    assert account == Accounting(samples=1, samples_overlong=1, tokens=13, overlong_dropped=13)


def test_a_long_completion_is_split_where_that_is_asked_for():
    pieces, account = build(([1] * 6, False), ([2] * 6, True), overlong="split", whole=True)
    assert [piece.trained.sum() for piece in pieces] == [2, 4]
    assert account.dropped == 0


def test_ids_that_the_tokenizer_does_not_know_are_refused():
    document = Document((Turn("", True, (5, 10**6)),), closed=True)
    [ids] = encode_documents([document], tokenizer())
    with pytest.raises(DataError, match="line 7 holds the token id 1000000, and the tokenizer has"):
        build_pieces(document, ids, tokenizer(), 8, "auto", "line 7")


def test_given_ids_and_text_are_encoded_each_in_its_place():
    text = Document((Turn("the cat", False), Turn(" sat", True)))
    given = Document((Turn("", True, (5, 6)),))
    [first, second, third] = encode_documents([text, given, text], tokenizer())
    assert first == third == tokenizer().encode_batch(["the cat", " sat"])
    assert second == [(5, 6)]


def test_the_accounting_adds_up_over_a_grid():
    total = Accounting()
    lengths, policies = (0, 1, 7, 8, 9, 16, 17), ("split", "truncate", "drop", "auto")
    for first, second, policy, seq_len in itertools.product(lengths, lengths, policies, (2, 8)):
        turns = ([1] * first, False), ([2] * second, True)
        pieces, account = build(*turns, seq_len=seq_len, overlong=policy)
        assert account.adds_up
        assert account.tokens == first + second + 1
        assert account.pieces == len(pieces)
        assert account.trained == sum(piece.trained.sum() for piece in pieces)
        total += account
    assert total.adds_up
    assert total.samples == len(lengths) ** 2 * len(policies) * 2


@given(
    turns=st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=5),
    seq_len=st.integers(2, 9),
    overlong=st.sampled_from(["auto", "split", "truncate", "drop"]),
    closed=st.booleans(),
)
def test_every_token_is_kept_in_order_or_counted(turns, seq_len, overlong, closed):
    numbers = iter(range(1, 100))
    ids = [([next(numbers) for _ in range(length)], trained) for length, trained in turns]
    pieces, account = build(*ids, seq_len=seq_len, overlong=overlong, closed=closed)
    kept = [token for piece in pieces for token in piece.tokens.tolist()]
    whole = [token for part, _ in ids for token in part] + ([] if closed else [EOS])
    assert account.adds_up
    assert account.tokens == len(whole)
    assert account.dropped == len(whole) - len(kept)
    assert kept == [token for token in whole if token in kept]
    targets = {token for part, trained in ids if trained for token in part} | {EOS}
    for piece in pieces:
        assert 1 < len(piece.tokens) <= seq_len
        assert piece.trained[0] == 0
        assert piece.trained.any()
        assert set(piece.tokens[piece.trained == 1].tolist()) <= targets
    if not account.no_targets and overlong in ("auto", "split"):
        assert kept == (whole if any(part for part, _ in ids) else [])


@pytest.mark.parametrize("name", BARE_TEMPLATES)
def test_the_tokens_before_an_answer_are_those_the_model_is_asked_with(name):
    template = ChatTemplate(name, BARE_TEMPLATES[name])
    said = ("user", "the cat 细胞"), ("assistant", "sat\n"), ("user", " on"), ("assistant", "it")
    record = {"messages": [{"role": role, "content": text} for role, text in said]}
    document = Reading("messages", "assistant", template=template).document(record, "here")
    [ids] = encode_documents([document], tokenizer())
    tokens = list(itertools.chain(*ids))
    messages = [Message(role, text) for role, text in said]
    for number in (1, 3):
        [asked] = tokenizer().encode_batch([template.render(messages[:number], ask=True)])
        assert tokens[: len(asked)] == asked


REAL = {
    "lf_alpaca_en_demo.json": ("alpaca", {}, lambda r: [r["output"] + "<|im_end|>"]),
    "lf_alpaca_zh_demo.json": ("alpaca", {}, lambda r: [r["output"] + "<|im_end|>"]),
    "lf_identity.json": ("alpaca", {}, lambda r: [r["output"] + "<|im_end|>"]),
    "gsm8k_train.jsonl": (
        "prompt_completion",
        {"prompt": "question", "completion": "answer"},
        lambda r: [r["answer"]],
    ),
    "lf_glaive_toolcall_en_demo.json": (
        "sharegpt",
        {},
        lambda r: [
            turn["value"] + "<|im_end|>"
            for turn in r["conversations"]
            if turn["from"] in ("gpt", "function_call")
        ],
    ),
}
SAMPLES = 300


def real_records(name, text_unit="line"):
    files = find_files(str(real(name)), "data.train", "auto", real(name).parent)
    chunk = cut(files, text_unit, SAMPLES)[0]
    return [(row.record_or_raise(), row.where) for row in read_chunk(chunk)]


@lru_cache
def tokenizer():
    records = real_records("lf_alpaca_zh_demo.json") + real_records("lf_alpaca_en_demo.json")
    return train_tokenizer([record["output"] for record, _ in records], 2000)


@pytest.mark.parametrize("name", REAL)
def test_the_trained_part_of_real_records_is_their_answers(name):
    shape, columns, answers = REAL[name]
    records = real_records(name)
    assert decide_shape("auto", columns, *records[0]) == shape
    reading, total = Reading(shape, "assistant", columns), Accounting()
    for record, where in records:
        document = reading.document(record, where)
        [ids] = encode_documents([document], tokenizer())
        [piece], account = build_pieces(document, ids, tokenizer(), 100_000, "error", where)
        total += account
        trained = tokenizer().decode(piece.tokens[piece.trained == 1].tolist())
        assert trained == "".join(answers(record)) + "<|endoftext|>"
        assert (
            piece.trained.sum()
            == sum(
                len(part) for part, turn in zip(ids, document.turns, strict=True) if turn.trained
            )
            + 1
        )
    assert total.adds_up
    assert total.samples == total.pieces == len(records)


@pytest.mark.parametrize(
    ("name", "unit"), [("lf_c4_demo.jsonl", "line"), ("lf_wiki_demo.txt", "line")]
)
def test_the_pieces_of_real_texts_are_the_texts(name, unit):
    total, tokens = Accounting(), 0
    for record, where in real_records(name, unit):
        document = Reading("text", "assistant").document(record, where)
        [ids] = encode_documents([document], tokenizer())
        pieces, account = build_pieces(document, ids, tokenizer(), 128, "split", where)
        total += account
        tokens += len(ids[0]) + 1
        if not account.no_targets:
            whole = np.concatenate([piece.tokens for piece in pieces])
            assert tokenizer().decode(whole.tolist()) == record["text"] + "<|endoftext|>"
    assert total.adds_up
    assert total.tokens == tokens
