"""The files that a path, glob, directory or URI names, listed alike on the disk and remotely."""

import glob
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit
from urllib.request import url2pathname

from pliant.data.sources.places import SCHEME, Place, reading
from pliant.storage.filesystems import file_system

QUERY = re.compile(r"\?[\w.-]+=[^/]*$")
"""Settings of a file system at the end of a URI, as in s3://bucket/data?region=eu-central-1; any
other question mark is part of a glob."""


class Listed(NamedTuple):
    """A file that was found."""

    path: str
    """Within its file system."""
    name: str
    """Relative to the directory where the search began."""
    size_bytes: int


class Tree(Protocol):
    """A file system, and a pattern of paths in it."""

    @property
    def uri(self) -> str: ...

    @property
    def has_magic(self) -> bool: ...

    def file(self) -> Listed | None:
        """The one file that the pattern is the path of."""

    def directory(self) -> list[Listed] | None:
        """All files below, however deep, where the pattern is the path of a directory; hidden ones
        are left out."""

    def matches(self) -> list[Listed]:
        """All files that the pattern matches."""


def open_tree(pattern: str) -> Tree:
    """The disk, or the file system of a URI. Raises `DataError` where there is no such one."""
    if pattern.startswith("file://"):
        pattern = url2pathname(urlsplit(pattern).path)
    if not SCHEME.match(pattern):
        return Disk(Path(pattern).expanduser().absolute())
    query = QUERY.search(pattern)
    settings = query.group() if query else ""
    fixed, magic = _split(pattern.removesuffix(settings))
    uri = fixed + settings
    return Remote(uri, file_system(uri)[1].rstrip("/"), magic)


def names_in(directory: str, uri: str) -> list[str]:
    """The names of the files of a directory; none where it cannot be listed, which reading a file
    in it does not need."""
    try:
        if not uri:
            return [entry.name for entry in os.scandir(directory) if entry.is_file()]
        from pyarrow.fs import FileSelector

        entries = file_system(uri)[0].get_file_info(FileSelector(directory))
        return [entry.base_name for entry in entries if entry.is_file]
    except OSError:
        return []


@dataclass(frozen=True)
class Disk:
    path: Path
    uri: str = ""

    def __str__(self) -> str:
        return str(self.path)

    @property
    def has_magic(self) -> bool:
        return glob.has_magic(str(self.path))

    def file(self) -> Listed | None:
        return _listed(self.path, self.path.name) if self.path.is_file() else None

    def directory(self) -> list[Listed] | None:
        if not self.path.is_dir():
            return None
        files = (path for path in self.path.rglob("*") if path.is_file())
        found = [_listed(path, str(path.relative_to(self.path))) for path in files]
        return _in_order(file for file in found if not _is_hidden(file.name))

    def matches(self) -> list[Listed]:
        root = _split(str(self.path))[0] or "/"
        paths = {Path(match) for match in glob.glob(str(self.path), recursive=True)}
        return _in_order(
            _listed(path, str(path.relative_to(root))) for path in paths if path.is_file()
        )


@dataclass(frozen=True)
class Remote:
    uri: str
    root: str
    """The part of the path before any pattern, within the file system."""
    magic: str
    """The rest."""

    def __str__(self) -> str:
        return str(Place(self._path, self.uri))

    @property
    def has_magic(self) -> bool:
        return bool(self.magic)

    def file(self) -> Listed | None:
        entry = self._info()
        name = self._path.rpartition("/")[2]
        return Listed(self._path, name, entry.size) if entry.is_file else None

    def directory(self) -> list[Listed] | None:
        if self._info().is_file or self.magic:
            return None
        return [file for file in self._below(deep=True) if not _is_hidden(file.name)] or None

    def matches(self) -> list[Listed]:
        wanted = self.magic.split("/")
        found = self._below(deep=len(wanted) > 1 or "**" in wanted)
        return [file for file in found if _match(file.name.split("/"), wanted)]

    @property
    def _path(self) -> str:
        return f"{self.root}/{self.magic}" if self.magic else self.root

    def _info(self) -> Any:
        with reading(Place(self._path, self.uri)):
            return file_system(self.uri)[0].get_file_info(self._path)

    def _below(self, deep: bool) -> list[Listed]:
        from pyarrow.fs import FileSelector

        selector = FileSelector(self.root, allow_not_found=True, recursive=deep)
        with reading(Place(self.root, self.uri)):
            entries = file_system(self.uri)[0].get_file_info(selector)
        start = len(self.root.strip("/"))
        return _in_order(
            Listed(entry.path, entry.path.strip("/")[start:].strip("/"), entry.size)
            for entry in entries
            if entry.is_file
        )


def _split(pattern: str) -> tuple[str, str]:
    """The parts before the first one with a wildcard, and the rest."""
    parts = pattern.split("/")
    depth = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return "/".join(parts[:depth]), "/".join(parts[depth:])


def _match(parts: list[str], wanted: list[str]) -> bool:
    """Whether a path matches a glob by the rules of Python's `glob`."""
    if not wanted:
        return not parts
    if wanted[0] == "**":
        here = _match(parts, wanted[1:])
        return here or (len(parts) > 0 and parts[0][:1] != "." and _match(parts[1:], wanted))
    if not parts or (parts[0].startswith(".") and not wanted[0].startswith(".")):
        return False
    return fnmatchcase(parts[0], wanted[0]) and _match(parts[1:], wanted[1:])


def _listed(path: Path, name: str) -> Listed:
    return Listed(str(path), name, path.stat().st_size)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _in_order(files: Iterable[Listed]) -> list[Listed]:
    return sorted(files, key=lambda file: file.name.split("/"))
