"""The files that a spec names, cut into chunks that always hold the same raw records.

A chunk is the unit of preparation: one task reads one chunk and writes one shard of each split.
"""

import glob
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from pliant.data import stdlib_corpus
from pliant.errors import DataError

Format = Literal["jsonl", "json", "parquet", "text"]
TextUnit = Literal["line", "paragraph", "file"]
Record = dict[str, Any]

ENDINGS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
STDLIB = "stdlib://"
BOM = b"\xef\xbb\xbf"
PARQUET_BATCH_ROWS = 1024


@dataclass(frozen=True)
class SourceFile:
    """One file of a data set."""

    path: Path
    name: str
    """Its path within the data set: the same wherever the data lies."""
    format: Format


@dataclass(frozen=True)
class Chunk:
    """A run of records of one file."""

    path: Path
    format: Format
    text_unit: TextUnit
    """What one record is in plain text; the other formats do not look at it."""
    begin: int
    end: int
    """Byte offsets where records are lines of a file, else rows counted from 0."""
    first: int
    """The line or row of the first record, counted from 1 as people do."""
    count: int
    """Records."""


def find_files(
    source: str | list[str], key: str, format: Format | Literal["auto"], corpora: Path
) -> list[SourceFile]:
    """The files of a data set, each once, in the order of `source` and by name within it.

    `key` is the spec key that names them; `corpora` is where a corpus that pliant makes itself is
    kept. Raises `DataError` where nothing is found or the format is unknown.
    """
    patterns = [source] if isinstance(source, str) else source
    files: dict[Path, SourceFile] = {}
    for pattern in patterns:
        for file in _find(pattern, key, format, corpora):
            files.setdefault(file.path, file)
    if not files:
        raise DataError(f"{key} is an empty list. Name at least one file.", key=key)
    return list(files.values())


def checksum(files: Iterable[SourceFile]) -> list[tuple[str, str]]:
    """The name and SHA-256 of each file, in order."""
    return [(file.name, sha256_of(file.path)) for file in files]


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    with _open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cut(files: Iterable[SourceFile], text_unit: TextUnit, max_records: int) -> list[Chunk]:
    """All records of `files` in order, in chunks of at most `max_records` of one file each."""
    return [chunk for file in files for chunk in _cut_file(file, text_unit, max_records)]


def read_chunk(chunk: Chunk) -> Iterator[tuple[Record, str]]:
    """The raw records of a chunk, each with its place ("data/file.jsonl line 17").

    Plain text becomes `{"text": ...}`. Raises `DataError` at a record that cannot be read.
    """
    readers = {
        "jsonl": _read_jsonl,
        "json": _read_array,
        "parquet": _read_parquet,
        "text": _read_text,
    }
    return readers[chunk.format](chunk)


# Finding


def _find(
    pattern: str, key: str, format: Format | Literal["auto"], corpora: Path
) -> list[SourceFile]:
    if pattern == STDLIB:
        return [SourceFile(stdlib_corpus.write(corpora), STDLIB, "jsonl")]
    path = Path(pattern).expanduser().absolute()
    if path.is_file():
        return [SourceFile(path, path.name, _format_of(path, key, format))]
    if path.is_dir():
        return _find_below(path, key, format)
    if glob.has_magic(pattern):
        return _find_matches(path, key, format)
    raise DataError(
        f"There is no file {path}, which {key} names. Name an existing file, directory or glob.",
        key=key,
        path=path,
    )


def _find_below(directory: Path, key: str, format: Format | Literal["auto"]) -> list[SourceFile]:
    """Files of a known ending, hidden ones left out, however deep."""
    files = []
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        hidden = any(part.startswith(".") for part in name.parts)
        known = ENDINGS.get(path.suffix.lower())
        if path.is_file() and not hidden and known and format in ("auto", known):
            files.append(SourceFile(path, str(name), known))
    if not files:
        wanted = [end for end, known in ENDINGS.items() if format in ("auto", known)]
        raise DataError(
            f"The directory {directory}, which {key} names, holds no data file. Their names end in "
            f"{', '.join(wanted)}.",
            key=key,
            path=directory,
        )
    return files


