"""The run directory of a small job, with checkpoints as two ranks would have written them."""

from pathlib import Path
from typing import Any

import torch
import yaml

from fakes.checkpoints import commit, cut
from pliant.accel import attention
from pliant.spec import JobSpec
from pliant.training.digests import digest
from pliant.training.model import build_model

VOCAB = 64


def write_run(run_dir: Path, spec: JobSpec) -> None:
    """What a job leaves that has begun."""
    run_dir.mkdir(parents=True)
    tree = spec.model_dump(mode="json")
    (run_dir / "resolved.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")


def trained_model(spec: JobSpec, seed: int = 1) -> torch.nn.Module:
    """The job's model after some training: everything that is trained has changed."""
    with attention.registered():
        model = build_model(spec, VOCAB)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def save_model(run_dir: Path, model: torch.nn.Module, step: int, **changes: Any) -> Path:
    """Commits a checkpoint of it, each tensor cut in two; the moments are not numbers, so that
    whoever reads them spoils the weights."""
    trained = {n: p.data.view(-1) for n, p in model.named_parameters() if p.requires_grad}
    frozen = digest(p for p in model.parameters() if not p.requires_grad)
    tensors = {f"fp32/{name}": weights for name, weights in trained.items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        tensors |= {f"{kind}/{n}": torch.full_like(w, torch.nan) for n, w in trained.items()}
    tensors |= {
        f"buffer/{name}": buffer.view(-1)
        for name, buffer in model.named_buffers()
        if name in model.state_dict()
    }
    facts = {"frozen_digest": f"{frozen:016x}", **changes}
    checkpoints, ledger = run_dir / "checkpoints", run_dir / "ledger"
    return commit(checkpoints, ledger, step, ranks=cut(tensors, 2), **facts)
