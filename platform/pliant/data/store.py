"""The prepared store: pieces in Arrow shards, their lengths and targets, and a manifest.

    <key>/manifest.json               written last: a store without it is unfinished
    <key>/tokenizer/              what `AutoTokenizer` reads
    <key>/train/shard-00000.arrow     one record batch: tokens, trained
    <key>/train/lengths.npy           int32, tokens of each piece over all shards in order
    <key>/train/targets.npy           int32, target tokens of each piece
    <key>/train/samples.npy           int32, tokens of each sample before anything was cut

A split without pieces has no directory entry in the manifest, and a chunk that gave a split nothing
has no shard there.
"""

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pliant.data.sources import sha256_of
from pliant.data.tokens import Piece
from pliant.errors import DataError, FilesDamaged, UserError
from pliant.files import replacing, write_atomically
from pliant.spec.data import DataSpec
from pliant.storage.local import LocalStorage, Storage
from pliant.storage.opening import open_storage
from pliant.storage.remote import Cache, RemoteStorage

STORE_VERSION = 3
SPLITS = ("train", "validation", "test")
MANIFEST = "manifest.json"
LENGTHS = "lengths.npy"
TARGETS = "targets.npy"
SAMPLES = "samples.npy"
TOKENIZER = "tokenizer"
KEPT_SHARDS = 32
"""Shards that a process keeps open between two readings."""

Manifest = dict[str, Any]


def store_root(data: DataSpec, runs_dir: Path) -> Path:
    """The directory in which stores are made; they are kept there too, unless `data.store` is a
    URI."""
    if data.store is None or "://" in data.store:
        return runs_dir / "stores"
    return Path(data.store).expanduser()


def stores_of(data: DataSpec, root: Path) -> Storage:
    """Where stores are kept, each below its key; `root` as in `store_root`."""
    if data.store is None or "://" not in data.store:
        return LocalStorage(root)
    stores = open_storage(data.store)
    if isinstance(stores, RemoteStorage):
        return replace(stores, cache=Cache(limit_bytes=int(data.store_cache_gib * 2**30)))
    return stores


@dataclass(frozen=True)
class SplitPlace:
    """Where a split lies; cheap to pickle."""

    store: Storage
    name: str

    def open(self) -> "Split":
        return Split(self)


