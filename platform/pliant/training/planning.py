"""Decides everything about a job before a worker starts: data, sizes, and what "auto" becomes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import ray

from pliant.data.account import TokenAccount, account_for
from pliant.data.feeder import BlockGrid
from pliant.data.order import Mixture
from pliant.data.plan import DataPlan, PlanSettings
from pliant.data.prepare import Report, prepare
from pliant.data.store import Prepared, Split, SplitPlace, store_root
from pliant.data.tokenizer import load_tokenizer
from pliant.errors import ClusterError, DataError, SpecError
from pliant.spec import JobSpec
from pliant.spec.data import DataSpec
from pliant.spec.dotted import load_dotted
from pliant.spec.resolve import Facts, resolve
from pliant.storage.opening import need_space
from pliant.tracking import environment_manifest
from pliant.tracking.redaction import recordable
from pliant.training.deepspeed_config import deepspeed_config
from pliant.training.model import count_beforehand
from pliant.training.worker import WorkerTask

BYTES_PER_PARAMETER = 12
"""Of a checkpoint: an fp32 master and two moments."""


@dataclass(frozen=True)
class JobPlan:
    """What the driver has decided."""

    task: WorkerTask
    prepared: Prepared
    num_parameters: int
    """Trainable ones."""
    account: TokenAccount

    def manifest(self, spec: JobSpec) -> dict[str, Any]:
        """What is kept of it, beside what was asked."""
        return {
            "name": spec.name,
            "spec": recorded(spec),
            "resolved": recorded(self.task.spec),
            "num_parameters": self.num_parameters,
            "data": {
                "key": self.prepared.key,
                "accounting": self.prepared.manifest["accounting"],
                "first_epoch": self.account.figures(),
            },
            "environment": environment_manifest(spec.env),
        }


def check_plugins(spec: JobSpec) -> None:
    """Raises `SpecError` for own code that cannot be imported, before anything is started."""
    named: dict[str, list[str | None]] = {
        "model.factory": [spec.model.factory],
        "training.loss": [spec.training.loss],
        "training.callbacks": [*spec.training.callbacks],
        "data.transform": [spec.data.transform],
    }
    for key, paths in named.items():
        for path in paths:
            if path is not None:
                load_dotted(path, key)


def check_model(spec: JobSpec) -> None:
    """Raises `ModelError` for a model that cannot be built, before data is tokenized for it."""
    vocab_size = guess_vocab_size(spec)
    count_beforehand(resolve(spec, Facts(vocab_size=vocab_size)), vocab_size)


def guess_vocab_size(spec: JobSpec) -> int:
    """The tokenizer's size; of one that is still to be trained, the size that was asked for."""
    tokenizer = spec.data.tokenizer
    if tokenizer.train_vocab_size is not None:
        return tokenizer.train_vocab_size
    assert tokenizer.path is not None
    return load_tokenizer(Path(tokenizer.path).expanduser()).vocab_size


