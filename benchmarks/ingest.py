"""From raw text to packed tensors: pliant beside a loop over the tokenizer, and `datasets`.

The same text file, tokenizer and row length. Three sides take turns, after one round on little text
that warms them up:

    pliant      prepares a store on Ray, then assembles every batch of an epoch from it
    loop        `tokenizers.encode_batch_fast` on all cores, packing a batch at a time: the limit
    datasets    `load_dataset`, `map` in two processes, TRL's `pack_dataset`, torch format

CPU-seconds count every process of a side. What a preparation costs however little text there is,
and how much each further token costs, are told apart by a second, small text.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import figures
import numpy as np
import psutil
import torch

from pliant.cluster.session import ray_session
from pliant.data import stdlib_corpus
from pliant.data.blocks import Rows, assemble_steps
from pliant.data.packing import best_fit_decreasing
from pliant.data.plan import DataPlan, PlanSettings
from pliant.data.prepare import prepare
from pliant.data.tokenizer import Tokenizer, open_tokenizer, save_tokenizer, train_tokenizer
from pliant.spec.load import build_spec
from pliant.topology import BatchShape, Place

ROOT = Path(__file__).parent.parent
SEQ_LEN = 4096
ROWS = 8
WINDOW = 1000
VOCAB = 8192
TOKENS = 20_000_000
SMALL = 200_000
BLOCK_STEPS = 8


@dataclass(frozen=True)
class Cost:
    """Of one side's turn."""

    seconds: float
    cpu_s: float
    tokens: int
    fill: float


@dataclass(frozen=True)
class Bench:
    """The files that all sides read, and the place where they write."""

    folder: Path
    tokenizer: Tokenizer

    def pliant(self, text: Path) -> Iterator[tuple[int, int]]:
        spec = build_spec(
            {
                "name": "ingest",
                "model": {"config": {"model_type": "llama"}},
                "data": {
                    "train": str(text),
                    "split": {"validation": 0},
                    "tokenizer": {"path": str(self.folder / "tokenizer")},
                    "seq_len": SEQ_LEN,
                    "window": WINDOW,
                    "shard_samples": 8192,
                },
                "training": {"global_batch_size": ROWS, "steps": 1},
            },
            origin="bench",
        )
        prepared = prepare(spec, self.folder / f"stores-{time.time_ns()}")
        split = prepared.split("train")
        assert split is not None
        plan = DataPlan(split, PlanSettings(SEQ_LEN, ROWS, WINDOW, True, True, seed=0))
        shape, place = BatchShape(ROWS, ROWS, SEQ_LEN), Place(0, 1)
        steps = plan.steps_of(0)
        for first in range(0, steps, BLOCK_STEPS):
            last = min(first + BLOCK_STEPS, steps)
            rows = Rows.of(assemble_steps(plan, first, last, prepared.manifest["pad_id"]), SEQ_LEN)
            row = 0
            for step in range(first, last):
                at = plan.locate(step)
                end = row + at.last - at.first
                batch = rows.step_batch(row, end, shape, place, at.epoch, at.last)
                yield batch.num_tokens, batch.num_packs
                row = end

    def loop(self, text: Path) -> Iterator[tuple[int, int]]:
        for texts in batches_of(text, WINDOW):
            ids = [[*one, self.tokenizer.eos_id] for one in self.tokenizer.encode_batch(texts)]
            pieces = [one[i : i + SEQ_LEN] for one in ids for i in range(0, len(one), SEQ_LEN)]
            packing = best_fit_decreasing(np.array(list(map(len, pieces)), np.int32), SEQ_LEN)
            rows = np.full((packing.num_packs, SEQ_LEN), self.tokenizer.pad_id, dtype=np.int64)
            tokens = 0
            for row in range(packing.num_packs):
                at = 0
                for item in packing.items[packing.starts[row] : packing.starts[row + 1]]:
                    rows[row, at : at + len(pieces[item])] = pieces[item]
                    at += len(pieces[item])
                tokens += at
            yield tokens, len(torch.from_numpy(rows))

    def datasets(self, text: Path) -> Iterator[tuple[int, int]]:
        import datasets
        from trl import pack_dataset

        datasets.disable_progress_bars()
        cache = self.folder / f"cache-{time.time_ns()}"
        loaded = datasets.load_dataset(
            "json", data_files=str(text), split="train", cache_dir=str(cache)
        )
        path, eos_id = self.folder / "tokenizer", self.tokenizer.eos_id

        def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
            found = open_tokenizer(path).encode_batch(batch["text"])
            return {"input_ids": [[*ids, eos_id] for ids in found]}

        encoded = loaded.map(encode, batched=True, num_proc=2, remove_columns=["text"])
        packed = pack_dataset(encoded, SEQ_LEN, strategy="bfd_split").with_format("torch")
        for batch in packed.iter(ROWS):
            yield sum(len(row) for row in batch["input_ids"]), len(batch["input_ids"])


