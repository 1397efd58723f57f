"""Every kind of storage keeps the same promises: a file is there as it was written, or not at all;
what fails for a moment is tried again; a full disk is told at once."""

import errno
import os
import pickle
import shutil
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace

import pytest

from fakes.checkpoints import commit, cut, emptied, whole_tensors
from fakes.file_systems import Flaky
from fakes.ranks import _free_port
from pliant.checkpoints.places import check_usable, places_of
from pliant.checkpoints.reader import load, newest
from pliant.errors import FilesDamaged, NoSpace, UserError
from pliant.storage import local as module
from pliant.storage.local import LocalStorage, StoredFile, file_digest
from pliant.storage.opening import open_storage
from pliant.storage.remote import Cache, RemoteStorage, backoff, retried

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache", limit_bytes=3 * len(CONTENT))


@pytest.fixture
def flaky(cache, tmp_path):
    Flaky.errors.clear()
    Flaky.opened.clear()
    yield RemoteStorage(f"flaky://bucket/{tmp_path.name}", cache=cache, waits_s=(0.0, 0.0))
    Flaky.errors.clear()


@pytest.fixture(params=["local", "file uri", "memory", "flaky"])
def storage(request, tmp_path, cache, flaky):
    return {
        "local": open_storage(tmp_path / "stored"),
        "file uri": open_storage((tmp_path / "sto red").as_uri()),
        "memory": RemoteStorage(f"memory://{tmp_path.name}", cache=cache),
        "flaky": flaky,
    }[request.param]


@pytest.fixture
def local(tmp_path):
    path = tmp_path / "slot"
    path.write_bytes(CONTENT)
    return path


def test_what_is_put_is_there(storage, local, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    stored = storage.put_file(local, "step/rank")
    assert stored == StoredFile(len(CONTENT), file_digest(local))
    assert storage.read("step/rank") == CONTENT
    assert storage.info("step/rank").size_bytes == len(CONTENT)
    assert storage.fetch("step/rank", stored.size_bytes, stored.sha256).read_bytes() == CONTENT
    storage.check("step/rank", stored.size_bytes, stored.sha256)
    assert storage.names() == ["step"]
    assert storage.names("step") == ["rank"]


def test_a_file_is_replaced_and_removed(storage):
    storage.write("a/b", b"first")
    storage.write("a/b", b"second")
    storage.write("a/c", b"other")
    assert storage.below("a").read("b") == b"second"
    storage.delete("a/b")
    assert (storage.info("a/b"), storage.names("a")) == (None, ["c"])
    storage.delete_tree("a")
    assert storage.names() == []


def test_what_is_not_there_is_told(storage):
    assert storage.names("nothing") == []
    assert storage.info("nothing") is None
    storage.delete("nothing")
    storage.delete_tree("nothing")
    with pytest.raises(FileNotFoundError):
        storage.read("nothing")
    with pytest.raises(FilesDamaged, match="nothing is missing") as caught:
        storage.check("nothing", 1, "ab")
    assert caught.value.path == storage.place("nothing")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(CONTENT[:-1], "bytes instead of"), (b"\1" + CONTENT[1:], "was altered since")],
)
def test_damage_is_named(storage, local, content, sentence):
    stored = storage.put_file(local, "rank")
    storage.write("rank", content)
    with pytest.raises(FilesDamaged, match=sentence):
        storage.check("rank", stored.size_bytes, stored.sha256)
    if sentence == "was altered since":
        storage.check("rank", stored.size_bytes, "")  # a size alone is compared


def test_a_storage_is_sent_to_workers(storage, local):
    storage.put_file(local, "rank")
    copy = pickle.loads(pickle.dumps(storage.below("x")))
    assert copy == storage.below("x")
    assert copy.place() == storage.place("x")
    assert pickle.loads(pickle.dumps(storage)).read("rank") == CONTENT


