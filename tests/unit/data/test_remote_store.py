"""Prepared data in an object store: made once, read through a cache that stays small."""

from functools import partial

import numpy as np
import pytest

from fakes.corpora import write_jsonl
from fakes.file_systems import Flaky
from fakes.preparing import prepare_here, some_records, spec, stores_in, texts
from pliant.data import store as stores
from pliant.data.plan import DataPlan, PlanSettings
from pliant.data.prepare import find_prepared, prepare
from pliant.errors import DataError, UserError
from pliant.storage import remote
from pliant.storage.remote import Cache


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    prepare_here(monkeypatch)
    monkeypatch.setattr(stores, "Cache", partial(Cache, tmp_path / "cache"))
    Flaky.errors.clear()
    yield
    Flaky.errors.clear()


@pytest.fixture
def data(tmp_path):
    return write_jsonl(tmp_path / "data.jsonl", some_records(200))


@pytest.fixture
def job(data, tmp_path):
    return spec(data, store=f"flaky://bucket/{tmp_path.name}")


def test_a_remote_store_holds_what_a_local_one_does_and_is_made_once(job, data, tmp_path):
    local = prepare(spec(data), tmp_path / "stores")
    found = prepare(job, tmp_path / "work")
    assert found.store.place() == f"{job.data.store}/{local.key}"
    assert found.manifest == local.manifest
    assert texts(found, "train") == texts(local, "train")
    assert found.damage() == []
    assert stores_in(tmp_path / "work") == []  # it went away whole
    reports = []
    again = prepare(job, tmp_path / "elsewhere", lambda *counts: reports.append(counts))
    assert (again.manifest, reports) == (found.manifest, [])


def test_every_piece_is_read_through_a_cache_with_room_for_two_shards(
    job, data, tmp_path, monkeypatch
):
    monkeypatch.setattr(remote, "IN_USE_S", 0.0)
    monkeypatch.setattr(stores, "KEPT_SHARDS", 1)
    local = prepare(spec(data), tmp_path / "stores")
    sizes = [entry["size_bytes"] for name, entry in local.files() if name.endswith(".arrow")]
    limit = 2 * max(sizes)
    small = spec(data, store=job.data.store, store_cache_gib=limit / 2**30)
    split = prepare(small, tmp_path / "work").split("train")
    settings = PlanSettings(64, 4, window=10, packing=True, shuffle=True, seed=1)
    ours, theirs = DataPlan(split, settings), DataPlan(local.split("train"), settings)
    assert ours.steps_of(0) == theirs.steps_of(0) > 3
    for step in range(ours.steps_of(0)):
        items = ours.packs_of(step).items
        assert np.array_equal(items, theirs.packs_of(step).items)
        for found, expected in zip(
            ours.split.gather(items), theirs.split.gather(items), strict=True
        ):
            assert np.array_equal(found, expected)
        cached = [path for path in (tmp_path / "cache").iterdir() if path.name[0] != "."]
        assert sum(path.stat().st_size for path in cached) <= limit
    assert sum(sizes) > 3 * limit


def test_a_transfer_that_broke_off_goes_on_where_it_was(job, tmp_path):
    Flaky.errors += [None, None, PermissionError("not yours")]
    with pytest.raises(UserError, match=r"cannot be reached: not yours\. Check data\.store"):
        prepare(job, tmp_path / "work")
    assert len(stores_in(tmp_path / "work")) == 1
    assert find_prepared(job, tmp_path / "work") is None
    Flaky.opened.clear()
    found = prepare(job, tmp_path / "work")
    assert found.damage() == []
    written = [name for name in Flaky.opened if name.startswith("wb")]
    assert len(written) == len(found.files()) - 2 + 1  # without two that were there; the manifest


def test_an_altered_shard_is_noticed(job, tmp_path):
    found = prepare(job, tmp_path / "work")
    name = next(name for name, _ in found.files() if name.endswith(".arrow"))
    content = bytearray(found.store.read(name))
    content[len(content) // 2] ^= 1
    found.store.write(name, bytes(content))
    assert found.damage() == [
        f"{found.store.place(name)} was altered since it was written. Delete "
        f"{found.store.place()} and prepare the data again."
    ]
    with pytest.raises(DataError, match="was altered since it was written"):
        texts(found, name.partition("/")[0])
