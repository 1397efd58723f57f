"""What a store holds, what its key depends on, and what is refused."""

import json
import shutil
import threading
from pathlib import Path

import pytest

from fakes.corpora import real, write_jsonl
from fakes.preparing import prepare_here, some_records, spec, stores_in, texts
from pliant.data import prepare as preparing
from pliant.data.prepare import prepare
from pliant.errors import DataError, NoSpace, SpecError
from pliant.spec.load import build_spec


@pytest.fixture(autouse=True)
def here(monkeypatch):
    prepare_here(monkeypatch)


@pytest.fixture
def data(tmp_path):
    return write_jsonl(tmp_path / "data.jsonl", some_records(100))


def test_a_store_holds_every_record_in_order(tmp_path, data):
    store = prepare(spec(data, split={"validation": 0.0}), tmp_path)
    expected = [r["prompt"] + r["completion"] + "<|endoftext|>" for r in some_records(100)]
    assert texts(store, "train") == expected
    train, accounting = store.manifest["splits"]["train"], store.manifest["accounting"]["train"]
    assert (train["pieces"], len(train["shards"])) == (100, 5)
    assert train["tokens"] == accounting["trained"] + accounting["masked"]
    assert train["targets"] == accounting["trained"] == store.split("train").targets.sum()
    assert store.split("validation") is None


def test_every_setting_changes_the_key(tmp_path, data):
    other = write_jsonl(tmp_path / "other.jsonl", some_records(101))
    jobs = [
        spec(data),
        spec(other),
        spec(tmp_path / "*.jsonl"),
        spec(data, seq_len=65),
        spec(data, train_on="all"),
        spec(data, overlong="drop"),
        spec(data, shard_samples=21),
        spec(data, split={"validation": 0.1}),
        spec(data, split={"test": 0.1}),
        spec(data, validation=str(other)),
        spec(data, columns={"system": "s"}),
        spec(data, shape="text", columns={"text": "prompt"}),
        spec(data, tokenizer={"train_vocab_size": 301}),
        spec(data, transform="copy.copy"),
        spec(data, transform="copy.deepcopy"),
    ]
    keys = [preparing._decide(job.data, tmp_path).key for job in jobs]
    assert len(set(keys)) == len(keys)
    assert preparing._decide(spec(data, window=7, packing=False).data, tmp_path).key == keys[0]


def test_records_stay_on_their_side_when_others_are_added(tmp_path):
    split = {"validation": 0.2, "test": 0.1}
    sides = []
    for count in (100, 150):
        data = write_jsonl(tmp_path / "data.jsonl", some_records(count))
        store = prepare(spec(data, split=split), tmp_path / "stores")
        sides.append({name: texts(store, name) for name in ("train", "validation", "test")})
    few, more = sides
    assert sum(len(side) for side in more.values()) == 150
    for name in few:
        assert 0 < len(few[name]) < len(more[name])
        assert set(few[name]) <= set(more[name])


def test_validation_files_take_the_place_of_the_split(tmp_path, data):
    held_out = write_jsonl(tmp_path / "held_out.jsonl", some_records(30, first=500))
    store = prepare(spec(data, validation=str(held_out)), tmp_path / "stores")
    assert (store.split("train").num_pieces, store.split("validation").num_pieces) == (100, 30)
    assert "500 + 500 = 1000" in texts(store, "validation")[0]


def test_a_training_split_without_targets_is_refused(tmp_path, data):
    job = spec(data, columns={"text": "prompt"}, shape="text", overlong="drop", seq_len=2)
    with pytest.raises(DataError, match=r"data\.train leaves nothing to train on: of \d+ samples"):
        prepare(job, tmp_path / "stores")
    assert stores_in(tmp_path / "stores") == []


def test_empty_files_and_unknown_transforms_are_refused_before_any_work(tmp_path, data):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(DataError, match=r"data\.train holds no records"):
        prepare(spec(empty), tmp_path / "stores")
    with pytest.raises(DataError, match=r"data\.validation holds no records"):
        prepare(spec(data, validation=str(empty)), tmp_path / "stores")
    with pytest.raises(SpecError, match=r"data\.transform"):
        prepare(spec(data, transform="copy.nothing"), tmp_path / "stores")
    with pytest.raises(DataError, match=r"data\.transform json\.dumps returned str for .* line 1"):
        prepare(spec(data, transform="json.dumps"), tmp_path / "stores")
    assert not (tmp_path / "stores").exists() or stores_in(tmp_path / "stores") == []


