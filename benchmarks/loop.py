"""What pliant's own code costs per step, and the whole beside a bare DeepSpeed loop.

In one worker group, pliant's loop (stream, ledger, records, comparison of ranks) and a hand-written
DeepSpeed loop take turns on the same engine and the same batches: A B, A B, ... Each pair gives one
ratio; the median and the spread over the pairs are what counts, since the machine's speed drifts.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import figures
import ray
import ray.train
import torch
import torch.distributed as dist
import torch.nn.functional as F

from pliant.accel import attention
from pliant.batch import IGNORED, StepBatch
from pliant.cluster.session import ray_session
from pliant.data.feeder import start_feeder, stop_feeder
from pliant.spec import load_spec
from pliant.spec.load import read_yaml
from pliant.topology import BatchShape, Place
from pliant.training import launch, worker
from pliant.training.callbacks import CompareRanks, KeepLedger, ReportSteps
from pliant.training.loop import train
from pliant.training.planning import plan_job
from pliant.training.progress import Progress
from pliant.training.recorder import Reporter, recorder_name, start_recorder

ROOT = Path(__file__).parent.parent
PAIRS = 9
STEPS = 8
WARM_UP_STEPS = 8


def main() -> None:
    base = ROOT / "jobs" / "specs" / "demo.yaml"
    assert read_yaml(base)
    settings = [
        "name=bench-loop",
        f"training.steps={WARM_UP_STEPS + PAIRS * STEPS}",
        "elastic.min_workers=2",
        "elastic.drills=[]",
    ]
    spec = load_spec(base, environ={}, settings=settings)
    runs_dir = ROOT / "runs" / "bench"
    with ray_session(None, 3):
        launch.tune_environment(spec.elastic.start_timeout_s)
        run_dir = runs_dir / spec.name
        run_dir.mkdir(parents=True, exist_ok=True)
        task = plan_job(spec, runs_dir).task
        recorder = start_recorder(run_dir, task.spec, f"sqlite:///{runs_dir / 'mlflow.db'}", {})
        start_feeder(spec.name, task.grid)
        try:
            launch.trainer_for(task, recorder, run_pairs).fit()
        finally:
            stop_feeder(spec.name)
            ray.get(recorder.finish.remote("FINISHED", 30.0))


@dataclass
class Clock:
    """Adds up the time spent in what is not pliant's own; calls within calls count once."""

    seconds: float = 0.0
    _depth: int = 0
    _restore: list[Callable[[], None]] = field(default_factory=list)

    def watch(self, owner: Any, name: str) -> None:
        """Counts the time inside `owner.name` until `stop`."""
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            self._depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.perf_counter() - began

        setattr(owner, name, timed)
        self._restore.append(lambda: setattr(owner, name, original))

    @contextmanager
    def watching(self, engine: Any) -> Iterator[None]:
        """Model, loss, DeepSpeed and collectives."""
        for owner, name in (
            (engine.deepspeed, "forward"),
            (engine.deepspeed, "backward"),
            (engine.deepspeed, "step"),
            (engine.nll, "loss"),
            (dist, "all_reduce"),
            (dist, "all_gather_object"),
        ):
            self.watch(owner, name)
        try:
            yield
        finally:
            while self._restore:
                self._restore.pop()()


@dataclass
class Keep:
    """Holds on to the batches, for the bare loop to run them again."""

    batches: list[StepBatch] = field(default_factory=list)

    def after_step(self, progress: Progress, batch: StepBatch, result: Any) -> None:
        self.batches.append(batch)


def run_pairs(config: dict[str, worker.WorkerTask]) -> None:
    """On every worker: pairs of rounds; rank 0 writes the figures."""
    task = config["task"]
    spec = task.spec
    worker.quiet_libraries()
    torch.set_num_threads(1)
    context = ray.train.get_context()
    place = Place(context.get_world_rank(), context.get_world_size())
    recorder = ray.get_actor(recorder_name(spec.name), namespace="pliant")
    with attention.registered():
        engine, _, ledger = worker.prepare_engine(task, place)
        rounds = Rounds(task, place, engine, ledger, recorder)
        rounds.pliant(WARM_UP_STEPS)
        pairs = [rounds.pair() for _ in range(PAIRS)]
        rounds.reporter.flush()
    if place.rank == 0:
        write(pairs, place)


