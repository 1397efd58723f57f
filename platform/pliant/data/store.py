"""The prepared store: pieces in Arrow shards, their lengths and targets, and a manifest.

    <key>/manifest.json               written last: a store without it is unfinished
    <key>/tokenizer/
    <key>/train/shard-00000.arrow     one record batch: tokens, trained
    <key>/train/lengths.npy           int32, tokens of each piece over all shards in order
    <key>/train/targets.npy           int32, target tokens of each piece
    <key>/train/samples.npy           int32, tokens of each sample before anything was cut

A split without pieces has no directory entry in the manifest, and a chunk that gave a split nothing
has no shard there.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pliant.data.sources import sha256_of
from pliant.data.tokens import Piece
from pliant.errors import DataError
from pliant.files import replacing

STORE_VERSION = 2
SPLITS = ("train", "validation", "test")
MANIFEST = "manifest.json"
LENGTHS = "lengths.npy"
TARGETS = "targets.npy"
SAMPLES = "samples.npy"

Manifest = dict[str, Any]


class Split:
    """The pieces of one split, read from memory-mapped files; pickled by its path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lengths: NDArray[np.int32] = np.load(path / LENGTHS, mmap_mode="r")
        self.targets: NDArray[np.int32] = np.load(path / TARGETS, mmap_mode="r")
        self.num_pieces = len(self.lengths)
        self.samples: NDArray[np.int32] = np.load(path / SAMPLES, mmap_mode="r")
        """Tokens of each sample, before anything was cut."""
        shards = read_manifest(path.parent)["splits"][path.name]["shards"]
        self.shard_starts: NDArray[np.int64] = np.cumsum(
            [0] + [shard["pieces"] for shard in shards], dtype=np.int64
        )
        """[num_shards + 1]: the first piece of each shard, and the number of all pieces."""
        self.parts = _parts(self.shard_starts, [shard["origin"] for shard in shards])
        """For each source that `data.train` names, in its order, the runs of pieces that came of
        it. One that gave this split nothing has none."""
        self._shards = shards
        self._open: dict[int, _Shard] = {}

    def gather(self, piece_ids: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Tokens and target flags of the pieces laid end to end, in the order of `piece_ids`.

        Costs a copy of the tokens and little more: a slice per piece, no loop over tokens. A shard
        is compared with its digest when it is read first; raises `DataError` where it is damaged.
        """
        if not len(piece_ids):
            return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.uint8)
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
            _verify_file(self.path / entry["file"], entry)
            self._open[number] = _Shard.open(self.path / entry["file"])
        return self._open[number]

    def __reduce__(self) -> tuple[Any, ...]:
        return Split, (self.path,)


def _parts(shard_starts: NDArray[np.int64], origins: list[int]) -> list[list[tuple[int, int]]]:
    parts: list[list[tuple[int, int]]] = [[] for _ in range(max(origins, default=-1) + 1)]
    for origin, run in zip(origins, pairwise(shard_starts.tolist()), strict=True):
        parts[origin].append(run)
    return parts


@dataclass(frozen=True)
class Prepared:
    """A finished store."""

    path: Path
    key: str
    manifest: Manifest

    @property
    def tokenizer_path(self) -> Path:
        """For `open_tokenizer`, or transformers' `AutoTokenizer`."""
        return self.path / "tokenizer"

    def split(self, name: str) -> Split | None:
        """One of "train", "validation" and "test"; None where that split holds nothing."""
        return Split(self.path / name) if name in self.manifest["splits"] else None

    @property
    def num_files(self) -> int:
        """Of those that the manifest knows the digests of."""
        return len(self._entries)

    def damage(self) -> list[str]:
        """What differs from the manifest, a sentence each: every file is read."""
        found = []
        for path, entry in self._entries:
            try:
                _verify_file(path, entry)
            except DataError as error:
                found.append(error.message)
        return found

    @property
    def _entries(self) -> list[tuple[Path, dict[str, Any]]]:
        return [
            (self.path / name / entry["file"], entry)
            for name, split in self.manifest["splits"].items()
            for entry in [*split["shards"], *split["index"]]
        ]


def open_store(path: Path) -> Prepared:
    """The finished store at `path`. Raises `DataError` where there is none."""
    manifest = read_manifest(path)
    return Prepared(path, manifest["key"], manifest)


def is_finished(path: Path) -> bool:
    return (path / MANIFEST).exists()


def read_manifest(path: Path) -> Manifest:
    """Raises `DataError` where `path` holds no finished store of this version."""
    try:
        manifest: Manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{path} holds no finished store of prepared data. Prepare the data again.", path=path
        ) from None
    except ValueError:
        raise DataError(
            f"{path / MANIFEST} is damaged: it is not JSON. Delete {path} and prepare the data "
            "again.",
            path=path,
        ) from None
    if manifest.get("version") != STORE_VERSION:
        raise DataError(
            f"{path} was written in store version {manifest.get('version')}, and this pliant reads "
            f"version {STORE_VERSION}. Prepare the data again.",
            path=path,
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
            raise _damaged(path, str(error)) from None
        tokens, trained = batch.column("tokens"), batch.column("trained")
        return _Shard(
            tokens.offsets.to_numpy(), tokens.values.to_numpy(), trained.values.to_numpy()
        )


def _lists(offsets: NDArray[np.int64], values: NDArray[Any]) -> pa.LargeListArray:
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))


def _verify_file(path: Path, entry: dict[str, Any]) -> None:
    if not path.exists():
        raise _damaged(path, "it is missing")
    size = path.stat().st_size
    if size != entry["size_bytes"]:
        raise _damaged(path, f"it has {size} bytes, and {entry['size_bytes']} were written")
    if sha256_of(path) != entry["sha256"]:
        raise _damaged(path, "its SHA-256 is not that of what was written")


def _damaged(path: Path, problem: str) -> DataError:
    store = path.parent.parent
    return DataError(
        f"{path} is damaged: {problem}. Delete {store} and prepare the data again.", path=path
    )