class Split:
    """The pieces of one split, read from memory-mapped files; pickled by its place."""

    def __init__(self, place: SplitPlace) -> None:
        self.place = place
        known = read_manifest(place.store)["splits"][place.name]
        index = {entry["file"]: entry for entry in known["index"]}
        self.lengths: NDArray[np.int32] = self._array(index[LENGTHS])
        self.targets: NDArray[np.int32] = self._array(index[TARGETS])
        self.num_pieces = len(self.lengths)
        self.samples: NDArray[np.int32] = self._array(index[SAMPLES])
        """Tokens of each sample, before anything was cut."""
        self._shards = known["shards"]
        self.shard_starts: NDArray[np.int64] = np.cumsum(
            [0] + [shard["pieces"] for shard in self._shards], dtype=np.int64
        )
        """[num_shards + 1]: the first piece of each shard, and the number of all pieces."""
        self.parts = _parts(self.shard_starts, [shard["origin"] for shard in self._shards])
        """For each source that `data.train` names, in its order, the runs of pieces that came of
        it. One that gave this split nothing has none."""
        self._open: OrderedDict[int, _Shard] = OrderedDict()
        self._verified: set[int] = set()

    @property
    def workspace(self) -> Path:
        """A directory of this machine for what is worked out from the split."""
        return self.place.store.workspace(self.place.name)

    def gather(self, piece_ids: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Tokens and target flags of the pieces laid end to end, in the order of `piece_ids`.

        Costs a copy of the tokens and little more: a slice per piece, no loop over tokens. A shard
        is compared with its digest when it is read first; raises `DataError` where it is damaged.
        """
        if not len(piece_ids):
            return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.uint8)
        while len(self._open) > KEPT_SHARDS:
            self._open.popitem(last=False)
        shards = np.searchsorted(self.shard_starts, piece_ids, side="right") - 1
        begins = np.empty(len(piece_ids), dtype=np.int64)
        for number in np.unique(shards).tolist():
            here = shards == number
            rows = piece_ids[here] - self.shard_starts[number]
            begins[here] = self._shard(number).offsets[rows]
        ends = begins + self.lengths[piece_ids]
        places = list(zip(shards.tolist(), begins.tolist(), ends.tolist(), strict=True))
        tokens = [self._open[shard].tokens[begin:end] for shard, begin, end in places]
        trained = [self._open[shard].trained[begin:end] for shard, begin, end in places]
        return np.concatenate(tokens), np.concatenate(trained)

    def _shard(self, number: int) -> "_Shard":
        if number not in self._open:
            entry = self._shards[number]
            path = self._fetched(entry)
            if number not in self._verified:
                with _damage_told(self.place.store):
                    LocalStorage(path.parent).check(path.name, entry["size_bytes"], entry["sha256"])
                self._verified.add(number)
            self._open[number] = _Shard.open(path)
        self._open.move_to_end(number)
        return self._open[number]

    def _array(self, entry: dict[str, Any]) -> NDArray[np.int32]:
        with _damage_told(self.place.store):
            array: NDArray[np.int32] = np.load(self._fetched(entry), mmap_mode="r")
            return array

    def _fetched(self, entry: dict[str, Any]) -> Path:
        """A path on this machine to a file of the split."""
        with _damage_told(self.place.store):
            return self.place.store.fetch(
                f"{self.place.name}/{entry['file']}", entry["size_bytes"], entry["sha256"]
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return Split, (self.place,)


def _parts(shard_starts: NDArray[np.int64], origins: list[int]) -> list[list[tuple[int, int]]]:
    parts: list[list[tuple[int, int]]] = [[] for _ in range(max(origins, default=-1) + 1)]
    for origin, run in zip(origins, pairwise(shard_starts.tolist()), strict=True):
        parts[origin].append(run)
    return parts


@dataclass(frozen=True)
class Prepared:
    """A finished store."""

    store: Storage
    key: str
    manifest: Manifest

    def tokenizer_path(self) -> Path:
        """A directory of this machine, for `open_tokenizer` or transformers' `AutoTokenizer`."""
        directory = self.store.workspace(TOKENIZER)
        for entry in self.manifest[TOKENIZER]:
            file = directory / entry["file"]
            if not file.exists():
                with _damage_told(self.store):
                    name = f"{TOKENIZER}/{entry['file']}"
                    found = self.store.fetch(name, entry["size_bytes"], entry["sha256"])
                    write_atomically(file, found.read_bytes())
        return directory

    def split(self, name: str) -> Split | None:
        """One of "train", "validation" and "test"; None where that split holds nothing."""
        return SplitPlace(self.store, name).open() if name in self.manifest["splits"] else None

    @property
    def num_files(self) -> int:
        """Of those that the manifest knows the digests of."""
        return len(self.files())

    def damage(self) -> list[str]:
        """What differs from the manifest, a sentence each: every file is read."""
        found = []
        for name, entry in self.files():
            try:
                with _damage_told(self.store):
                    self.store.check(name, entry["size_bytes"], entry["sha256"])
            except DataError as error:
                found.append(error.message)
        return found

    def files(self) -> list[tuple[str, dict[str, Any]]]:
        """Each file's name in the store, and what was written."""
        files = {TOKENIZER: self.manifest[TOKENIZER]} | {
            name: [*split["shards"], *split["index"]]
            for name, split in self.manifest["splits"].items()
        }
        return [
            (f"{folder}/{entry['file']}", entry)
            for folder, entries in files.items()
            for entry in entries
        ]


def open_store(place: Storage | Path) -> Prepared:
    """The finished store at `place`. Raises `DataError` where there is none."""
    store = open_storage(place)
    manifest = read_manifest(store)
    return Prepared(store, manifest["key"], manifest)


def find_store(store: Storage) -> Prepared | None:
    """The store, where it is finished. Raises `UserError` where it cannot be reached."""
    with outage_told(store):
        return open_store(store) if is_finished(store) else None


def is_finished(store: Storage) -> bool:
    return store.info(MANIFEST) is not None


def read_manifest(store: Storage) -> Manifest:
    """Raises `DataError` where there is no finished store of this version."""
    place = store.place()
    try:
        manifest: Manifest = json.loads(store.read(MANIFEST))
    except FileNotFoundError:
        raise DataError(
            f"{place} holds no finished store of prepared data. Prepare the data again.", path=place
        ) from None
    except ValueError:
        raise DataError(
            f"{store.place(MANIFEST)} is damaged: it is not JSON. Delete {place} and prepare the "
            "data again.",
            path=place,
        ) from None
    if manifest.get("version") != STORE_VERSION:
        raise DataError(
            f"{place} was written in store version {manifest.get('version')}, and this pliant "
            f"reads version {STORE_VERSION}. Prepare the data again.",
            path=place,
        )
    return manifest


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Commits the store: once this returns, it is finished."""
    write_json(path / MANIFEST, manifest)


def write_shard(path: Path, pieces: Sequence[Piece], origin: int = 0) -> dict[str, Any]:
    """Write at least one piece as a shard; what the manifest says of it. `origin` is the place of
    its source in `data.train`."""
    lengths = piece_lengths(pieces)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    columns = {
        "tokens": _lists(offsets, np.concatenate([piece.tokens for piece in pieces])),
        "trained": _lists(offsets, np.concatenate([piece.trained for piece in pieces])),
    }
    batch = pa.record_batch(columns)
    with replacing(path) as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    return {"file": path.name, "pieces": len(pieces), "origin": origin, **fingerprint(path)}


def write_index(
    split: Path,
    shards: Sequence[dict[str, Any]],
    lengths: NDArray[np.int32],
    targets: NDArray[np.int32],
    samples: NDArray[np.int32],
) -> dict[str, Any]:
    """Write what is known of a split's pieces and samples over all its shards; its part of the
    manifest."""
    arrays = {LENGTHS: lengths, TARGETS: targets, SAMPLES: samples}
    for name, array in arrays.items():
        write_array(split / name, array)
    return {
        "pieces": len(lengths),
        "tokens": int(lengths.sum(dtype=np.int64)),
        "targets": int(targets.sum(dtype=np.int64)),
        "shards": list(shards),
        "index": [{"file": name, **fingerprint(split / name)} for name in arrays],
    }


def piece_lengths(pieces: Sequence[Piece]) -> NDArray[np.int32]:
    return np.array([len(piece.tokens) for piece in pieces], dtype=np.int32)


def piece_targets(pieces: Sequence[Piece]) -> NDArray[np.int32]:
    return np.array([piece.trained.sum() for piece in pieces], dtype=np.int32)


def fingerprint(path: Path) -> dict[str, Any]:
    """What the manifest keeps of a file, so that damage is noticed."""
    return {"size_bytes": path.stat().st_size, "sha256": sha256_of(path)}


def write_array(path: Path, array: NDArray[Any]) -> None:
    with replacing(path) as file:
        np.save(file, array)


def write_json(path: Path, value: Any) -> None:
    with replacing(path) as file:
        file.write((json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


@dataclass(frozen=True)
class _Shard:
    """Views of a memory-mapped shard; nothing is copied."""

    offsets: NDArray[np.int64]
    tokens: NDArray[np.int32]
    trained: NDArray[np.uint8]

    @staticmethod
    def open(path: Path) -> "_Shard":
        try:
            batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read: {error}.", path=path) from None
        tokens, trained = batch.column("tokens"), batch.column("trained")
        return _Shard(
            tokens.offsets.to_numpy(), tokens.values.to_numpy(), trained.values.to_numpy()
        )


def _lists(offsets: NDArray[np.int64], values: NDArray[Any]) -> pa.LargeListArray:
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))


@contextmanager
def outage_told(store: Storage) -> Iterator[None]:
    """What fails is the user's to mend, unless this machine's own disk fails."""
    try:
        yield
    except OSError as error:
        if isinstance(store, LocalStorage):
            raise
        raise UserError(
            f"{store.place()} cannot be reached: {error}. Check data.store and the credentials in "
            "the environment; what was prepared so far is kept.",
            place=store.place(),
        ) from None


@contextmanager
def _damage_told(store: Storage) -> Iterator[None]:
    """With what to do about it."""
    try:
        yield
    except (FilesDamaged, FileNotFoundError) as error:
        raise DataError(
            f"{_sentence(error)} Delete {store.place()} and prepare the data again.",
            place=store.place(),
        ) from None


def _sentence(error: FilesDamaged | FileNotFoundError) -> str:
    return error.message if isinstance(error, FilesDamaged) else f"{error.filename} is missing."