def test_a_whole_checkpoint_is_loaded_from_any_storage(storage):
    checkpoints, ledger = storage.below("checkpoints"), storage.below("ledger")
    commit(checkpoints, ledger, 5)
    commit(checkpoints, ledger, 10)
    (fragments,) = map(emptied, cut(whole_tensors(), 1))
    load(newest(checkpoints, ledger), fragments)
    expected = whole_tensors(10)
    assert all((f.tensor == expected[f.key]).all() for f in fragments)
    name = next(name for name in checkpoints.names() if "00000010" in name)
    checkpoints.delete(f"{name}/rank-00001.safetensors")
    checkpoint = newest(checkpoints, ledger)
    assert checkpoint.manifest.step == 5
    assert [place in checkpoint.passed_over[0] for place in ("rank-00001", "missing")] == [True] * 2


def test_an_outage_is_not_taken_for_damage(flaky):
    """An older checkpoint would be resumed from, and the newer one removed as passed over."""
    checkpoints, ledger = flaky.below("checkpoints"), flaky.below("ledger")
    commit(checkpoints, ledger, 5)
    commit(checkpoints, ledger, 10)
    Flaky.errors += [OSError(f"no route to host {n}") for n in range(3)]
    with pytest.raises(OSError, match="no route to host 2"):
        newest(checkpoints, ledger)
    assert newest(checkpoints, ledger).manifest.step == 10


def test_nothing_half_written_is_seen(tmp_path, local, monkeypatch):
    """A copy that breaks off leaves what was there before, and no file of its own."""
    storage = LocalStorage(tmp_path / "stored")
    storage.write("rank", b"before")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("cut")))
    with pytest.raises(OSError, match="cut"):
        storage.put_file(local, "rank")
    assert storage.names() == ["rank"]
    assert storage.read("rank") == b"before"


def full(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_fills_up_has_no_space(tmp_path, local, monkeypatch):
    storage = LocalStorage(tmp_path / "stored")
    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda: storage.put_file(local, "rank"), lambda: storage.write("a", b"b")):
        with pytest.raises(NoSpace, match="Free some space"):
            write()
    assert storage.names() == []


def test_free_space_is_that_of_the_disk(tmp_path, flaky):
    free = LocalStorage(tmp_path / "not" / "yet").free_bytes()
    assert 0 < free <= shutil.disk_usage(tmp_path).total
    assert flaky.free_bytes() is None


def test_what_fails_for_a_moment_is_tried_again(flaky, local, caplog):
    Flaky.errors += [OSError("connection reset"), TimeoutError("slow")]
    stored = flaky.put_file(local, "rank")
    assert flaky.read("rank") == CONTENT
    assert "connection reset. Trying again" in caplog.text
    Flaky.errors += [OSError("connection reset")]
    assert flaky.fetch("rank", stored.size_bytes, stored.sha256).read_bytes() == CONTENT


def test_what_goes_on_failing_is_raised(flaky, local):
    Flaky.errors += [OSError(f"number {n}") for n in range(4)]
    with pytest.raises(OSError, match="number 2"):
        flaky.put_file(local, "rank")


def test_what_will_not_pass_is_not_tried_again(flaky, local):
    flaky.put_file(local, "rank")
    Flaky.errors += [OSError(errno.ENOSPC, "full")]
    with pytest.raises(NoSpace):
        flaky.put_file(local, "rank")
    Flaky.errors += [PermissionError("no")]
    with pytest.raises(PermissionError):
        flaky.read("rank")
    assert len(Flaky.opened) == 3


def test_waits_grow():
    assert backoff(4, first_s=0.5, factor=3) == (0.5, 1.5, 4.5)
    slept, errors = [], [OSError("a"), OSError("b")]

    def action():
        if errors:
            raise errors.pop()
        return "done"

    assert retried(action, backoff(), slept.append) == "done"
    assert slept == [0.5, 1.5]


