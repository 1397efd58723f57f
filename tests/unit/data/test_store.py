"""What was written is read back, in any order, and damage is noticed."""

import pickle

import numpy as np
import pytest

from pliant.data.store import (
    STORE_VERSION,
    open_store,
    piece_lengths,
    piece_targets,
    replacing,
    write_index,
    write_manifest,
    write_shard,
)
from pliant.data.tokens import Piece
from pliant.errors import DataError


def some_pieces(rng, count):
    pieces = []
    for _ in range(count):
        length = int(rng.integers(2, 30))
        trained = rng.integers(0, 2, length).astype(np.uint8)
        pieces.append(Piece(rng.integers(0, 50_000, length).astype(np.int32), trained))
    return pieces


@pytest.fixture
def pieces():
    return some_pieces(np.random.default_rng(0), 40)


@pytest.fixture
def store(tmp_path, pieces):
    """A store whose training split has three shards; the second chunk gave it nothing."""
    path = tmp_path / "key"
    (path / "train").mkdir(parents=True)
    parts = {0: pieces[:15], 2: pieces[15:16], 3: pieces[16:]}
    shards = [
        write_shard(path / "train" / f"shard-{number:05d}.arrow", part, origin=min(number, 2))
        for number, part in parts.items()
    ]
    lengths = piece_lengths(pieces)
    train = write_index(path / "train", shards, lengths, piece_targets(pieces), lengths)
    write_manifest(
        path, {"version": STORE_VERSION, "key": "key", "tokenizer": [], "splits": {"train": train}}
    )
    return path


def test_a_split_knows_its_pieces(store, pieces):
    split = open_store(store).split("train")
    assert split.num_pieces == 40
    assert split.lengths.tolist() == [len(piece.tokens) for piece in pieces]
    assert split.targets.tolist() == [piece.trained.sum() for piece in pieces]
    assert split.shard_starts.tolist() == [0, 15, 16, 40]
    assert (split.lengths.dtype, split.shard_starts.dtype) == (np.int32, np.int64)
    assert split.parts == [[(0, 15)], [], [(15, 16), (16, 40)]]
    assert open_store(store).split("validation") is None


@pytest.mark.parametrize("order", ["in order", "shuffled", "one", "repeated"])
def test_gather_lays_pieces_end_to_end(store, pieces, order):
    ids = {
        "in order": np.arange(40),
        "shuffled": np.random.default_rng(1).permutation(40),
        "one": np.array([15]),
        "repeated": np.array([39, 0, 39]),
    }[order]
    tokens, trained = open_store(store).split("train").gather(ids)
    assert np.array_equal(tokens, np.concatenate([pieces[i].tokens for i in ids]))
    assert np.array_equal(trained, np.concatenate([pieces[i].trained for i in ids]))
    assert (tokens.dtype, trained.dtype) == (np.int32, np.uint8)


def test_gathering_nothing_gives_nothing(store):
    tokens, trained = open_store(store).split("train").gather(np.empty(0, dtype=np.int64))
    assert (len(tokens), len(trained)) == (0, 0)
    assert (tokens.dtype, trained.dtype) == (np.int32, np.uint8)


def test_a_split_is_pickled_by_its_path(store):
    split = open_store(store).split("train")
    split.gather(np.arange(40))
    pickled = pickle.dumps(split)
    assert len(pickled) < 1000
    assert np.array_equal(
        pickle.loads(pickled).gather(np.array([3]))[0], split.gather(np.array([3]))[0]
    )


DAMAGES = {"flipped": "was altered since", "shorter": "has ", "missing": "is missing"}


@pytest.mark.parametrize("name", ["shard-00002.arrow", "lengths.npy"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told_with_the_name_of_the_file(store, name, damage):
    assert open_store(store).damage() == []
    assert open_store(store).num_files == 6
    path = store / "train" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "flipped":
        path.write_bytes(content)
    elif damage == "shorter":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
    [told] = open_store(store).damage()
    assert f"{name} {DAMAGES[damage]}" in told
    assert f"Delete {store} and prepare the data again." in told


def test_an_altered_shard_is_noticed_when_it_is_read_first(store):
    path = store / "train" / "shard-00002.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    split = open_store(store).split("train")
    split.gather(np.array([0, 20]))
    with pytest.raises(DataError, match=r"shard-00002\.arrow was altered since"):
        split.gather(np.array([15]))


def test_a_shard_that_is_no_shard_is_named_when_it_is_read(store):
    (store / "train" / "shard-00000.arrow").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"shard-00000\.arrow has 7 bytes instead of"):
        open_store(store).split("train").gather(np.array([0]))


def test_an_unfinished_foreign_or_broken_store_is_refused(store):
    write_manifest(store, {"version": 99})
    with pytest.raises(DataError, match="store version 99"):
        open_store(store)
    (store / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        open_store(store)
    (store / "manifest.json").unlink()
    with pytest.raises(DataError, match="no finished store"):
        open_store(store)


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "lengths.npy"
    path.write_bytes(b"before")
    with pytest.raises(RuntimeError):
        fail_halfway(path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def fail_halfway(path):
    with replacing(path) as file:
        file.write(b"half")
        raise RuntimeError
