"""The files that a spec names, and what their names say of their content."""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

from pliant.data import stdlib_corpus
from pliant.data.sources.checksum_files import is_checksum_file
from pliant.data.sources.parts import Format, SourceFile
from pliant.data.sources.places import COMPRESSIONS, Compression, Place
from pliant.data.sources.trees import Listed, Tree, open_tree
from pliant.errors import DataError

ENDINGS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
}
"""Before the ending of a compressed file, as in .jsonl.gz."""
ABOUT_DATA = {
    "readme.md",
    "readme.txt",
    "license.md",
    "license.txt",
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
}
"""Files that lie beside data in a directory and are none, in lower case. Named one by one, they are
read."""
STDLIB = "stdlib://"

Asked = Format | Literal["auto"]


def find_files(
    source: str | Sequence[str], key: str, format: Asked, corpora: Path
) -> list[SourceFile]:
    """The files of a data set, in the order of `source` and by name within each entry of it.

    An entry is a path, glob, directory or URI. A file that several name belongs to the first. `key`
    is the spec key that names them; `corpora` is where a corpus that pliant makes itself is kept.
    Raises `DataError` where nothing is found or a format is unknown.
    """
    files: dict[Place, SourceFile] = {}
    for origin, pattern in enumerate([source] if isinstance(source, str) else source):
        for place, listed, known in _find(pattern, key, format, corpora):
            file = SourceFile(place, listed.name, known, listed.size_bytes, origin)
            files.setdefault(place, file)
    if not files:
        raise DataError(f"{key} is an empty list. Name at least one file.", key=key)
    return list(files.values())


_Found = tuple[Place, Listed, Format]


def _find(pattern: str, key: str, format: Asked, corpora: Path) -> list[_Found]:
    if pattern == STDLIB:
        path = stdlib_corpus.write(corpora).absolute()
        return [(Place(str(path)), Listed(str(path), STDLIB, path.stat().st_size), "jsonl")]
    tree = open_tree(pattern)
    if (file := tree.file()) is not None:
        return [_the_file(tree, file, key, format)]
    if (files := tree.directory()) is not None:
        return _data_of(tree, files, key, format)
    if tree.has_magic:
        return _matches(tree, key, format)
    raise DataError(
        f"There is no file {tree}, which {key} names. Name an existing file, directory or glob.",
        key=key,
        path=str(tree),
    )


def _the_file(tree: Tree, file: Listed, key: str, format: Asked) -> _Found:
    if is_checksum_file(file.name):
        raise DataError(
            f"{tree}, which {key} names, is named like a checksum file, which is never data. Name "
            "the data itself, or rename the file.",
            key=key,
            path=str(tree),
        )
    return _found(tree, file, key, format)


def _data_of(tree: Tree, files: list[Listed], key: str, format: Asked) -> list[_Found]:
    """Of a directory, the files of a known ending, however deep."""
    data = []
    for file in files:
        known = _known_format(file.name)
        about = is_checksum_file(file.name) or PurePosixPath(file.name).name.lower() in ABOUT_DATA
        if known and format in ("auto", known) and not about:
            data.append(_found(tree, file, key, format))
    if not data:
        wanted = [end for end, known in ENDINGS.items() if format in ("auto", known)]
        raise DataError(
            f"The directory {tree}, which {key} names, holds no data file. Their names end in "
            f"{', '.join(wanted)}, or in one of these and {' or '.join(COMPRESSIONS)}.",
            key=key,
            path=str(tree),
        )
    return data


def _matches(tree: Tree, key: str, format: Asked) -> list[_Found]:
    files = [file for file in tree.matches() if not is_checksum_file(file.name)]
    if not files:
        raise DataError(
            f"No file matches {tree}, which {key} names. Check the pattern and the directory.",
            key=key,
            path=str(tree),
        )
    return [_found(tree, file, key, format) for file in files]


def _found(tree: Tree, file: Listed, key: str, format: Asked) -> _Found:
    place = Place(file.path, tree.uri, _compression(file.name))
    known = _known_format(file.name) if format == "auto" else format
    if known is None:
        raise DataError(
            f"{place}, which {key} names, has no known ending ({', '.join(ENDINGS)}, or one of "
            f"these and {' or '.join(COMPRESSIONS)}). Set data.format to one of "
            f"{', '.join(get_args(Format))}.",
            key=key,
            path=str(place),
        )
    return place, file, known


def _known_format(name: str) -> Format | None:
    path = PurePosixPath(name)
    ending = PurePosixPath(path.stem).suffix if _compression(name) else path.suffix
    return ENDINGS.get(ending.lower())


def _compression(name: str) -> Compression | None:
    return COMPRESSIONS.get(PurePosixPath(name).suffix.lower())
