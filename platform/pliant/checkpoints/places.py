"""Where a job's checkpoints lie, and whether they can lie there."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from pliant.checkpoints.remote_storage import RemoteStorage, may_pass
from pliant.checkpoints.storage import SPARE_SHARE, LocalStorage, Storage, no_space
from pliant.errors import UserError


def open_storage(place: "str | Path | Storage") -> Storage:
    """The storage at a path or URI: `s3://bucket/prefix`, `gs://...`, `file:///...`, or another
    name of pyarrow's or fsspec's. Nothing is read yet."""
    if isinstance(place, Storage):
        return place
    if isinstance(place, Path) or "://" not in place:
        return LocalStorage(Path(place))
    if place.startswith("file://"):
        return LocalStorage(Path(url2pathname(urlsplit(place).path)))
    return RemoteStorage(place)


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


def need_space(place: Storage | Path, size_bytes: int) -> None:
    """Raises `NoSpace` where `size_bytes` do not fit."""
    storage = open_storage(place)
    free = storage.free_bytes()
    if free is not None and free < size_bytes * SPARE_SHARE:
        raise no_space(storage, size_bytes)


def is_outage(storage: Storage, error: Exception) -> bool:
    """Whether a storage could not be reached, rather than what was asked for found wanting. A local
    disk that cannot be read is damage."""
    return isinstance(storage, RemoteStorage) and isinstance(error, OSError) and may_pass(error)
