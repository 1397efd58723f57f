"""File systems behind URIs, as pyarrow or fsspec open them."""

import functools
from typing import Any, cast

from pliant.errors import UserError


@functools.cache
def file_system(uri: str) -> tuple[Any, str]:
    """pyarrow's file system of a URI and the path within it, opened once in a process. Raises
    `UserError` for a URI that neither library can open."""
    from pyarrow import ArrowInvalid
    from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem

    try:
        return cast(tuple[Any, str], FileSystem.from_uri(uri))
    except ArrowInvalid:
        pass  # a scheme that fsspec may know
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(uri)
    except (ValueError, ImportError) as error:
        raise UserError(
            f"{uri} names a file system that cannot be opened: {error}. Use a path, s3://bucket/"
            "prefix, gs://bucket/prefix, or install the fsspec package of that name.",
            uri=uri,
        ) from None
    return PyFileSystem(FSSpecHandler(system)), path
