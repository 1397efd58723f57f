"""Parquet and Arrow files, which hold columns; a row of them is a record.

Arrow files are IPC files (Feather is one) or IPC streams, told apart by how they begin. A row group
or batch at a time is in memory.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pliant.data.sources.parts import Chunk, Row, SourceFile
from pliant.data.sources.places import Place, content, reading, seekable
from pliant.errors import DataError

BATCH_ROWS = 1024
PARQUET = "a readable Parquet file"
ARROW = "a readable Arrow file"
IPC_FILE_MAGIC = b"ARROW1"


def count_parquet(file: SourceFile) -> int:
    with reading(file.place, PARQUET), _parquet(file.place) as table:
        return int(table.metadata.num_rows)


def read_parquet(chunk: Chunk) -> Iterator[Row]:
    with reading(chunk.place, PARQUET), _parquet(chunk.place) as table:
        start, groups = _groups_of(table.metadata, chunk)
        yield from _rows(table.iter_batches(BATCH_ROWS, row_groups=groups), start, chunk)


def count_arrow(file: SourceFile) -> int:
    with reading(file.place, ARROW), _arrow_batches(file.place) as batches:
        return sum(batch.num_rows for batch in batches)


def read_arrow(chunk: Chunk) -> Iterator[Row]:
    """What lies before the chunk is read, batch by batch, and not looked at."""
    with reading(chunk.place, ARROW), _arrow_batches(chunk.place) as batches:
        yield from _rows(batches, 0, chunk)


@contextmanager
def _parquet(place: Place) -> Iterator[Any]:
    with (
        _mapped(place) as source,
        pq.ParquetFile(source, page_checksum_verification=True) as table,
    ):
        yield table


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


@contextmanager
def _arrow_batches(place: Place) -> Iterator[Iterator[Any]]:
    with content(place) as source:
        is_stream = source.read(len(IPC_FILE_MAGIC)) != IPC_FILE_MAGIC
    with ExitStack() as stack:
        if is_stream:
            stream = stack.enter_context(content(place) if place.compression else _mapped(place))
            yield iter(stack.enter_context(pa.ipc.open_stream(stream)))
        else:
            file = stack.enter_context(pa.ipc.open_file(stack.enter_context(_mapped(place))))
            yield (file.get_batch(i) for i in range(file.num_record_batches))


@contextmanager
def _mapped(place: Place) -> Iterator[Any]:
    """A file to seek in: mapped into memory where it lies on the disk as it is."""
    if place.uri or place.compression:
        with seekable(place) as file:
            yield file
    else:
        with pa.memory_map(place.path) as file:
            yield file


def _rows(batches: Iterable[Any], row: int, chunk: Chunk) -> Iterator[Row]:
    """A chunk's rows of `batches`, the first of which is row `row` of the file, counted from 0."""
    name = str(chunk.place)
    for batch in batches:
        _check_names(batch.schema.names, name)
        low, high = max(chunk.begin - row, 0), min(chunk.end - row, batch.num_rows)
        for begin in range(low, high, BATCH_ROWS):
            part = batch.slice(begin, min(BATCH_ROWS, high - begin))
            yield from _values(part, name, row + begin + 1)
        row += batch.num_rows
        if row >= chunk.end:
            return


def _check_names(columns: list[str], name: str) -> None:
    if len(set(columns)) < len(columns):
        raise DataError(
            f"{name} names a column twice: {', '.join(columns)}. Give every column a name of its "
            "own.",
            path=name,
        )


def _values(part: Any, name: str, first: int) -> Iterator[Row]:
    """Files may hold strings that are not UTF-8; then each row is looked at by itself."""
    try:
        records = part.to_pylist()
    except UnicodeDecodeError:
        for i in range(part.num_rows):
            yield _value(part.slice(i, 1), f"{name} row {first + i}")
    else:
        for number, record in enumerate(records, first):
            yield Row(f"{name} row {number}", record, None, b"")


def _value(row: Any, where: str) -> Row:
    record, broken = {}, []
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            record[name] = column.to_pylist()[0]
        except UnicodeDecodeError:
            broken.append(name)
    if not broken:
        return Row(where, record, None, b"")
    problem = DataError(
        f"{where} is not UTF-8 text in {', '.join(broken)}. Convert the column, or store it as "
        "binary if it is no text.",
        where=where,
    )
    return Row(where, None, problem, json.dumps(record, default=repr).encode())
