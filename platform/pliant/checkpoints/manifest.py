"""What a checkpoint says of itself; its presence is the commit marker."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pliant.errors import FilesDamaged
from pliant.storage.local import Storage
from pliant.storage.opening import is_outage, open_storage

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
    """Empty where it is not to be compared: the file lies in memory."""
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
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest measurements when it was saved, `eval_loss` for one; retention looks at them."""
    digests: dict[str, str] = field(default_factory=dict)
    """kind/name -> the digest of some of the tensors, however they are cut (`digests`)."""
    format: int = field(default=FORMAT)

    def write(self, storage: Storage | Path, directory: str = "") -> None:
        """Commits the checkpoint in `directory`: nothing is there, or the whole manifest."""
        body = asdict(self)
        text = json.dumps({**body, "sha256": _digest(body)}, indent=1)
        open_storage(storage).write(manifest_in(directory), text.encode())

    @staticmethod
    def read(storage: Storage | Path, directory: str = "") -> "Manifest":
        """Raises `FilesDamaged` where it is not what was written, and an `OSError` where a
        remote storage does not answer: an outage is no damage, to be passed over."""
        storage, name = open_storage(storage), manifest_in(directory)
        path = storage.place(name)
        try:
            body = json.loads(storage.read(name))
            stated = body.pop("sha256")
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            if is_outage(storage, error):
                raise
            raise FilesDamaged(f"{path} cannot be read: {error}", path=path) from None
        if _digest(body) != stated:
            raise FilesDamaged(f"{path} was altered since it was written.", path=path)
        if body["format"] != FORMAT:
            raise FilesDamaged(
                f"{path} has the format {body['format']}; this version reads {FORMAT}.", path=path
            )
        body["files"] = tuple(
            RankFile(**{**file, "chunks": tuple(Chunk(**chunk) for chunk in file["chunks"])})
            for file in body["files"]
        )
        body["ledger"] = tuple(LedgerFile(**file) for file in body["ledger"])
        return Manifest(**body)


def manifest_in(directory: str) -> str:
    """The name of a checkpoint's manifest."""
    return f"{directory}/{MANIFEST}" if directory else MANIFEST


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