def resolve_on_cluster(spec: JobSpec, num_parameters: int) -> JobSpec:
    """The spec as the cluster decides it. Raises `ClusterError` where the cluster is too small."""
    resources = ray.cluster_resources()
    num_gpus = int(resources.get("GPU", 0))
    resolved = resolve(spec, Facts(num_gpus=num_gpus, num_parameters=num_parameters))
    on_gpu = resolved.resources.device == "cuda"
    if spec.training.precision == "fp16" and not on_gpu:
        raise SpecError("training.precision is fp16, which CPUs do not train in. Use bf16 or fp32.")
    kind, each = ("GPU", 1.0) if on_gpu else ("CPU", spec.resources.cpus_per_worker)
    room = int(resources.get(kind, 0) // each)
    if room < spec.elastic.min_workers:
        raise ClusterError(
            f"The cluster has room for {room} workers ({resources.get(kind, 0):g} {kind}s) and "
            f"elastic.min_workers is {spec.elastic.min_workers}. Lower it, or add nodes.",
            room=room,
        )
    return resolved


def plan_job(spec: JobSpec, runs_dir: Path, report: Report | None = None) -> JobPlan:
    """Prepares the data, if need be, and resolves the spec; `report` is told how many chunks of the
    data are done, and of how many. Raises `UserError` where the job cannot be run."""
    check_model(spec)
    prepared = prepare(spec, store_root(spec.data, runs_dir), report)
    vocab_size = prepared.manifest["vocab_size"]
    resolved = resolve(spec, Facts(vocab_size=vocab_size))
    num_parameters = count_beforehand(resolved, vocab_size)
    resolved = resolve_on_cluster(resolved, num_parameters)
    plan = training_plan(spec, prepared)
    steps = spec.training.steps or plan.steps_in(spec.training.epochs or 1)
    resolved = resolve(resolved, _found_in(prepared, steps))
    deepspeed_config(resolved)  # refuses a bad `extra` now
    _check_logits_fit(resolved, vocab_size)
    need_space(runs_dir, num_parameters * BYTES_PER_PARAMETER)
    grid = BlockGrid(
        split=plan.split.place,
        settings=plan.settings,
        pad_id=prepared.manifest["pad_id"],
        num_steps=steps,
        block_steps=int(resolved.data.block_steps),
    )
    task = WorkerTask(
        spec=resolved,
        run_dir=runs_dir / spec.name,
        grid=grid,
        held_out=_held_out(prepared, spec),
        data_key=prepared.key,
        vocab_size=vocab_size,
    )
    return JobPlan(task, prepared, num_parameters, account_for(prepared, plan))


def training_plan(spec: JobSpec, prepared: Prepared) -> DataPlan:
    """The order of a job's training data. Raises `DataError`."""
    split = prepared.split("train")
    assert split is not None  # `prepare` refuses an empty training set
    return DataPlan(split, plan_settings(spec, shuffle=True, mixture=_mixture(spec.data, split)))


def _check_logits_fit(spec: JobSpec, vocab_size: int) -> None:
    """The one tensor that grows with rows and vocabulary alike, beside its gradient. On GPUs the
    driver does not know the memory."""
    if spec.resources.device != "cpu":
        return
    rows = spec.training.micro_batch_size * spec.data.seq_len
    needed, there = 2 * 4 * rows * vocab_size, psutil.virtual_memory().total
    if needed > there:
        raise SpecError(
            f"The logits of one micro-batch and their gradient would take {needed / 2**30:,.0f} "
            f"GiB ({rows:,} tokens x {vocab_size:,} words), and this machine has "
            f"{there / 2**30:,.0f} GiB. Lower data.seq_len or training.micro_batch_size."
        )


def _mixture(data: DataSpec, split: Split) -> Mixture | None:
    """None where nothing is weighted: every sample comes once an epoch. Raises `DataError` for a
    part of which nothing can be trained."""
    if isinstance(data.train, str) or all(isinstance(source, str) for source in data.train):
        return None
    weights = [1.0 if isinstance(source, str) else source.weight for source in data.train]
    empty = [number for number in range(len(weights)) if not any(split.parts[number : number + 1])]
    if empty:
        raise DataError(
            f"data.train has {len(weights)} parts, and number {empty[0] + 1} leaves nothing to "
            "train on. Leave it out, or check data.overlong and data.train_on.",
            part=empty[0],
        )
    return Mixture(data.mixture_by, tuple(weights))


def plan_settings(spec: JobSpec, shuffle: bool, mixture: Mixture | None = None) -> PlanSettings:
    return PlanSettings(
        seq_len=spec.data.seq_len,
        global_batch_size=spec.training.global_batch_size,
        window=spec.data.window,
        packing=spec.data.packing,
        shuffle=shuffle,
        seed=spec.training.seed,
        mixture=mixture,
    )


def _found_in(prepared: Prepared, num_training_steps: int) -> Facts:
    """What looking at the data has decided."""
    made_from = prepared.manifest["made_from"]
    formats = {file["format"] for files in made_from["sources"].values() for file in files}
    return Facts(
        num_training_steps=num_training_steps,
        data_shape=made_from["shape"],
        data_format=formats.pop() if len(formats) == 1 else None,
    )


def _held_out(prepared: Prepared, spec: JobSpec) -> dict[str, tuple[SplitPlace, PlanSettings]]:
    settings = plan_settings(spec, shuffle=False)
    if spec.data.eval_packing != "auto":
        settings = replace(settings, packing=spec.data.eval_packing)
    splits = {name: prepared.split(name) for name in ("validation", "test")}
    return {name: (split.place, settings) for name, split in splits.items() if split is not None}


def recorded(spec: JobSpec) -> dict[str, Any]:
    """The spec as it may be written down: without what looks like a secret in `env`."""
    tree = spec.model_dump(mode="json")
    return tree | {"env": {name: recordable(name, value) for name, value in spec.env.items()}}
