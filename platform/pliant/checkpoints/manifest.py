"""What a checkpoint says of itself; its presence is the commit marker."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pliant.errors import CheckpointDamaged
from pliant.files import sync_to_disk, write_atomically

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Chunk:
    """Where in a file a fragment lies."""

    key: str
    """kind/name of the whole tensor."""
    start: int
    length: int

    @property
    def entry(self) -> str:
        """Its name within the safetensors file."""
        return f"{self.key}:{self.start}"


@dataclass(frozen=True)
class RankFile:
    """One rank's safetensors file."""

    file: str
    size_bytes: int
    sha256: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class LedgerFile:
    """The record of the pieces trained since the checkpoint before."""

    file: str
    size_bytes: int
    sha256: str
    first_step: int
    last_step: int


@dataclass(frozen=True)
class Manifest:
    """Everything but the tensors."""

    step: int
    """Optimizer steps done."""
    attempt: int
    world_size: int
    zero_stage: int
    epoch: int
    pack: int
    """Our place in the data: packs of the epoch that are done."""
    tensors: dict[str, int]
    """kind/name -> number of elements, of every tensor that was saved."""
    frozen_digest: str
    """Of the parameters that are not trained and so not saved; they are built again on resume."""
    identity: dict[str, Any]
    """What a job must have in common with this checkpoint to go on from it."""
    optimizer: dict[str, Any]
    """Its step count and the settings of each parameter group."""
    progress: dict[str, Any]
    """Counters that go on after a resume."""
    files: tuple[RankFile, ...]
    ledger: tuple[LedgerFile, ...]
    """All ledger files up to this step, oldest first."""
    format: int = field(default=FORMAT)

    def write(self, directory: Path) -> None:
        """Commits the checkpoint: synced, then renamed into place."""
        body = asdict(self)
        text = json.dumps({**body, "sha256": _digest(body)}, indent=1)
        write_atomically(directory / MANIFEST, text.encode())
        sync_to_disk(directory.parent)  # where the directory itself is entered

    @staticmethod
    def read(directory: Path) -> "Manifest":
        """Raises `CheckpointDamaged` where it is not what was written."""
        path = directory / MANIFEST
        try:
            body = json.loads(path.read_bytes())
            stated = body.pop("sha256")
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointDamaged(f"{path} cannot be read: {error}", path=str(path)) from None
        if _digest(body) != stated:
            raise CheckpointDamaged(f"{path} was altered since it was written.", path=str(path))
        if body["format"] != FORMAT:
            raise CheckpointDamaged(
                f"{path} has the format {body['format']}; this version reads {FORMAT}.",
                path=str(path),
            )
        body["files"] = tuple(
            RankFile(**{**file, "chunks": tuple(Chunk(**chunk) for chunk in file["chunks"])})
            for file in body["files"]
        )
        body["ledger"] = tuple(LedgerFile(**file) for file in body["ledger"])
        return Manifest(**body)


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