def _find_matches(path: Path, key: str, format: Format | Literal["auto"]) -> list[SourceFile]:
    parts = path.parts
    depth = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:depth])
    matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
    files = [match for match in matches if match.is_file()]
    if not files:
        raise DataError(
            f"No file matches {path}, which {key} names. Check the pattern and the directory.",
            key=key,
            path=path,
        )
    return [
        SourceFile(file, str(file.relative_to(root)), _format_of(file, key, format))
        for file in files
    ]


def _format_of(path: Path, key: str, format: Format | Literal["auto"]) -> Format:
    if format != "auto":
        return format
    try:
        return ENDINGS[path.suffix.lower()]
    except KeyError:
        raise DataError(
            f"{path}, which {key} names, has no known ending ({', '.join(ENDINGS)}). Set "
            f"data.format to one of {', '.join(get_args(Format))}.",
            key=key,
            path=path,
        ) from None


# Cutting


def _cut_file(file: SourceFile, text_unit: TextUnit, max_records: int) -> list[Chunk]:
    if file.format in ("jsonl", "text"):
        return _cut_lines(file, text_unit, max_records)
    rows = _count_rows(file)
    chunks = []
    for begin in range(0, rows, max_records):
        end = min(begin + max_records, rows)
        chunks.append(Chunk(file.path, file.format, text_unit, begin, end, begin + 1, end - begin))
    return chunks


def _count_rows(file: SourceFile) -> int:
    if file.format == "json":
        return len(_load_array(file.path))
    with _open_parquet(file.path) as table:
        return int(table.metadata.num_rows)


def _cut_lines(file: SourceFile, text_unit: TextUnit, max_records: int) -> list[Chunk]:
    unit = "line" if file.format == "jsonl" else text_unit
    starts: list[tuple[int, int]] = []
    records = 0
    end = file.path.stat().st_size
    for offset, number, _ in _units(_lines(file.path, 0, end, 1), unit):
        if records % max_records == 0:
            starts.append((offset, number))
        records += 1
    ends = [offset for offset, _ in starts[1:]] + [end]
    chunks = []
    for i, (begin, number) in enumerate(starts):
        count = min(max_records, records - i * max_records)
        chunks.append(Chunk(file.path, file.format, text_unit, begin, ends[i], number, count))
    return chunks


# Reading


def _read_jsonl(chunk: Chunk) -> Iterator[tuple[Record, str]]:
    lines = _lines(chunk.path, chunk.begin, chunk.end, chunk.first)
    for _, number, unit in _units(lines, "line"):
        where = f"{chunk.path} line {number}"
        text = _decode(unit[0], chunk.path, number)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where} is not JSON: {_problem(error)}. Every line must hold one JSON object; "
                "repair or remove it.",
                path=chunk.path,
                line=number,
            ) from None
        yield _object(value, where), where


def _read_array(chunk: Chunk) -> Iterator[tuple[Record, str]]:
    values = _load_array(chunk.path)[chunk.begin : chunk.end]
    for number, value in enumerate(values, chunk.first):
        where = f"{chunk.path} record {number}"
        yield _object(value, where), where


def _read_parquet(chunk: Chunk) -> Iterator[tuple[Record, str]]:
    with _open_parquet(chunk.path) as table:
        row, groups = _groups_of(table.metadata, chunk)
        try:
            for batch in table.iter_batches(PARQUET_BATCH_ROWS, row_groups=groups):
                low = max(chunk.begin - row, 0)
                high = min(chunk.end - row, batch.num_rows)
                rows = batch.slice(low, max(high - low, 0)).to_pylist()
                for number, record in enumerate(rows, row + low + 1):
                    yield record, f"{chunk.path} row {number}"
                row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise _bad_parquet(chunk.path, error) from None


