"""Runs a function as several gloo ranks, each a process of its own."""

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`function(*args)` on every rank of a process group; what each returned, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (world_size, _free_port(), folder, function, args), nprocs=world_size)
        return [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=False)
            for rank in range(world_size)
        ]


def _rank(
    rank: int, world_size: int, port: int, folder: str, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.save(function(*args), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
