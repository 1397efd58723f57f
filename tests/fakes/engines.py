"""Packed batches made by hand, and engines that train on them; run by `run_ranks`.

Shapes: T tokens a row, V tokens in the vocabulary; every micro-batch is one row.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pliant.accel import attention
from pliant.batch import IGNORED, MicroBatch, PackedMetadata, StepBatch
from pliant.checkpoints.fragments import Fragment
from pliant.spec import JobSpec
from pliant.topology import Place
from pliant.training import deepspeed_adapter as adapter
from pliant.training.engine import ZeroEngine, build_engine
from pliant.training.model import build_model
from pliant.training.progress import Progress

T, V, MICRO_BATCHES = 16, 64, 5
WITHOUT_TARGETS = 2
"""This micro-batch of every step has nothing to predict."""


def global_batch(step: int, without_targets: bool = False) -> list[MicroBatch]:
    """The micro-batches of a step: uneven segments, uneven numbers of targets."""
    draw = random.Random(step)
    return [
        _row(draw, index, empty=without_targets or index == WITHOUT_TARGETS)
        for index in range(MICRO_BATCHES)
    ]


def _row(draw: random.Random, index: int, empty: bool) -> MicroBatch:
    lengths = _lengths(draw)
    packed = PackedMetadata(segments=(tuple(lengths),))
    tokens_BT = torch.tensor([[draw.randrange(V) for _ in range(T)]])
    labels_BT = tokens_BT.clone()
    starts = np.cumsum([0, *lengths[:-1]])
    share = draw.random()
    for place in range(T):
        if empty or place in starts or draw.random() > share:
            labels_BT[0, place] = IGNORED
    ids = np.array([draw.randrange(1000) for _ in lengths])
    return MicroBatch(index, tokens_BT, labels_BT, packed.positions_BT(), packed, ids)


def _lengths(draw: random.Random) -> list[int]:
    lengths: list[int] = []
    while sum(lengths) < T:
        lengths.append(draw.randint(1, min(7, T - sum(lengths))))
    return lengths


def num_targets(micros: list[MicroBatch]) -> int:
    return sum(int((micro.labels_BT != IGNORED).sum()) for micro in micros)


def share(micros: list[MicroBatch], place: Place, step: int = 0) -> StepBatch:
    """What a rank runs of these micro-batches."""
    mine = [micros[index] for index in place.micro_batches(len(micros))]
    while len(mine) < place.num_rounds(len(micros)):
        mine.append(MicroBatch.dummy(len(micros), 1, T))
    return StepBatch(
        micro_batches=tuple(mine),
        num_targets=num_targets(micros),
        num_packs=len(micros),
        num_samples=sum(len(micro.packed.lengths) for micro in micros),
        num_tokens=len(micros) * T,
        epoch=0,
        end_pack=(step + 1) * len(micros),
    )


def here() -> Place:
    return Place(dist.get_rank(), dist.get_world_size())


@contextmanager
def engine_of(spec: JobSpec, change: Callable[[Any], None] | None = None) -> Iterator[ZeroEngine]:
    """The engine of a spec; `change` alters the model before DeepSpeed gets it."""
    with attention.registered():
        model = build_model(spec, V)
        if change is not None:
            change(model)
        engine = build_engine(model, spec, here(), torch.device("cpu"))
        yield engine
        engine.deepspeed.destroy()


def train_steps(engine: ZeroEngine, progress: Progress, until: int) -> tuple[Progress, list[float]]:
    """Steps up to number `until`, and their losses."""
    losses = []
    while progress.step < until:
        batch = share(global_batch(progress.step), here(), progress.step)
        losses.append(engine.step(batch, progress.step, vote=False).loss)
        progress = progress.after(batch)
    return progress, losses


def whole_state(engine: ZeroEngine) -> dict[str, torch.Tensor]:
    """Master weights and moments, put together from all ranks' fragments."""
    return assemble(adapter.fragment_source(engine.deepspeed).fragments())


def assemble(fragments: list[Fragment]) -> dict[str, torch.Tensor]:
    """Whole flat tensors; every element must come from exactly one rank."""
    parts = [(f.key, f.start, f.numel, f.tensor.clone()) for f in fragments if f.is_owner]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, parts)
    tensors: dict[str, torch.Tensor] = {}
    count: dict[str, torch.Tensor] = {}
    for key, start, numel, tensor in (part for rank in ranks for part in rank):
        tensors.setdefault(key, torch.zeros(numel))
        count.setdefault(key, torch.zeros(numel))
        tensors[key][start : start + len(tensor)] = tensor
        count[key][start : start + len(tensor)] += 1
    assert all((seen == 1).all() for seen in count.values()), "fragments overlap or leave gaps"
    return tensors
