"""What keeping the state costs, beside DeepSpeed's own checkpoints of the same engine.

Two ranks train a llama of 100M parameters in bf16 at stage 1, and take turns: pliant's checkpoint
in the background, then DeepSpeed's `save_checkpoint`. One rank then loads both, in turns: pliant's
as it is, DeepSpeed's through `ds_to_universal`. Each turn gives one ratio; median and spread count,
since the machine's speed drifts. Snapshots after every step are measured on this model and on the
demo's, in fp32, whose steps are short on a CPU.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any, NamedTuple

import figures
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pliant.accel import attention
from pliant.batch import IGNORED, MicroBatch, PackedMetadata, StepBatch
from pliant.checkpoints import reader, snapshot
from pliant.checkpoints.places import places_of
from pliant.checkpoints.retention import Policy, prune
from pliant.data.ledger import Ledger
from pliant.spec import JobSpec
from pliant.spec.load import build_spec
from pliant.spec.operations import CheckpointSpec
from pliant.spec.resolve import Facts, resolve
from pliant.topology import Place
from pliant.training import deepspeed_adapter as adapter
from pliant.training.commit import Answer, Committer, RankSaved
from pliant.training.contents import Contents
from pliant.training.deepspeed_config import deepspeed_config
from pliant.training.engine import ZeroEngine, build_engine
from pliant.training.model import build_model
from pliant.training.progress import Progress
from pliant.training.state import TrainingState

ROOT = Path(__file__).parent.parent
V = 4096
LLAMA = {"model_type": "llama", "vocab_size": V, "tie_word_embeddings": True}
LARGE = {
    **LLAMA,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 15,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
DEMO = {
    **LLAMA,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


class Shape(NamedTuple):
    config: dict[str, Any]
    precision: str
    seq_len: int
    rows: int
    """In a step."""


SAVED = Shape(LARGE, "bf16", 16, 2)
STEPPED = {"100M": Shape(LARGE, "fp32", 512, 2), "demo": Shape(DEMO, "fp32", 512, 8)}
"""A step of the large model is cut to two rows; a snapshot's share of a whole one is smaller."""
TAG = "step"
KEY = b"checkpoints"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=5)
    repetitions = parser.parse_args().repetitions
    with tempfile.TemporaryDirectory(dir=ROOT / "runs" / "bench") as folder:
        root = Path(folder)
        try:
            saved = on_ranks(2, root, save_in_turns, repetitions)
            loaded = on_ranks(1, root, load_in_turns, max(repetitions // 2, 3))
            shares = {name: on_ranks(2, root, share_of_steps, name) for name in STEPPED}
        finally:
            snapshot.remove(root / "run")
            for name in STEPPED:
                snapshot.remove(root / name)
    write(repetitions, saved, loaded, shares)


def save_in_turns(root: Path, repetitions: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"stall": [], "complete": [], "theirs": [], "ratio": []}
    with run_of(SAVED, root / "run", hot_every=0) as (engine, state, step):
        progress = step()
        for turn in range(repetitions + 1):
            progress = replace(progress, step=progress.step + 1)  # as good as trained, to save it
            dist.barrier()
            began = time.perf_counter()
            stall_s = slowest(state.save(progress))
            state.save(progress, wait=True)
            complete_s = slowest(time.perf_counter() - began)
            dist.barrier()
            began = time.perf_counter()
            engine.deepspeed.save_checkpoint(str(root / "theirs"), tag=TAG)
            theirs_s = slowest(time.perf_counter() - began)
            if turn:  # the first makes slots and imports
                for name, value in zip(
                    found, (stall_s, complete_s, theirs_s, stall_s / theirs_s), strict=True
                ):
                    found[name].append(value)
    newest = root / "run" / "checkpoints" / reader.committed(root / "run" / "checkpoints")[0]
    found["bytes"] = [size_of(newest) / size_of(root / "theirs")]
    return found


def load_in_turns(root: Path, repetitions: int) -> dict[str, list[float]]:
    from deepspeed.checkpoint import ds_to_universal

    found: dict[str, list[float]] = {"ours": [], "theirs": [], "ratio": []}
    universal = {"checkpoint": {"load_universal": True}}
    with run_of(SAVED, root / "run", hot_every=0) as (_, state, _), engine_of(universal) as other:
        for _ in range(repetitions):
            began = time.perf_counter()
            state.restore()
            ours_s = time.perf_counter() - began
            shutil.rmtree(root / "theirs" / "universal", ignore_errors=True)
            began = time.perf_counter()
            arguments = argparse.Namespace(
                input_folder=str(root / "theirs" / TAG),
                output_folder=str(root / "theirs" / "universal"),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
            ds_to_universal.main(arguments)
            other.load_checkpoint(str(root / "theirs"), tag="universal")
            theirs_s = time.perf_counter() - began
            for name, value in zip(found, (ours_s, theirs_s, ours_s / theirs_s), strict=True):
                found[name].append(value)
    return found


def share_of_steps(root: Path, name: str) -> list[float]:
    """Percent of the time that a snapshot after every step takes, for the slowest rank."""
    shares = []
    with run_of(STEPPED[name], root / name, hot_every=1) as (_, state, step):
        for turn in range(8):
            dist.barrier()
            began = time.perf_counter()
            progress = step()
            stepped = time.perf_counter()
            state.snapshot(progress)
            ended = time.perf_counter()
            if turn >= 3:  # by then both slots are there
                shares.append(slowest(100 * (ended - stepped) / (ended - began)))
    return shares


@contextmanager
def run_of(
    shape: Shape, run_dir: Path, hot_every: int
) -> Iterator[tuple[ZeroEngine, TrainingState, Callable[[], Progress]]]:
    """An engine that has done a step, its state, and a function that does another."""
    spec, place = spec_of(shape), Place(dist.get_rank(), dist.get_world_size())
    engine = build_engine(build_model(spec, V), spec, place, torch.device("cpu"))
    contents = Contents(engine, place, {}, "")
    settings = CheckpointSpec(hot_every=hot_every)
    state = TrainingState(contents, place, run_dir, Ledger(), settings, reach_committer(run_dir))
    progress = state.restore()
    generator = torch.Generator().manual_seed(place.rank)

    def step() -> Progress:
        nonlocal progress
        batch = random_batch(generator, place, shape.seq_len, shape.rows)
        engine.step(batch, progress.step, vote=0)
        progress = progress.after(batch)
        return progress

    try:
        if progress.step == 0:
            step()
        yield engine, state, step
    finally:
        state.close()


@contextmanager
def engine_of(extra: dict[str, Any]) -> Iterator[Any]:
    """DeepSpeed's engine of the large model, for its own way of loading."""
    spec = spec_of(SAVED)
    deepspeed = adapter.import_deepspeed("cpu")
    model = build_model(spec, V)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=deepspeed_config(spec) | extra
    )
    yield engine
    engine.destroy()


def spec_of(shape: Shape) -> JobSpec:
    tree = {
        "name": "bench-checkpoint",
        "model": {"config": shape.config},
        "data": {"train": "none", "tokenizer": {"path": "none"}, "seq_len": shape.seq_len},
        "training": {
            "global_batch_size": shape.rows,
            "steps": 100,
            "lr": 1e-4,
            "precision": shape.precision,
        },
        "deepspeed": {"zero_stage": 1},
    }
    spec = build_spec(tree, origin="benchmark")
    return resolve(spec, Facts(num_gpus=0, num_parameters=100_000_000, vocab_size=V))


def random_batch(generator: torch.Generator, place: Place, seq_len: int, rows: int) -> StepBatch:
    packed = PackedMetadata(segments=((seq_len,),))
    micros = []
    for index in place.micro_batches(rows):
        tokens_BT = torch.randint(V, (1, seq_len), generator=generator)
        labels_BT = tokens_BT.clone()
        labels_BT[0, 0] = IGNORED
        ids = np.array([index], dtype=np.int64)
        micros.append(MicroBatch(index, tokens_BT, labels_BT, packed.positions_BT(), packed, ids))
    return StepBatch(tuple(micros), rows * (seq_len - 1), rows, rows, rows * seq_len, 0, rows)


def slowest(value: float) -> float:
    """Of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return max(values)


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


class Hub(BaseManager):
    """Serves one committer to all ranks."""


def on_ranks(world_size: int, root: Path, work: Callable[..., Any], *args: Any) -> Any:
    """What `work(root, *args)` returns on rank 0 of so many gloo processes."""
    committers: dict[str, Committer] = {}

    def committer(run_dir: str) -> Committer:
        if run_dir not in committers:
            places = places_of(Path(run_dir), None)
            committers[run_dir] = Committer(
                places, lambda _: prune(places.checkpoints, Policy(last=1)), lambda event: None
            )
        return committers[run_dir]

    Hub.register("committer", callable=committer, exposed=["rank_saved"])
    server = Hub(address=("127.0.0.1", 0), authkey=KEY).get_server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.address[1]
    mp.spawn(_rank, (world_size, port, root, work, args), nprocs=world_size)
    return torch.load(root / "result.pt", weights_only=False)


def _rank(
    rank: int, world_size: int, port: int, root: Path, work: Callable[..., Any], args: Any
) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "COMMITS_PORT": str(port),
    }
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    with attention.registered(), redirect_stdout(sys.stderr):
        result = work(root, *args)
    if rank == 0:
        torch.save(result, root / "result.pt")
    dist.barrier()
    dist.destroy_process_group()


def reach_committer(run_dir: Path) -> Callable[[RankSaved], Answer]:
    Hub.register("committer")
    hub = Hub(address=("127.0.0.1", int(os.environ["COMMITS_PORT"])), authkey=KEY)
    hub.connect()
    committer = hub.committer(str(run_dir))  # type: ignore[attr-defined]

    def rank_saved(report: RankSaved) -> Answer:
        return committer.rank_saved(report)  # type: ignore[no-any-return]

    return rank_saved


def write(
    repetitions: int,
    saved: dict[str, list[float]],
    loaded: dict[str, list[float]],
    shares: dict[str, list[float]],
) -> None:
    medians = {
        "stall": statistics.median(saved["stall"]),
        "complete": statistics.median(saved["complete"]),
        "save_checkpoint": statistics.median(saved["theirs"]),
        "load": statistics.median(loaded["ours"]),
        "universal": statistics.median(loaded["theirs"]),
    }
    seconds = ", ".join(f"{name} {value:.2f} s" for name, value in medians.items())
    with suppress(FileExistsError):
        (ROOT / "runs" / "bench").mkdir(parents=True)
    figures.write(
        ROOT / "runs" / "bench" / "checkpoint.json",
        compared_with=f"DeepSpeed's save_checkpoint and ds_to_universal, {repetitions} turns on 2 "
        f"ranks; medians: {seconds}",
        stall_over_save_checkpoint=figures.Figure(saved["ratio"], goal=0.2, unit="ratio"),
        bytes_over_save_checkpoint=figures.Figure(saved["bytes"], goal=1.0, unit="ratio"),
        load_over_universal=figures.Figure(loaded["ratio"], goal=0.2, unit="ratio"),
        snapshot_share_100M=figures.Figure(shares["100M"], goal=2.0, unit="% of step time"),
        snapshot_share_demo=figures.Figure(shares["demo"], goal=2.0, unit="% of step time"),
    )


if __name__ == "__main__":
    main()
