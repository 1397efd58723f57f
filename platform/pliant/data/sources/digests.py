"""The digests of files, compared with those that came with them."""

import hashlib
import posixpath
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from pliant.data.sources.checksum_files import Stated, stated_in
from pliant.data.sources.parts import SourceFile
from pliant.data.sources.places import BUFFER_BYTES, Place, reading, stored
from pliant.errors import DataError


def checksum(files: Iterable[SourceFile]) -> list[tuple[str, str]]:
    """The name and SHA-256 of each file, in order; of its bytes as they are stored.

    Checksum files beside the data, or above it within the data set, are honoured: raises
    `DataError` where a file's digest is another. Every file is read once.
    """
    known: dict[tuple[str, str], list[Stated]] = {}
    digests: dict[Place, str] = {}
    names = []
    for file in files:
        if file.place not in digests:
            digests[file.place] = _checked(file, _stated(file, known))
        names.append((file.name, digests[file.place]))
    return names


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    return _digests(Place(str(path)), {"sha256"})["sha256"]


def _stated(file: SourceFile, known: dict[tuple[str, str], list[Stated]]) -> list[Stated]:
    """What checksum files say of a file; those of a directory are read once, into `known`."""
    stated: list[Stated] = []
    directory = file.place.path
    for _ in PurePosixPath(file.name).parts:
        directory = posixpath.dirname(directory)
        at = (directory, file.place.uri)
        if at not in known:
            known[at] = stated_in(*at)
        stated += [one for one in known[at] if one.path == file.place.path]
    return stated


def _checked(file: SourceFile, stated: list[Stated]) -> str:
    digests = _digests(file.place, {"sha256", *(one.algorithm for one in stated)})
    for one in stated:
        if digests[one.algorithm] != one.digest:
            raise DataError(
                f"{file.place} has the {one.algorithm.upper()} digest {digests[one.algorithm]}, "
                f"and {one.by} states {one.digest}. Fetch the file again, or correct {one.by}.",
                path=str(file.place),
                found=digests[one.algorithm],
                stated=one.digest,
            )
    return digests["sha256"]


def _digests(place: Place, algorithms: set[str]) -> dict[str, str]:
    hashes = {name: hashlib.new(name, usedforsecurity=False) for name in algorithms}
    with reading(place), stored(place) as file:
        while block := file.read(BUFFER_BYTES):
            for digest in hashes.values():
                digest.update(block)
    return {name: digest.hexdigest() for name, digest in hashes.items()}
