"""Every token is kept or counted as dropped, and only what can be predicted is a target."""

import itertools
from functools import lru_cache

import numpy as np
import pytest

from fakes.corpora import real
from pliant.data.records import Reading, Turn, decide_shape
from pliant.data.sources import cut, find_files, read_chunk
from pliant.data.tokenizer import train_tokenizer
from pliant.data.tokens import Accounting, build_pieces
from pliant.errors import DataError

EOS = 0


def build(*turns, seq_len=8, overlong="split"):
    """Pieces of turns given as (ids, trained)."""
    return build_pieces(
        [Turn("", trained) for _, trained in turns],
        [ids for ids, _ in turns],
        EOS,
        seq_len,
        overlong,
        "a.jsonl line 7",
    )


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
    assert (pieces, account.no_targets, account.skipped) == ([], 3, 1)


def test_a_sample_without_text_is_empty():
    assert build(([], False), ([], True)) == (
        [],
        Accounting(samples=1, skipped=1, tokens=1, empty=1),
    )


def test_overlong_samples_are_truncated_dropped_or_refused():
    long = (list(range(1, 12)), True)
    [piece], account = build(long, overlong="truncate")
    assert piece.tokens.tolist() == list(range(1, 9))
    assert account.overlong_truncated == 4
    assert build(long, overlong="drop")[1].overlong_dropped == 12
    with pytest.raises(DataError, match=r"line 7 has 12 tokens, and data\.seq_len is 8"):
        build(long, overlong="error")


def test_the_accounting_adds_up_over_a_grid():
    total = Accounting()
    lengths, policies = (0, 1, 7, 8, 9, 16, 17), ("split", "truncate", "drop")
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


REAL = {
    "lf_alpaca_en_demo.json": ("alpaca", {}, lambda r: [r["output"] + "<|im_end|>"]),
    "lf_alpaca_zh_demo.json": ("alpaca", {}, lambda r: [r["output"] + "<|im_end|>"]),
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
    return list(read_chunk(chunk))


@lru_cache
def tokenizer():
    records = real_records("lf_alpaca_zh_demo.json") + real_records("lf_alpaca_en_demo.json")
    return train_tokenizer([record["output"] for record, _ in records], 2000)


@pytest.mark.parametrize("name", REAL)
def test_the_trained_part_of_real_records_is_their_answers(name):
    shape, columns, answers = REAL[name]
    records = real_records(name)
    assert decide_shape("auto", columns, *records[0]) == shape
    reading, total = Reading(shape, "completion", columns), Accounting()
    for record, where in records:
        turns = reading.turns(record, where)
        ids = tokenizer().encode_batch([turn.text for turn in turns])
        [piece], account = build_pieces(turns, ids, tokenizer().eos_id, 100_000, "error", where)
        total += account
        trained = tokenizer().decode(piece.tokens[piece.trained == 1].tolist())
        assert trained == "".join(answers(record)) + "<|endoftext|>"
        assert (
            piece.trained.sum()
            == sum(len(part) for part, turn in zip(ids, turns, strict=True) if turn.trained) + 1
        )
    assert total.adds_up
    assert total.samples == total.pieces == len(records)


@pytest.mark.parametrize(
    ("name", "unit"), [("lf_c4_demo.jsonl", "line"), ("lf_wiki_demo.txt", "line")]
)
def test_the_pieces_of_real_texts_are_the_texts(name, unit):
    total, tokens = Accounting(), 0
    for record, where in real_records(name, unit):
        turns = Reading("text", "completion").turns(record, where)
        ids = tokenizer().encode_batch([turn.text for turn in turns])
        pieces, account = build_pieces(turns, ids, tokenizer().eos_id, 128, "split", where)
        total += account
        tokens += len(ids[0]) + 1
        if not account.no_targets:
            whole = np.concatenate([piece.tokens for piece in pieces])
            assert tokenizer().decode(whole.tolist()) == record["text"] + "<|endoftext|>"
    assert total.adds_up
    assert total.tokens == tokens
