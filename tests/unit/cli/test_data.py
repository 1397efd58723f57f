"""`pliant data`: what it prints of a store, and its exit codes."""

import json
import re
from pathlib import Path

import pytest
import yaml

from fakes.preparing import prepare_here
from pliant.cli.main import main

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"How much is {i} and {i}?"},
            {"role": "assistant", "content": f"{2 * i}."},
        ]
    }
    for i in range(1, 41)
]


@pytest.fixture
def prepared_here(monkeypatch):
    """No Ray is started."""
    prepare_here(monkeypatch)
    monkeypatch.setattr("pliant.cluster.session.ray_session", _no_session)


class _no_session:  # noqa: N801 - stands in for a function
    def __init__(self, *_):
        pass

    def __enter__(self):
        return None

    def __exit__(self, *_):
        return None


@pytest.fixture
def job(tmp_path, prepared_here):
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    tree = {
        "name": "job",
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": "auto",
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
            }
        },
        "data": {
            "train": str(data),
            "split": {"validation": 0.1},
            "tokenizer": {"train_vocab_size": 400},
            "seq_len": 64,
        },
        "training": {"global_batch_size": 2, "steps": 1},
    }
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(tree))
    return [str(path), "--runs-dir", str(tmp_path / "runs")]


def told(capsys, *arguments):
    code = main(["data", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_preparing_tells_where_every_token_went(job, capsys):
    code, out, _ = told(capsys, "prepare", *job)
    assert code == 0
    counts = re.search(r"(\d[\d,]*) tokens of (\d+) samples = (\d+) trained \+ (\d+) masked;", out)
    tokens, samples, trained, masked = (int(group.replace(",", "")) for group in counts.groups())
    assert tokens == trained + masked
    assert 30 <= samples < 40
    rows, seq_len = map(int, re.search(r"an epoch has (\d+) rows of (\d+)", out).groups())
    assert seq_len == 64
    assert 0.8 * rows * seq_len < tokens <= rows * seq_len
    code, again, _ = told(capsys, "prepare", *job, "--json")
    accounts = json.loads(again)["accounting"]
    assert accounts["train"]["trained"] == trained
    assert sum(account["samples"] for account in accounts.values()) == 40


def test_verifying_names_what_is_damaged(job, capsys):
    code, _, err = told(capsys, "verify", *job)
    assert code == 2
    assert "is not prepared" in err
    _, out, _ = told(capsys, "prepare", *job, "--json")
    code, verified, _ = told(capsys, "verify", *job)
    assert code == 0
    assert "whole, " in verified
    store = Path(json.loads(out)["path"])
    shard = next((store / "train").glob("*.arrow"))
    content = bytearray(shard.read_bytes())
    content[-20] ^= 1
    shard.write_bytes(content)
    code, _, err = told(capsys, "verify", *job)
    assert code == 5
    assert f"{shard.name} was altered since" in err


def test_showing_marks_answers_and_nothing_else_as_trained(job, capsys):
    code, out, _ = told(capsys, "show", *job, "-n", "2")
    assert code == 0
    trained = re.findall("\u27e6(.*?)\u27e7", out, re.DOTALL)
    assert len(trained) >= 4
    assert all(re.fullmatch(r"\d+\.<\|im_end\|>(<\|endoftext\|>)?", text) for text in trained)
    assert out.count("How much is") == len(trained)
    assert "row 0: " in out
    assert "row 1: " in out
    code, _, err = told(capsys, "show", *job, "--first", "1000")
    assert code == 2
    assert re.search(r"--first is 1000, and epoch 0 has \d+ rows", err)


def test_stats_describe_lengths_filling_and_gains(job, capsys, tmp_path):
    code, out, _ = told(capsys, "stats", *job, "--json", "--png", str(tmp_path / "lengths.png"))
    assert code == 0
    found = json.loads(out)
    assert found["samples"] == sum(found["histogram"]["counts"])
    assert [one["seq_len"] for one in found["fillings"]] == [16, 32, 64, 128, 256]
    here = next(one for one in found["fillings"] if one["seq_len"] == 64)
    assert here["overlong"] == here["tokens_beyond"] == 0
    assert found["packing_gain"] == pytest.approx(here["packed"] / here["padded"])
    assert found["packing_gain"] > 1.5
    assert found["num_layers"] == 3
    assert found["cache_gain_s"] == pytest.approx(2 * found["build_s"])
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = told(capsys, "stats", *job)
    assert code == 0
    assert "packing takes" in out
    assert "\u2588" in out


def test_drift_is_measured_against_the_data_of_an_earlier_run(job, capsys, tmp_path):
    _, out, _ = told(capsys, "prepare", *job, "--json")
    key = Path(json.loads(out)["path"]).name
    earlier = tmp_path / "runs" / "earlier"
    earlier.mkdir()
    (earlier / "manifest.json").write_text(json.dumps({"data": {"key": key}}))
    _, out, _ = told(capsys, "stats", *job, "--json", "--against", "earlier")
    assert json.loads(out)["drift_verdict"] == "as before"
    code, _, err = told(capsys, "stats", *job, "--against", "never")
    assert code == 2
    assert "There is no run never" in err
