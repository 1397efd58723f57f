"""Whether a job may go on from a checkpoint."""

from typing import Any

from pliant.checkpoints.reader import Checkpoint
from pliant.errors import CheckpointMismatch
from pliant.spec import JobSpec
from pliant.spec.resolve import flatten

_ADVICE = "Restore it, or give the job another name to start afresh."


def job_identity(spec: JobSpec, data_key: str) -> dict[str, Any]:
    """What must not change between a checkpoint and the run that goes on from it: the model, the
    order of the data and the make-up of a step follow from these. World size and ZeRO stage may
    change, and so may the place where the model lies."""
    return {
        **flatten(spec.model.model_dump(exclude={"path"}), "model."),
        "data": data_key,
        "data.seq_len": spec.data.seq_len,
        "data.packing": spec.data.packing,
        "data.window": spec.data.window,
        "training.global_batch_size": spec.training.global_batch_size,
        "training.micro_batch_size": spec.training.micro_batch_size,
        "training.seed": spec.training.seed,
    }


def check_identity(
    checkpoint: Checkpoint, identity: dict[str, Any], frozen_digest: str | None = None
) -> None:
    """Raises `CheckpointMismatch` and names the first difference. The driver does not know the
    frozen weights and leaves them to the workers."""
    manifest = checkpoint.manifest
    for key in [*identity, *sorted(manifest.identity.keys() - identity.keys())]:
        saved, value = manifest.identity.get(key), identity.get(key)
        if saved == value:
            continue
        if key == "data":
            found = "The training data or how it is tokenized has changed"
        else:
            found = f"{key} was {saved} and is now {value}"
        raise CheckpointMismatch(f"{found} since {checkpoint.directory}. {_ADVICE}", key=key)
    if frozen_digest is not None and manifest.frozen_digest != frozen_digest:
        raise CheckpointMismatch(
            f"The frozen weights are not those that {checkpoint.directory} was trained on. "
            f"{_ADVICE}",
            key="model",
        )
