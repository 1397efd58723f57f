"""From a path or a URI to a storage."""

from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from pliant.storage.local import SPARE_SHARE, LocalStorage, Storage, no_space
from pliant.storage.remote import RemoteStorage, may_pass


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