def _groups_of(metadata: Any, chunk: Chunk) -> tuple[int, list[int]]:
    """The row groups that hold a chunk's rows, and the row at which the first of them starts."""
    groups: list[int] = []
    start = row = 0
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        if row < chunk.end and chunk.begin < row + rows:
            start = start if groups else row
            groups.append(group)
        row += rows
    return start, groups


def _read_text(chunk: Chunk) -> Iterator[tuple[Record, str]]:
    lines = _lines(chunk.path, chunk.begin, chunk.end, chunk.first)
    for _, number, unit in _units(lines, chunk.text_unit):
        decoded = [_decode(line, chunk.path, number + i) for i, line in enumerate(unit)]
        yield {"text": "\n".join(decoded).rstrip("\n")}, f"{chunk.path} line {number}"


def _lines(path: Path, begin: int, end: int, number: int) -> Iterator[tuple[int, int, bytes]]:
    """Offset, number and bytes of each line, its end removed.

    A line ends at a newline only: the other characters at which Python would split a text are
    legal inside JSON strings.
    """
    with _open(path) as file:
        file.seek(begin)
        offset = begin
        while offset < end and (line := file.readline()):
            bare = line.removeprefix(BOM) if offset == 0 else line
            yield offset, number, bare.removesuffix(b"\n").removesuffix(b"\r")
            offset += len(line)
            number += 1


def _units(
    lines: Iterable[tuple[int, int, bytes]], text_unit: TextUnit
) -> Iterator[tuple[int, int, list[bytes]]]:
    """Lines gathered into records, with offset and number of each one's first line.

    Blank lines part paragraphs and are no record themselves; within a whole file they stay.
    """
    unit: list[bytes] = []
    first = (0, 0)
    for offset, number, line in lines:
        blank = not line.strip()
        if unit and (text_unit == "line" or (blank and text_unit == "paragraph")):
            yield (*first, unit)
            unit = []
        if unit or not blank:
            first = first if unit else (offset, number)
            unit.append(line)
    if unit:
        yield (*first, unit)


def _load_array(path: Path) -> list[Any]:
    with _open(path) as file:
        data = file.read().removeprefix(BOM)
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _not_utf8(path, data.count(b"\n", 0, error.start) + 1) from None
    except (ValueError, RecursionError) as error:
        line = f" line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(
            f"{path}{line} is not JSON: {_problem(error)}. A .json file must be one array of "
            "objects; where each line is an object of its own, set data.format to jsonl.",
            path=path,
        ) from None
    if not isinstance(value, list):
        raise DataError(
            f"{path} holds {_kind(value)}, and an array of objects was needed. Put the records in "
            "[ ], or set data.format to jsonl where each line is an object of its own.",
            path=path,
        )
    return value


def _open(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. The data must be readable on every node.",
            path=path,
        ) from None


def _open_parquet(path: Path) -> pq.ParquetFile:
    _open(path).close()
    try:
        return pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise _bad_parquet(path, error) from None


def _bad_parquet(path: Path, error: Exception) -> DataError:
    problem = str(error).splitlines()[0].rstrip(".")
    return DataError(
        f"{path} is not a readable Parquet file: {problem}. Write it again, or set data.format to "
        "what it is.",
        path=path,
    )


def _decode(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        raise _not_utf8(path, number) from None


def _not_utf8(path: Path, line: int) -> DataError:
    return DataError(
        f"{path} line {line} is not UTF-8 text. Convert the file to UTF-8.", path=path, line=line
    )


def _object(value: Any, where: str) -> Record:
    if not isinstance(value, dict):
        raise DataError(
            f"{where} is {_kind(value)}, and every record must be an object with columns. "
            'Write, for example, {"text": ...}.',
            where=where,
        )
    return value


def _problem(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _kind(value: Any) -> str:
    """A JSON value's type, in words."""
    if value is None:
        return "null"
    words = {bool: "a truth value", str: "a string", list: "an array", dict: "an object"}
    return words.get(type(value), "a number")
