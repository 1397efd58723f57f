"""A store is prepared once, the same whoever does which part, and bad input leaves nothing."""

import json
import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import ray

from fakes.corpora import real, write_jsonl
from pliant.data import prepare as preparing
from pliant.data.prepare import prepare
from pliant.data.tokenizer import open_tokenizer
from pliant.errors import DataError, NoSpace, SpecError
from pliant.spec.load import build_spec


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    directory = tempfile.mkdtemp(prefix="pr", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=directory, logging_level="ERROR")
        yield
        ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


def spec(train, **data):
    settings = {
        "train": str(train),
        "tokenizer": {"train_vocab_size": 300},
        "seq_len": 64,
        "shard_samples": 20,
    }
    tree = {
        "name": "job",
        "model": {"config": {"model_type": "llama"}},
        "training": {"global_batch_size": 8, "steps": 1},
        "data": settings | data,
    }
    return build_spec(tree, origin="a test")


def some_records(count, first=0):
    return [
        {"prompt": f"What is {i} + {i}?\n", "completion": f"{i} + {i} = {2 * i}"}
        for i in range(first, first + count)
    ]


@pytest.fixture
def data(tmp_path):
    return write_jsonl(tmp_path / "data.jsonl", some_records(100))


def contents(store):
    files = sorted(path for path in store.path.rglob("*") if path.is_file())
    return {str(path.relative_to(store.path)): path.read_bytes() for path in files}


def texts(store, name):
    """The pieces of a split as text."""
    split, tokenizer = store.split(name), open_tokenizer(store.tokenizer_path)
    return [
        tokenizer.decode(split.gather(np.array([i]))[0].tolist()) for i in range(split.num_pieces)
    ]


def stores_in(root):
    return [path for path in root.iterdir() if path.name not in (".locks", "corpora")]


def test_the_same_input_gives_the_same_bytes_and_no_work_the_second_time(tmp_path, data):
    job, reports = spec(data), []
    first = prepare(job, tmp_path / "one", lambda *counts: reports.append(counts))
    assert reports == [(done, 5) for done in range(6)]
    again = prepare(job, tmp_path / "one", lambda *counts: reports.append(counts))
    assert len(reports) == 6
    assert again.manifest == first.manifest
    (tmp_path / "moved").mkdir()
    moved = shutil.move(data, tmp_path / "moved" / data.name)
    other = prepare(spec(moved), tmp_path / "two")
    assert contents(other) == contents(first)
    assert first.damage() == []


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


def test_a_killed_preparation_goes_on_where_it_stopped(tmp_path, data):
    store = prepare(spec(data), tmp_path / "stores")
    before = contents(store)
    lost, kept = (store.path / "train" / f"shard-0000{i}.arrow" for i in (2, 3))
    written = kept.stat().st_mtime_ns
    (store.path / "manifest.json").unlink()
    lost.unlink()
    reports = []
    again = prepare(spec(data), tmp_path / "stores", lambda *counts: reports.append(counts))
    assert reports == [(4, 5), (5, 5)]
    assert contents(again) == before
    assert kept.stat().st_mtime_ns == written


def test_a_bad_line_is_named_and_leaves_nothing(tmp_path, data):
    with data.open("a") as file:
        file.write('{"prompt": "half a rec\n')
    with pytest.raises(DataError, match=r"data\.jsonl line 101 is not JSON"):
        prepare(spec(data, tokenizer={"path": saved_tokenizer(tmp_path)}), tmp_path / "stores")
    assert stores_in(tmp_path / "stores") == []


def test_an_error_of_a_ray_task_arrives_as_it_was_raised(tmp_path, data):
    job = spec(data, overlong="error", seq_len=5, tokenizer={"path": saved_tokenizer(tmp_path)})
    with pytest.raises(DataError, match=r"line \d+ has \d+ tokens") as caught:
        prepare(job, tmp_path / "stores")
    assert caught.value.tokens > 5
    assert stores_in(tmp_path / "stores") == []


def saved_tokenizer(tmp_path):
    from pliant.data.tokenizer import save_tokenizer, train_tokenizer

    save_tokenizer(train_tokenizer(["What is 1 + 1?"], 270), tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


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


def test_rays_own_settings_are_as_before(tmp_path, data):
    before = ray.data.DataContext.get_current()
    shown = before.enable_progress_bars
    prepare(spec(data), tmp_path)
    assert ray.data.DataContext.get_current() is before
    assert before.enable_progress_bars == shown


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
    kept = sorted((store.path.parent / f"{store.key}.quarantine").iterdir())
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
    assert json.loads(Path(store.path, "manifest.json").read_text())["key"] == store.key


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
