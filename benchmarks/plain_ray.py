"""What pliant is compared with: elastic training written by hand with Ray Train and DeepSpeed.

A small llama on random tokens, a checkpoint through `ray.train.report` every few steps, a resume
from the newest one. It is the script one would write, with these favours: DeepSpeed compiles no
operators on the CPU, `tuned` turns Ray Train's and the cluster's waits down as far as they go, and
a failure costs no budget.

DeepSpeed's ZeRO checkpoints load on as many ranks as saved them. Where the number of workers
changes, stage 0 is used: every rank holds the whole optimizer, rank 0 saves it, and it loads on any
number. That is the cheapest form such a script can have; `ds_to_universal` would come on top.

    python benchmarks/plain_ray.py --address HOST:PORT --events events.jsonl --workers 2 3
"""

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pace import PACE_S
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback

TUNED = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "8",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
}
"""Ray Train's settings, read by its controller."""

TUNED_CLUSTER = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1500,
    "health_check_failure_threshold": 2,
}
"""The head's settings: a lost node is noticed within 2 s."""

MODEL = {
    "vocab_size": 4096,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "use_cache": False,
}
SEQ_LEN = 128
GLOBAL_BATCH = 6


@dataclass(frozen=True)
class PlainJob:
    """A run of the hand-written loop."""

    address: str | None
    """Of a Ray cluster; without it, one is started on this machine."""
    workers: tuple[int, int]
    """The fewest and the most."""
    steps: int
    events: Path
    """One JSON object a line: time (Unix seconds), what, rank, pid, node, world, step."""
    storage: Path
    tuned: bool = True
    zero_stage: int = 1
    save_every: int = 5
    cpus_per_worker: float = 1.0


@dataclass
class Events:
    """Appends what happens, from any process of the run."""

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)

    def note(self, what: str, **facts: Any) -> None:
        event = {"time": time.time(), "what": what, **self.facts, **facts}
        with self.path.open("a") as file:
            file.write(json.dumps(event) + "\n")


def run_plain(job: PlainJob) -> None:
    """Trains to the end of `job.steps`, or until this process is killed."""
    if job.tuned:
        os.environ |= TUNED
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(address=job.address or "local", log_to_driver=False, logging_level="ERROR")
    trainer = TorchTrainer(
        train_function,
        train_loop_config=asdict(job),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=job.workers if job.workers[0] < job.workers[1] else job.workers[0],
            resources_per_worker={"CPU": job.cpus_per_worker},
            elastic_resize_monitor_interval_s=1.0 if job.tuned else 60.0,
        ),
        run_config=RunConfig(
            name=f"plain-{time.time_ns()}",
            storage_path=str(job.storage),
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            callbacks=[Controller(Events(job.events))],
            worker_runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}},
        ),
    )
    trainer.fit()


class Controller(ControllerCallback, WorkerGroupCallback):
    """Notes what Ray Train's controller does."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
        self._events.note("detected")

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        self._events.note("decided", world=resize_decision.num_workers)


def train_function(job: dict[str, Any]) -> None:
    """On every worker. Ray has imported torch and set up the process group before."""
    import psutil
    import ray.train

    context = ray.train.get_context()
    events = Events(
        Path(job["events"]),
        {
            "rank": context.get_world_rank(),
            "world": context.get_world_size(),
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
        },
    )
    events.note("process started", time=psutil.Process().create_time())
    events.note("group up")
    engine = _build_engine(job, events)
    events.note("engine ready")
    first = _load(engine)
    events.note("loaded", step=first)
    for step in range(first, job["steps"]):
        loss = _step(engine, step, context.get_world_rank(), context.get_world_size())
        events.note("step", step=step + 1, loss=loss)
        time.sleep(PACE_S)
        if (step + 1) % job["save_every"] == 0:
            _save(engine, step + 1, loss)
            events.note("saved", step=step + 1)


def _build_engine(job: dict[str, Any], events: Events) -> Any:
    import deepspeed
    import deepspeed.ops
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    events.note("imports done")
    # Its first process group on the CPU would otherwise compile an operator for a minute.
    deepspeed.ops.__dict__["__compatible_ops__"] = {}
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        # The usual integer division: on 4 workers a step would have 4 rows instead of 6.
        "gradient_accumulation_steps": GLOBAL_BATCH // torch.distributed.get_world_size(),
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": job["zero_stage"]},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def _step(engine: Any, step: int, rank: int, world: int) -> float:
    import torch

    total = 0.0
    for micro in range(GLOBAL_BATCH // world):
        draw = torch.Generator().manual_seed((step * GLOBAL_BATCH + micro) * world + rank)
        tokens_BT = torch.randint(MODEL["vocab_size"], (1, SEQ_LEN), generator=draw)
        loss = engine(input_ids=tokens_BT, labels=tokens_BT).loss
        engine.backward(loss)
        engine.step()
        total += loss.item()
    return total / (GLOBAL_BATCH // world)


def _load(engine: Any) -> int:
    """The step to go on from."""
    import ray.train

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        _, state = engine.load_checkpoint(folder, tag="state")
    return int(state["step"])


def _save(engine: Any, step: int, loss: float) -> None:
    import ray.train

    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, tag="state", client_state={"step": step})
        has_files = any(path.is_file() for path in Path(folder).rglob("*"))
        checkpoint = ray.train.Checkpoint.from_directory(folder) if has_files else None
        ray.train.report({"step": step, "loss": loss}, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plain Ray Train, for comparison.")
    parser.add_argument("--address")
    parser.add_argument("--workers", type=int, nargs=2, default=(2, 3), metavar=("MIN", "MAX"))
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--storage", type=Path, required=True)
    parser.add_argument("--defaults", action="store_true", help="Ray Train's own settings.")
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--cpus-per-worker", type=float, default=1.0)
    given = parser.parse_args()
    run_plain(
        PlainJob(
            address=given.address,
            workers=tuple(given.workers),
            steps=given.steps,
            events=given.events.absolute(),
            storage=given.storage.absolute(),
            tuned=not given.defaults,
            zero_stage=given.zero_stage,
            save_every=given.save_every,
            cpus_per_worker=given.cpus_per_worker,
        )
    )


if __name__ == "__main__":
    main()
