"""A store is prepared in Ray's tasks: once, the same again, and nothing is left of bad input."""

import shutil
import tempfile

import pytest
import ray

from fakes.corpora import write_jsonl
from fakes.preparing import contents, saved_tokenizer, some_records, spec, stores_in
from pliant.data.prepare import prepare
from pliant.errors import DataError


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    directory = tempfile.mkdtemp(prefix="pr", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=directory, logging_level="ERROR")
        yield
        ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def data(tmp_path):
    return write_jsonl(tmp_path / "data.jsonl", some_records(100))


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


def test_a_killed_preparation_goes_on_where_it_stopped(tmp_path, data):
    store = prepare(spec(data), tmp_path / "stores")
    before = contents(store)
    lost, kept = (store.store.root / "train" / f"shard-0000{i}.arrow" for i in (2, 3))
    written = kept.stat().st_mtime_ns
    (store.store.root / "manifest.json").unlink()
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


def test_rays_own_settings_are_as_before(tmp_path, data):
    before = ray.data.DataContext.get_current()
    shown = before.enable_progress_bars
    prepare(spec(data), tmp_path)
    assert ray.data.DataContext.get_current() is before
    assert before.enable_progress_bars == shown
