"""What exact training costs: the same steps with `training.exact` and without.

Two ranks hold two engines on the demo's model, which take turns on the same batches: A B, A B, ...
Each pair gives one ratio; the median and the spread over the pairs are what counts, since the
machine's speed drifts. Batches are rows of random tokens in segments of random lengths.
"""

import os
import random
import socket
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import figures
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pliant.accel import attention
from pliant.batch import IGNORED, MicroBatch, PackedMetadata, StepBatch
from pliant.spec import JobSpec, load_spec
from pliant.spec.resolve import Facts, resolve
from pliant.topology import BatchShape, Place
from pliant.training.engine import ZeroEngine, build_engine
from pliant.training.model import build_model, count_beforehand
from pliant.training.worker import quiet_libraries

ROOT = Path(__file__).parent.parent
RANKS = 2
VOCAB = 4096
PAIRS = 9
STEPS = 3


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    mp.spawn(rank_main, (port,), nprocs=RANKS)


def rank_main(rank: int, port: int) -> None:
    """One rank; the first writes the figures."""
    torch.set_num_threads(1)
    quiet_libraries()
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    place = Place(rank, RANKS)
    with attention.registered():
        exact, plain = (build(spec_of(is_exact), place) for is_exact in (True, False))
        pairs = [Turns(exact, plain, place, number).pair() for number in range(PAIRS + 1)][1:]
    if rank == 0:
        write(pairs)
    dist.destroy_process_group()


def spec_of(is_exact: bool) -> JobSpec:
    settings = [f"training.exact={str(is_exact).lower()}"]
    spec = load_spec(ROOT / "jobs" / "specs" / "demo.yaml", environ={}, settings=settings)
    spec = resolve(spec, Facts(vocab_size=VOCAB))
    num_parameters = count_beforehand(spec, VOCAB)
    return resolve(spec, Facts(num_gpus=0, num_parameters=num_parameters))


def build(spec: JobSpec, place: Place) -> ZeroEngine:
    return build_engine(build_model(spec, VOCAB), spec, place, torch.device("cpu"))


@dataclass(frozen=True)
class Pair:
    """Seconds for the same steps."""

    exact_s: float
    plain_s: float


class Turns:
    """One pair of rounds, over steps of its own."""

    def __init__(self, exact: ZeroEngine, plain: ZeroEngine, place: Place, number: int) -> None:
        self._exact, self._plain = exact, plain
        spec = spec_of(True)
        shape = BatchShape(
            spec.training.global_batch_size, spec.training.micro_batch_size, spec.data.seq_len
        )
        steps = range(number * STEPS, (number + 1) * STEPS)
        self._batches = {step: batch_of(step, shape, place) for step in steps}

    def pair(self) -> Pair:
        return Pair(self._round(self._exact), self._round(self._plain))

    def _round(self, engine: ZeroEngine) -> float:
        dist.barrier()
        began = time.perf_counter()
        for step, batch in self._batches.items():
            engine.step(batch, step, vote=0)
        return time.perf_counter() - began


def batch_of(step: int, shape: BatchShape, place: Place) -> StepBatch:
    """A rank's share of a step; every token but the first of each segment is a target."""
    rows = [row_of(step, index, shape) for index in range(shape.num_micro_batches)]
    return StepBatch(
        micro_batches=tuple(rows[index] for index in place.micro_batches(len(rows))),
        num_targets=sum(int((row.labels_BT != IGNORED).sum()) for row in rows),
        num_packs=shape.global_batch_size,
        num_samples=sum(len(row.piece_ids) for row in rows),
        num_tokens=shape.tokens_per_step,
        epoch=0,
        end_pack=(step + 1) * shape.global_batch_size,
    )


def row_of(step: int, index: int, shape: BatchShape) -> MicroBatch:
    draw = random.Random(f"{step} {index}")
    ends = sorted(draw.sample(range(1, shape.seq_len), 5))
    bounds = [0, *ends, shape.seq_len]
    lengths = tuple(end - begin for begin, end in pairwise(bounds))
    packed = PackedMetadata(segments=(lengths,) * shape.micro_batch_size)
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    size = (shape.micro_batch_size, shape.seq_len)
    tokens_BT = torch.randint(0, VOCAB, size, generator=generator)
    labels_BT = tokens_BT.clone()
    labels_BT[:, bounds[:-1]] = IGNORED
    ids = np.arange(len(lengths) * shape.micro_batch_size)
    return MicroBatch(index, tokens_BT, labels_BT, packed.positions_BT(), packed, ids)


def write(pairs: list[Pair]) -> None:
    ratio = [pair.exact_s / pair.plain_s for pair in pairs]
    step_ms = 1000 * statistics.median(pair.plain_s for pair in pairs) / STEPS
    figures.write(
        ROOT / "runs" / "bench" / "exact.json",
        compared_with=(
            f"the same steps without training.exact; {PAIRS} pairs of {STEPS} steps, {RANKS} "
            f"ranks on CPUs, {step_ms:.0f} ms a step"
        ),
        step_time_over_plain=figures.Figure(ratio, goal=1.25, unit="ratio"),
    )


if __name__ == "__main__":
    main()