@dataclass(frozen=True)
class Pair:
    """Seconds of one round of each loop over the same steps."""

    pliant_s: float
    own_s: float
    wait_s: float
    bare_s: float


class Rounds:
    """Takes turns between the two loops."""

    def __init__(
        self, task: worker.WorkerTask, place: Place, engine: Any, ledger: Any, recorder: Any
    ) -> None:
        spec = task.spec
        self.engine = engine
        self.place = place
        self.reporter = Reporter(recorder, threading.Event())
        self.stop = threading.Event()
        shape = BatchShape(
            spec.training.global_batch_size, spec.training.micro_batch_size, spec.data.seq_len
        )
        self.callbacks: list[Any] = [KeepLedger(ledger)]
        if place.rank == 0:
            self.callbacks.append(ReportSteps(self.reporter, shape, place))
        whole = worker.whole_tensors
        self.callbacks.append(CompareRanks(lambda: whole(engine), spec.training.digest_every))
        self.progress = Progress()
        self.stream = iter(worker.open_stream(task, shape, place, first=0))

    def pliant(self, steps: int) -> tuple[list[StepBatch], float, float]:
        """Batches, seconds in all, seconds that are not pliant's own."""
        keep = Keep()
        clock = Clock()
        began = time.perf_counter()
        with clock.watching(self.engine):
            batches = (next(self.stream) for _ in range(steps))
            self.progress = train(
                self.engine, batches, [*self.callbacks, keep], self.progress, self.stop
            )
        return keep.batches, time.perf_counter() - began, clock.seconds

    def bare(self, batches: list[StepBatch]) -> float:
        """What one would write by hand: forward, loss, backward, step, and the loss to print."""
        model = self.engine.deepspeed
        began = time.perf_counter()
        for batch in batches:
            total = torch.zeros(())
            for micro in batch.micro_batches:
                logits = model(
                    input_ids=micro.tokens_BT,
                    position_ids=micro.positions_BT,
                    packed=micro.packed,
                    use_cache=False,
                ).logits
                loss = F.cross_entropy(
                    logits[:, :-1].reshape(-1, logits.shape[-1]).float(),
                    micro.labels_BT[:, 1:].reshape(-1),
                    ignore_index=IGNORED,
                    reduction="sum",
                )
                model.backward(loss * (2 / batch.num_targets), scale_wrt_gas=False)
                total += loss.detach()
            model.step()
            dist.all_reduce(total)
            total.item()
        return time.perf_counter() - began

    def pair(self) -> Pair:
        dist.barrier()
        batches, pliant_s, not_own_s = self.pliant(STEPS)
        wait_s = sum(batch.data_wait_s for batch in batches)
        dist.barrier()
        bare_s = self.bare(batches)
        return Pair(pliant_s, pliant_s - not_own_s - wait_s, wait_s, bare_s)


def write(pairs: list[Pair], place: Place) -> None:
    own = [100 * pair.own_s / pair.pliant_s for pair in pairs]
    wait = [100 * pair.wait_s / pair.pliant_s for pair in pairs]
    ratio = [pair.pliant_s / pair.bare_s for pair in pairs]
    step_ms = 1000 * statistics.median(pair.pliant_s for pair in pairs) / STEPS
    compared = (
        f"{PAIRS} pairs of {STEPS} steps, {place.world_size} workers, {step_ms:.0f} ms a step"
    )
    figures.write(
        ROOT / "runs" / "bench" / "loop.json",
        compared_with=f"a bare DeepSpeed loop on the same engine and batches; {compared}",
        own_code=figures.Figure(own, goal=2.0, unit="% of step time"),
        data_wait=figures.Figure(wait, goal=1.0, unit="% of step time"),
        step_time_over_bare=figures.Figure(ratio, goal=1.02, unit="ratio"),
    )


if __name__ == "__main__":
    main()
