"""A small training state, cut into the fragments of several ranks, and checkpoints of it."""

import hashlib
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pliant.checkpoints.fragments import Fragment
from pliant.checkpoints.manifest import Chunk, LedgerFile, Manifest, RankFile
from pliant.checkpoints.writer import directory_name, store_rank_file
from pliant.storage.local import Storage
from pliant.storage.opening import open_storage

NUMELS = {"fp32/weight": 60, "exp_avg/weight": 60, "exp_avg_sq/weight": 60, "fp32/bias": 7}

Cut = list[list[Fragment]]
"""For each rank its fragments."""


def whole_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(numel, generator=generator) for key, numel in NUMELS.items()}


def cut(
    tensors: dict[str, torch.Tensor], num_ranks: int, inner: dict[str, list[int]] | None = None
) -> Cut:
    """Fragments that alias the tensors: equal runs, or cut at the places `inner` names."""
    ranks: Cut = [[] for _ in range(num_ranks)]
    for key, tensor in tensors.items():
        kind, name = key.split("/")
        equal = [len(tensor) * rank // num_ranks for rank in range(1, num_ranks)]
        edges = [0, *(inner[key] if inner else equal), len(tensor)]
        for number, (start, end) in enumerate(pairwise(edges)):
            part = Fragment(kind, name, start, len(tensor), tensor[start:end])  # type: ignore[arg-type]
            ranks[number % num_ranks].append(part)
    return ranks


def emptied(fragments: list[Fragment]) -> list[Fragment]:
    """The same places, over tensors that hold nothing yet."""
    return [replace(f, tensor=torch.full_like(f.tensor, torch.nan)) for f in fragments]


def a_manifest(step: int = 1, attempt: int = 1, **changes: Any) -> Manifest:
    facts: dict[str, Any] = {
        "step": step,
        "attempt": attempt,
        "world_size": 2,
        "zero_stage": 1,
        "epoch": 0,
        "pack": 5 * step,
        "tensors": NUMELS,
        "frozen_digest": "0" * 16,
        "identity": {"data": "key", "data.packing": True, "training.seed": 3},
        "optimizer": {"steps": step, "loss_scale": None, "groups": [{"betas": [0.9, 0.95]}]},
        "progress": {"step": step, "tokens": 10**12},
        "files": (),
        "ledger": (),
    }
    return Manifest(**(facts | changes))


def commit(
    root: Path | Storage,
    ledger_root: Path | Storage,
    step: int,
    attempt: int = 1,
    ranks: Cut | None = None,
    **changes: Any,
) -> Path:
    """Writes and commits the checkpoint of a step, with a ledger file; returns its directory, if it
    is one of this machine."""
    ranks = ranks or cut(whole_tensors(step), 2)
    storage, ledger = open_storage(root), open_storage(ledger_root)
    name = directory_name(step, attempt, len(ranks))
    files = tuple(put_fragments(storage, name, rank, part) for rank, part in enumerate(ranks))
    content = b"the pieces of step %d" % step
    ledger.write(f"{name}.parquet", content)
    digest = hashlib.sha256(content).hexdigest()
    entry = LedgerFile(f"{name}.parquet", len(content), digest, step - 1, step - 1)
    tensors = {fragment.key: fragment.numel for rank in ranks for fragment in rank}
    facts = {"tensors": tensors, "files": files, "ledger": (entry,)} | changes
    a_manifest(step, attempt, **facts).write(storage, name)
    return Path(storage.place(name))


def put_fragments(
    storage: Storage, directory: str, rank: int, fragments: list[Fragment]
) -> RankFile:
    """Stores what a rank owns as its file of a checkpoint."""
    owned = [f for f in fragments if f.is_owner and f.tensor.numel()]
    chunks = [Chunk(f.key, f.start, f.tensor.numel()) for f in owned]
    tensors = {c.entry: f.tensor.contiguous() for c, f in zip(chunks, owned, strict=True)}
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / "rank.safetensors"
        save_file(tensors or {"nothing": torch.empty(0)}, local)
        return store_rank_file(storage, directory, rank, local, chunks)