def test_a_full_disk_is_noticed_before_writing(tmp_path, data, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(preparing.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(NoSpace, match=r"has 0\.0 MiB free") as caught:
        prepare(spec(data), tmp_path / "stores")
    assert caught.value.free_bytes == 1000
    assert stores_in(tmp_path / "stores") == []


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("lf_alpaca_zh_demo.json", {}),
        ("lf_glaive_toolcall_en_demo.json", {}),
        ("gsm8k_train.jsonl", {"columns": {"prompt": "question", "completion": "answer"}}),
        ("lf_c4_demo.jsonl", {}),
        ("lf_wiki_demo.txt", {"text_unit": "line"}),
    ],
)
def test_real_data_is_prepared_and_accounted_for(tmp_path, name, settings):
    settings = {"seq_len": 512, "shard_samples": 65536, **settings}
    job = spec(real(name), tokenizer={"train_vocab_size": 1000}, **settings)
    store = prepare(job, tmp_path)
    assert store.damage() == []
    for split, counted in store.manifest["splits"].items():
        account = store.manifest["accounting"][split]
        assert counted["tokens"] == account["trained"] + account["masked"]
        assert counted["targets"] == account["trained"]
    assert "�" not in texts(store, "train")[0]


def test_records_that_cannot_be_used_are_an_error_or_counted_and_kept_aside(tmp_path):
    lines = [json.dumps(record) for record in some_records(60)]
    lines[20] = '{"prompt": "half'
    lines[45] = '{"prompt": "no completion"}'
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"data\.jsonl line 21 is not JSON"):
        prepare(spec(path), tmp_path / "strict")
    assert stores_in(tmp_path / "strict") == []

    store = prepare(spec(path, bad_rows="skip"), tmp_path / "lenient")
    counts = store.manifest["accounting"]
    assert sum(account["bad"] for account in counts.values()) == 2
    assert sum(account["samples"] for account in counts.values()) == 58
    kept = sorted((store.store.root.parent / f"{store.key}.quarantine").iterdir())
    told = [json.loads(line) for file in kept for line in file.read_text().splitlines()]
    assert [one["where"].split()[-2:] for one in told] == [["line", "21"], ["line", "46"]]
    assert [one["raw"] for one in told] == [lines[20], lines[45]]
    assert "has no column completion" in told[1]["problem"]

    with pytest.raises(DataError, match=r"2 records or more cannot be used.*allows 1"):
        prepare(spec(path, bad_rows="skip", max_bad_rows=1), tmp_path / "limited")


def test_parts_of_a_mixture_are_told_apart_and_samples_keep_their_lengths(tmp_path):
    paths = [
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": word * n} for n in range(1, 31)])
        for name, word in (("a", "one "), ("b", "two "))
    ]
    parts = [{"path": str(paths[0]), "weight": 3.0}, str(paths[1])]
    job = spec("unused", split={"validation": 0.0}, seq_len=16).model_copy()
    tree = job.model_dump(mode="json")
    tree["data"]["train"] = parts
    store = prepare(build_spec(tree, origin="a test"), tmp_path / "stores")
    split = store.split("train")
    assert len(split.samples) == 60
    assert split.samples.max() > 16 >= split.lengths.max()
    runs = split.parts
    assert len(runs) == 2
    for run, word in zip(runs, ("one", "two"), strict=True):
        words = {text.split()[0] for text in texts(store, "train")[run[0][0] : run[-1][1]]}
        assert words - {"<|endoftext|>"} == {word}


def test_the_standard_library_is_a_data_set(tmp_path):
    job = spec("stdlib://", tokenizer={"train_vocab_size": 4096}, seq_len=512, shard_samples=65536)
    store = prepare(job, tmp_path)
    assert store.manifest["vocab_size"] == 4096
    assert store.split("train").num_pieces > 5000
    [source] = store.manifest["made_from"]["sources"]["train"]
    assert source["name"] == "stdlib://"
    assert json.loads(Path(store.store.root, "manifest.json").read_text())["key"] == store.key


def test_two_jobs_do_not_prepare_the_same_data_at_once(tmp_path):
    def second():
        with preparing._lock(tmp_path, "key"):
            order.append("second")

    order, thread = [], threading.Thread(target=second)
    with preparing._lock(tmp_path, "key"):
        thread.start()
        thread.join(timeout=0.2)
        order.append("first")
    thread.join(timeout=10)
    assert order == ["first", "second"]
