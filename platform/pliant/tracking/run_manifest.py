"""Where a run took place: the code, packages, machine and settings needed to repeat it."""

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from pliant.tracking.redaction import recordable

_RELEVANT = ("CUDA_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_")
"""Variables that change speed or results even though no spec sets them."""


def environment_manifest(spec_env: Mapping[str, str]) -> dict[str, Any]:
    """What this process runs on. It takes well under a second and never raises: what cannot be
    found out is None. Variables that look like secrets are named without their values."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "git": _git(),
        "hardware": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "gpus": _gpus(),
            "cuda": _cuda_version(),
        },
        "env": _environment(spec_env),
        "packages": _packages(),
    }


def _packages() -> dict[str, str]:
    found = {}
    for package in metadata.distributions():
        try:
            found[package.metadata["Name"]] = package.version
        except Exception:  # a half-removed package has no readable metadata
            continue
    return {name: found[name] for name in sorted(found, key=lambda name: str(name).lower())}


def _git() -> dict[str, Any] | None:
    commit = _output("git", "rev-parse", "HEAD")
    if not commit:
        return None
    changes = _output("git", "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> list[dict[str, Any]]:
    """Asked of nvidia-smi: torch would have to be imported, and would open the GPUs."""
    query = "--query-gpu=name,memory.total,driver_version"
    listing = _output("nvidia-smi", query, "--format=csv,noheader,nounits") or ""
    rows = [[part.strip() for part in line.split(",")] for line in listing.splitlines()]
    return [
        {"name": row[0], "memory_mib": row[1], "driver": row[2]} for row in rows if len(row) == 3
    ]


def _cuda_version() -> str | None:
    """The version torch was built for, where this process uses torch."""
    return getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)


def _environment(spec_env: Mapping[str, str]) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k.startswith(_RELEVANT)}
    chosen = {**inherited, **spec_env}
    return {name: recordable(name, str(chosen[name])) for name in sorted(chosen)}


def _output(*command: str) -> str | None:
    """What a program prints; None if it is absent, fails or takes long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2.0, check=False)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
