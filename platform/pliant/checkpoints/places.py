"""Where a job's checkpoints and its ledger lie."""

from dataclasses import dataclass
from pathlib import Path

from pliant.errors import UserError
from pliant.storage.local import Storage
from pliant.storage.opening import open_storage


@dataclass(frozen=True)
class Places:
    """Where one job's checkpoints and ledger files lie."""

    checkpoints: Storage
    ledger: Storage


def places_of(run_dir: Path, storage: str | None) -> Places:
    """In the run directory, or below `storage` (the spec's `checkpoint.storage`) in a directory
    that is named for the run."""
    root = open_storage(run_dir) if storage is None else open_storage(storage).below(run_dir.name)
    return Places(root.below("checkpoints"), root.below("ledger"))


def check_usable(storage: Storage) -> None:
    """Raises `UserError` where nothing can be written, before a job is started that would find out
    at its first checkpoint."""
    try:
        storage.write(".probe", b"pliant")
        storage.delete(".probe")
    except OSError as error:
        raise UserError(
            f"{storage.place()} cannot be written: {error}. Checkpoints are kept there; check "
            "checkpoint.storage, or --runs-dir, and the credentials in the environment.",
            place=storage.place(),
        ) from None
