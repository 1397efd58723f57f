"""The only module that knows DeepSpeed's insides: importing it, and where ZeRO keeps its state.

Pinned to DeepSpeed 0.19.8; `tests/unit/training/test_deepspeed_adapter.py` fails clearly where
another version moved something.
"""

import gc
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from pliant.checkpoints.fragments import Fragment, FragmentSource, Kind

MOMENTS: tuple[Kind, Kind] = ("exp_avg", "exp_avg_sq")


def import_deepspeed(device: str) -> ModuleType:
    """DeepSpeed, told which accelerator to use.

    Its autotuner imports MLflow wherever it is installed, which costs each worker a second and
    100 MB; and on the CPU its first process group compiles a shared-memory operator, which takes
    more than a minute. Neither is needed.
    """
    os.environ["DS_ACCELERATOR"] = device
    absent: Any = None  # an import of it fails, as it would where MLflow is not installed
    hidden = "mlflow" not in sys.modules
    if hidden:
        sys.modules["mlflow"] = absent
    try:
        import deepspeed
    finally:
        if hidden:
            del sys.modules["mlflow"]
    if device == "cpu":
        import deepspeed.ops

        deepspeed.ops.__dict__["__compatible_ops__"] = {}
    return deepspeed


def leave_process_group() -> None:
    """Ends the process group, DeepSpeed's notion of it, and what refers to either, so that this
    process can join another."""
    comm: Any = sys.modules.get("deepspeed.comm.comm")
    if dist.is_initialized():
        if comm is not None and comm.cdb is not None:
            comm.destroy_process_group()
        else:
            dist.destroy_process_group()
    if comm is not None:
        comm.cdb = None
    gc.collect()


def fragment_source(engine: Any) -> FragmentSource:
    """Where this engine's master weights and moments lie."""
    stage = engine.zero_optimization_stage()
    if stage == 3:
        return _Stage3(engine)
    return _Partitioned(engine) if stage in (1, 2) else _Replicated(engine)


@dataclass(frozen=True)
class GradientSlot:
    """Where a run of one parameter's gradient lies for the optimizer to find it."""

    name: str
    """Of the parameter, as the module names it."""
    start: int
    """Of the run's first element, in the flattened parameter."""
    gradient: torch.Tensor
    """fp32, 1-D; a view of what the optimizer reads."""


def gradient_slots(engine: Any) -> list[GradientSlot]:
    """Gives each of this rank's master weights a gradient of zeros, and says what goes where. For
    stages 0 to 2, and for whoever steps without DeepSpeed, which puts gradients of its own there.
    """
    stage = engine.zero_optimization_stage()
    assert stage in (0, 1, 2), "at stage 3 no rank has whole gradients to give"
    source = _Partitioned(engine) if stage else _Replicated(engine)
    return [
        GradientSlot(run.name, run.start, _gradient(run.master).narrow(0, run.offset, run.length))
        for run in source.runs()
    ]


def parameter_groups(engine: Any) -> list[dict[str, Any]]:
    """The optimizer's groups; their settings may be changed."""
    return _inner_optimizer(engine).param_groups


def optimizer_steps(engine: Any) -> int:
    """Steps that the optimizer has applied; its bias correction follows from them."""
    states = _inner_optimizer(engine).state.values()
    return max((int(state["step"]) for state in states if "step" in state), default=0)


def set_optimizer_steps(engine: Any, steps: int) -> None:
    for state in _inner_optimizer(engine).state.values():
        state["step"] = torch.tensor(float(steps))


def loss_scale(engine: Any) -> float | None:
    """Of fp16 training, as it stands; None in other precisions."""
    scaler = _loss_scaler(engine)
    return None if scaler is None else float(scaler.cur_scale)


def set_loss_scale(engine: Any, scale: float | None) -> None:
    scaler = _loss_scaler(engine)
    if scaler is not None and scale is not None:
        scaler.cur_scale = scale


def whole_parameters(engine: Any) -> list[tuple[str, torch.Tensor]]:
    """Trained parameters that every rank must hold with equal values."""
    return [
        (name, parameter.data)
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad and _is_whole(parameter)
    ]


def _is_whole(parameter: Any) -> bool:
    return not hasattr(parameter, "ds_numel") or parameter.numel() == parameter.ds_numel


@dataclass(frozen=True)
class _Run:
    """Elements of one parameter, as they lie in one of this rank's master weights."""

    name: str
    numel: int
    """Of the whole parameter."""
    start: int
    """Of the first element, in the flattened parameter."""
    master: torch.Tensor
    offset: int
    """Of the first element, in the flattened master."""
    length: int