def measured(side: Callable[[Path], Iterator[tuple[int, int]]], text: Path) -> Cost:
    began, before = time.perf_counter(), cpu_seconds()
    tokens = rows = 0
    for some, packs in side(text):
        tokens, rows = tokens + some, rows + packs
    seconds = time.perf_counter() - began
    fill = tokens / (rows * SEQ_LEN)
    return Cost(seconds, cpu_seconds() - before, tokens, fill)


def cpu_seconds() -> float:
    """Of this process and all below it, those that have ended included."""
    own = psutil.Process()
    total = sum(own.cpu_times()[:4])
    for process in own.children(recursive=True):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def batches_of(path: Path, size: int) -> Iterator[list[str]]:
    texts: list[str] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            texts.append(json.loads(line)["text"])
            if len(texts) == size:
                yield texts
                texts = []
    if texts:
        yield texts


def write_texts(path: Path, corpus: Path, tokenizer: Tokenizer, num_tokens: int) -> None:
    """Docstrings put together at random to texts with a log-normal number of tokens."""
    rng = np.random.default_rng(0)
    with corpus.open(encoding="utf-8") as lines:
        parts = [json.loads(line)["completion"] for line in lines]
    sizes = np.array([len(ids) for ids in tokenizer.encode_batch(parts)])
    left = num_tokens
    with path.open("w", encoding="utf-8") as file:
        while left > 0:
            wanted = rng.lognormal(np.log(355) - 0.5, 1.0)
            chosen: list[int] = []
            while sum(sizes[chosen]) < wanted:
                chosen.append(int(rng.integers(len(parts))))
            file.write(json.dumps({"text": "\n\n".join(parts[i] for i in chosen)}) + "\n")
            left -= int(sum(sizes[chosen]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    given = parser.parse_args()
    os.environ |= {"TOKENIZERS_PARALLELISM": "true", "HF_HUB_OFFLINE": "1"}
    bench_dir = ROOT / "runs" / "bench"
    bench_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=bench_dir) as name, ray_session(None, 4):
        folder = Path(name)
        corpus = stdlib_corpus.write(folder)
        tokenizer = trained(corpus, folder / "tokenizer")
        texts = {"whole": folder / "whole.jsonl", "small": folder / "small.jsonl"}
        write_texts(texts["whole"], corpus, tokenizer, given.tokens)
        write_texts(texts["small"], corpus, tokenizer, SMALL)
        bench = Bench(folder, tokenizer)
        write(given.rounds, take_turns(bench, texts, given.rounds))


def trained(corpus: Path, directory: Path) -> Tokenizer:
    with corpus.open(encoding="utf-8") as lines:
        tokenizer = train_tokenizer((json.loads(line)["completion"] for line in lines), VOCAB)
    save_tokenizer(tokenizer, directory)
    return tokenizer


def take_turns(bench: Bench, texts: dict[str, Path], rounds: int) -> dict[str, list[Cost]]:
    sides = {"pliant": bench.pliant, "loop": bench.loop, "datasets": bench.datasets}
    for side in sides.values():
        measured(side, texts["small"])
    found: dict[str, list[Cost]] = {}
    for number in range(rounds):
        turns = list(sides.items())
        for name, side in turns if number % 2 == 0 else reversed(turns):
            for size, text in texts.items():
                cost = measured(side, text)
                found.setdefault(f"{name} {size}", []).append(cost)
                print(f"{name} {size}: {cost}", file=sys.stderr)
        for stale in [*bench.folder.glob("stores-*"), *bench.folder.glob("cache-*")]:
            shutil.rmtree(stale)
    return found


def write(rounds: int, found: dict[str, list[Cost]]) -> None:
    def paired(compute: Callable[[Cost, Cost], float], other: str) -> list[float]:
        pairs = zip(found["pliant whole"], found[f"{other} whole"], strict=True)
        return [compute(own, theirs) for own, theirs in pairs]

    def slope(side: str, number: int) -> float:
        whole, small = found[f"{side} whole"][number], found[f"{side} small"][number]
        return (whole.cpu_s - small.cpu_s) / (whole.tokens - small.tokens)

    slopes = [100 * (slope("pliant", n) / slope("loop", n) - 1) for n in range(rounds)]
    fixed = [
        own.cpu_s - loop.cpu_s
        for own, loop in zip(found["pliant small"], found["loop small"], strict=True)
    ]
    padding = [100 * (1 - cost.fill) for cost in found["pliant whole"]]
    tokens = found["pliant whole"][0].tokens
    figures.write(
        ROOT / "runs" / "bench" / "ingest.json",
        compared_with=f"the same {tokens:,} tokens, {rounds} rounds",
        time_over_loop=figures.Figure(
            paired(lambda own, other: own.seconds / other.seconds, "loop"), 1 / 0.9, "ratio"
        ),
        time_over_datasets=figures.Figure(
            paired(lambda own, other: own.seconds / other.seconds, "datasets"), 1.0, "ratio"
        ),
        fixed_cpu=figures.Figure(fixed, 2.0, "CPU-s"),
        cpu_per_token_above_loop=figures.Figure(slopes, 5.0, "%"),
        padding=figures.Figure(padding, 0.1, "%"),
    )


if __name__ == "__main__":
    main()
