"""Small splits of prepared data: one that lives in memory, and a real one on disk."""

import itertools
from pathlib import Path

import numpy as np

from pliant.data.plan import DataPlan
from pliant.data.store import (
    STORE_VERSION,
    Split,
    SplitPlace,
    piece_lengths,
    piece_targets,
    write_index,
    write_manifest,
    write_shard,
)
from pliant.data.tokens import Piece
from pliant.storage.local import LocalStorage


def some_pieces(lengths, seed=0):
    """A piece of random tokens for each length; its first token is no target, as in real data."""
    rng = np.random.default_rng(seed)
    pieces = []
    for length in lengths:
        trained = rng.integers(0, 2, length).astype(np.uint8)
        trained[0] = 0
        pieces.append(Piece(rng.integers(1, 50_000, length).astype(np.int32), trained))
    return pieces


class InMemorySplit:
    """All that a plan and an assembler ask of a split; a plan keeps its index in `workspace`."""

    def __init__(self, workspace, pieces, shard_sizes=None):
        self.workspace = workspace
        self.pieces = pieces
        self.lengths = piece_lengths(pieces)
        self.targets = piece_targets(pieces)
        self.shard_starts = starts_of(shard_sizes or [len(pieces)])

    def gather(self, piece_ids):
        chosen = [self.pieces[i] for i in piece_ids]
        none = [np.empty(0, dtype=np.int32)]
        return (
            np.concatenate([piece.tokens for piece in chosen] or none),
            np.concatenate([piece.trained for piece in chosen] or none),
        )


class LengthsOnly:
    """A split without tokens, for plans of many pieces."""

    def __init__(self, workspace, lengths, shard_sizes=None):
        self.workspace = workspace
        self.lengths = np.asarray(lengths, dtype=np.int32)
        self.targets = self.lengths - 1
        self.shard_starts = starts_of(shard_sizes or [len(lengths)])

    @property
    def parts(self):
        """Every shard is a part of the mixture."""
        return [[run] for run in itertools.pairwise(self.shard_starts.tolist())]


def starts_of(shard_sizes):
    return np.cumsum([0, *shard_sizes], dtype=np.int64)


def write_split(path: Path, pieces, shard_pieces=10) -> Split:
    """The training split of a real store at `path`, in shards of `shard_pieces`."""
    train = path / "train"
    train.mkdir(parents=True)
    shards = [
        write_shard(train / f"shard-{number:05d}.arrow", pieces[begin : begin + shard_pieces])
        for number, begin in enumerate(range(0, len(pieces), shard_pieces))
    ]
    lengths = piece_lengths(pieces)
    splits = {"train": write_index(train, shards, lengths, piece_targets(pieces), lengths)}
    write_manifest(
        path, {"version": STORE_VERSION, "key": path.name, "tokenizer": [], "splits": splits}
    )
    return SplitPlace(LocalStorage(path), "train").open()


def index_epochs(split, settings, epochs, barrier, results):
    """Opens each epoch at the same moment as the other parties of the barrier do."""
    plan = DataPlan(split, settings)
    steps = []
    for epoch in range(epochs):
        barrier.wait(timeout=60)
        steps.append(plan.steps_of(epoch))
    results.put(steps)