class _Replicated:
    """Stage 0: every rank holds everything; the saving is shared out."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def fragments(self) -> list[Fragment]:
        optimizer = _inner_optimizer(self._engine)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        fragments = []
        for index, (name, parameter, master) in enumerate(self._masters()):
            state = _adam_state(optimizer, master)
            for kind, tensor in _kinds(master, state):
                is_owner = index % world_size == rank
                flat = tensor.data.view(-1)
                fragments.append(Fragment(kind, name, 0, parameter.numel(), flat, is_owner))
        return fragments

    def runs(self) -> Iterator[_Run]:
        for name, parameter, master in self._masters():
            yield _Run(name, parameter.numel(), 0, master, 0, parameter.numel())

    def refresh(self) -> None:
        for _, parameter, master in self._masters():
            if parameter is not master:
                parameter.data.copy_(master.data)

    def _masters(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """(name, parameter, its fp32 master); one and the same in fp32."""
        named = _trained(self._engine)
        optimizer = self._engine.optimizer
        if not hasattr(optimizer, "fp32_groups"):
            return [(name, parameter, parameter) for name, parameter in named]
        names = {id(parameter): name for name, parameter in named}
        return [
            (names[id(parameter)], parameter, master)
            for low, high in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
            for parameter, master in zip(low, high, strict=True)
        ]


class _Partitioned:
    """Stages 1 and 2: each rank owns a run of the flattened groups."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def fragments(self) -> list[Fragment]:
        optimizer = self._engine.optimizer.optimizer
        fragments = []
        for run in self.runs():
            for kind, tensor in _kinds(run.master, _adam_state(optimizer, run.master)):
                part = tensor.data.narrow(0, run.offset, run.length)
                fragments.append(Fragment(kind, run.name, run.start, run.numel, part))
        return fragments

    def runs(self) -> Iterator[_Run]:
        optimizer = self._engine.optimizer
        names = {id(parameter): name for name, parameter in _trained(self._engine)}
        for group, master in enumerate(optimizer.single_partition_of_fp32_groups):
            rank = dist.get_rank(optimizer.real_dp_process_group[group])
            begin, end = rank * master.numel(), (rank + 1) * master.numel()
            # The order in which the group was flattened. DeepSpeed's own `_hp_mapping` of a
            # parameter points elsewhere when `round_robin_gradients` has changed that order.
            parameters = optimizer.round_robin_bit16_groups[group]
            offsets = optimizer.round_robin_bit16_offsets[group]
            for parameter, offset in zip(parameters, offsets, strict=True):
                name, numel = names[id(parameter)], parameter.numel()
                low, high = max(offset, begin), min(offset + numel, end)
                if low < high:  # else other ranks own all of it
                    yield _Run(name, numel, low - offset, master, low - begin, high - low)

    def refresh(self) -> None:
        from deepspeed.runtime.utils import all_gather_dp_groups

        optimizer = self._engine.optimizer
        parts = optimizer.parallel_partitioned_bit16_groups
        masters = optimizer.single_partition_of_fp32_groups
        for group, (part, master) in enumerate(zip(parts, masters, strict=True)):
            rank = dist.get_rank(optimizer.real_dp_process_group[group])
            part[rank].data.copy_(master.data)
        all_gather_dp_groups(
            groups_flat=optimizer.bit16_groups_flat,
            partitioned_param_groups=parts,
            dp_process_group=optimizer.real_dp_process_group,
            start_alignment_factor=optimizer.nccl_start_alignment_factor,
            allgather_bucket_size=optimizer.allgather_bucket_size,
        )


class _Stage3:
    """Stage 3: each rank owns an equal run of every parameter, the last one padded."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def fragments(self) -> list[Fragment]:
        optimizer = self._engine.optimizer
        rank = dist.get_rank(optimizer.dp_process_group)
        fragments = []
        for name, parameter in _trained(self._engine):
            group, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            master = optimizer.fp32_partitioned_groups_flat[group]
            numel = parameter.ds_numel  # type: ignore[attr-defined]
            start = min(rank * length, numel)
            length = min(length, numel - start)
            for kind, tensor in _kinds(master, _adam_state(optimizer.optimizer, master)):
                part = tensor.data.narrow(0, offset, length)
                fragments.append(Fragment(kind, name, start, numel, part))
        return fragments

    def refresh(self) -> None:
        optimizer = self._engine.optimizer
        for index, master in enumerate(optimizer.fp32_partitioned_groups_flat):
            flat = optimizer.fp16_partitioned_groups_flat[index]
            flat.data.copy_(master.data)
            parameters = optimizer.fp16_partitioned_groups[index]
            for parameter, view in zip(
                parameters, optimizer.unflatten(flat, parameters), strict=True
            ):
                parameter.data = view
        if optimizer.persistent_parameters:
            first = optimizer.persistent_parameters[0]
            first.partition(optimizer.persistent_parameters)
            first.all_gather(optimizer.persistent_parameters)


def _inner_optimizer(engine: Any) -> Any:
    """The torch optimizer inside whatever DeepSpeed wrapped around it."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _loss_scaler(engine: Any) -> Any:
    """What holds `cur_scale`: a scaler of its own at stages 1 to 3, the optimizer at stage 0."""
    if not engine.fp16_enabled():
        return None
    return getattr(engine.optimizer, "loss_scaler", engine.optimizer)


def _trained(engine: Any) -> list[tuple[str, torch.Tensor]]:
    return [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]


def _kinds(master: torch.Tensor, state: dict[str, Any]) -> list[tuple[Kind, torch.Tensor]]:
    return [("fp32", master), *((kind, state[kind]) for kind in MOMENTS)]


def _gradient(master: torch.Tensor) -> torch.Tensor:
    """The flat gradient of a master weight, made where there is none."""
    if master.grad is None:
        master.grad = torch.zeros_like(master.data)
    return master.grad.view(-1)


def _adam_state(optimizer: Any, master: torch.Tensor) -> dict[str, Any]:
    """AdamW makes its state at the first step; a fresh one is made here, so that it can be
    loaded."""
    state = optimizer.state[master]
    if "exp_avg" not in state:
        state["step"] = torch.tensor(0.0)
        for kind in MOMENTS:
            state[kind] = torch.zeros_like(master.data)
    return state


def grad_norm(engine: Any) -> float:
    """Of the last step's gradient before clipping; NaN where DeepSpeed did not compute it."""
    norm = engine.get_global_grad_norm()
    return math.nan if norm is None else float(norm)
