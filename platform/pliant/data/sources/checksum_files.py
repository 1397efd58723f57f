"""Checksum files that come with data: MD5SUMS, SHA256SUMS, checksums.txt, data.jsonl.sha256, ...

Each line is `DIGEST  NAME`, as md5sum and sha256sum write it, or `SHA256 (NAME) = DIGEST`, as BSD's
tools do; a file named for one other file may hold the digest alone. The number of digits tells the
algorithm.
"""

import logging
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass

from pliant.data.sources.places import Place, content, reading
from pliant.data.sources.trees import names_in

ALGORITHMS = {32: "md5", 40: "sha1", 64: "sha256", 128: "sha512"}
"""By hexadecimal digits."""

logger = logging.getLogger(__name__)

_ONE_FILE = re.compile(r"\.(md5|sha1|sha256|sha512)(sum)?$", re.IGNORECASE)
_MANY_FILES = re.compile(r"(md5|sha1|sha256|sha512|check)sums?(\.txt)?$", re.IGNORECASE)
_GNU = re.compile(r"(?P<escaped>\\?)(?P<digest>[0-9A-Fa-f]+)[ \t]+\*?(?P<name>.+)")
_BSD = re.compile(r"(?P<tag>[A-Za-z0-9-]+) ?\((?P<name>.+)\) ?= ?(?P<digest>[0-9A-Fa-f]+)")


@dataclass(frozen=True)
class Stated:
    """What a checksum file says of another file."""

    path: str
    algorithm: str
    digest: str
    by: str
    """The checksum file."""


def is_checksum_file(name: str) -> bool:
    base = posixpath.basename(name)
    return bool(_ONE_FILE.search(base) or _MANY_FILES.match(base))


def stated_in(directory: str, uri: str) -> list[Stated]:
    """What the checksum files of a directory say of the files in and below it."""
    names = sorted(name for name in names_in(directory, uri) if is_checksum_file(name))
    return [
        stated for name in names for stated in _parse(Place(posixpath.join(directory, name), uri))
    ]


def _parse(place: Place) -> Iterator[Stated]:
    with reading(place), content(place) as file:
        text = file.read().decode("utf-8-sig", "surrogateescape")
    about, matched = _ONE_FILE.subn("", place.path)
    for line in text.split("\n"):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, digest = _entry(line) or (posixpath.basename(about) if matched else "", line)
        algorithm = ALGORITHMS.get(len(digest))
        if not name or algorithm is None or not re.fullmatch("[0-9A-Fa-f]+", digest):
            logger.warning("%s: no checksum of a file, so not looked at: %.80r", place, line)
            continue
        path = posixpath.join(posixpath.dirname(place.path), posixpath.normpath(name))
        yield Stated(path, algorithm, digest.lower(), str(place))


def _entry(line: str) -> tuple[str, str] | None:
    """The name and the digest of a line."""
    if match := _BSD.fullmatch(line):
        tag = match["tag"].lower().replace("-", "")
        known = tag == ALGORITHMS.get(len(match["digest"]))
        return (match["name"], match["digest"]) if known else ("", "")
    if match := _GNU.fullmatch(line):
        return (_unescaped(match["name"]) if match["escaped"] else match["name"]), match["digest"]
    return None


def _unescaped(name: str) -> str:
    """md5sum marks a name with a newline or backslash by a backslash before the line."""
    meaning = {r"\n": "\n", r"\r": "\r", r"\\": "\\"}
    return re.sub(r"\\[nr\\]", lambda match: meaning[match[0]], name)