def test_a_download_is_shared_and_read_once(flaky, local):
    stored = flaky.put_file(local, "rank")
    paths = {flaky.fetch("rank", stored.size_bytes, stored.sha256) for _ in range(3)}
    assert len(paths) == 1
    assert sum(name.startswith("rb") for name in Flaky.opened) == 1


def test_a_check_reads_what_is_stored_and_not_the_copy(flaky, local):
    stored = flaky.put_file(local, "rank")
    flaky.fetch("rank", stored.size_bytes, stored.sha256)
    flaky.write("rank", b"\1" + CONTENT[1:])
    with pytest.raises(FilesDamaged, match="was altered"):
        flaky.check("rank", stored.size_bytes, stored.sha256)


def test_the_cache_keeps_within_its_limit(flaky, cache, tmp_path):
    for number in range(5):
        local = tmp_path / "slot"
        local.write_bytes(bytes([number]) * len(CONTENT))
        stored = flaky.put_file(local, f"rank-{number}")
        path = flaky.fetch(f"rank-{number}", stored.size_bytes, stored.sha256)
        os.utime(path, (number, number))  # long ago; the order counts
    left = [path for path in cache.directory.iterdir() if path.name[0] != "."]
    assert sorted(path.read_bytes()[0] for path in left) == [2, 3, 4]


def test_what_is_in_use_is_not_removed_to_make_room(flaky, cache, tmp_path):
    for number in range(5):
        local = tmp_path / "slot"
        local.write_bytes(bytes([number]) * len(CONTENT))
        stored = flaky.put_file(local, f"rank-{number}")
        flaky.fetch(f"rank-{number}", stored.size_bytes, stored.sha256)
    assert len([path for path in cache.directory.iterdir() if path.name[0] != "."]) == 5


def test_a_job_has_a_place_of_its_own(tmp_path):
    places = places_of(tmp_path / "runs" / "mine", None)
    assert places.checkpoints == LocalStorage(tmp_path / "runs" / "mine" / "checkpoints")
    places = places_of(tmp_path / "runs" / "mine", "s3://bucket/all/?region=here")
    assert places.ledger.place("x.parquet") == "s3://bucket/all/mine/ledger/x.parquet"


def test_what_cannot_be_used_is_told_before_the_start(tmp_path, flaky):
    check_usable(flaky)
    check_usable(LocalStorage(tmp_path / "new"))
    assert (flaky.names(), LocalStorage(tmp_path / "new").names()) == ([], [])
    Flaky.errors += [PermissionError("not yours")]
    with pytest.raises(UserError, match=r"cannot be written: not yours.*credentials"):
        check_usable(flaky)
    with pytest.raises(UserError, match="nosuch://x names a file system that cannot be opened"):
        check_usable(open_storage("nosuch://x"))


@pytest.fixture(scope="module")
def s3_server():
    """A local S3 server of moto's, in a process of its own."""
    pytest.importorskip("moto.server")
    port = _free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        url = f"http://127.0.0.1:{port}"
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{url}/moto-api/", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield url
        server.terminate()


def test_checkpoints_are_kept_in_s3(s3_server, local, cache, monkeypatch):
    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    request = urllib.request.Request(f"{s3_server}/bucket", method="PUT")
    urllib.request.urlopen(request, timeout=30).close()
    s3 = replace(open_storage("s3://bucket/runs"), cache=cache, waits_s=())
    test_what_is_put_is_there(s3.below("put"), local, monkeypatch)
    test_a_file_is_replaced_and_removed(s3.below("replaced"))
    test_what_is_not_there_is_told(s3.below("none"))
    test_damage_is_named(s3.below("damage"), local, b"\1" + CONTENT[1:], "was altered since")
    test_a_whole_checkpoint_is_loaded_from_any_storage(s3.below("whole"))
    assert s3.below("put").info("step/rank").modified == pytest.approx(time.time(), abs=600)
    check_usable(s3.below("usable"))
    with pytest.raises(UserError, match="cannot be written"):
        check_usable(replace(open_storage("s3://absent/runs"), waits_s=()))
