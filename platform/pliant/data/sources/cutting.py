"""Files to chunks, and chunks to rows: what each format's module is asked for.

Where a record is a stretch of the file's decompressed bytes, a chunk is a stretch of them; else it
is a run of rows. Neither depends on the machine. A chunk of a compressed file is read from the
file's start, and what lies before it is thrown away as it comes.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from pliant.data.sources import columnar, csv_tables, hdf5, json_arrays, lines, tfrecords
from pliant.data.sources.parts import Chunk, Format, Row, SourceFile, Span, TextUnit

SPANS: dict[Format, Callable[[SourceFile, TextUnit], Iterator[Span]]] = {
    "jsonl": lines.jsonl_spans,
    "json": json_arrays.spans,
    "csv": csv_tables.spans,
    "tsv": csv_tables.spans,
    "text": lines.text_spans,
    "tfrecord": tfrecords.spans,
}
"""Where the records of a file lie, found in one pass over it."""
COUNTS: dict[Format, Callable[[SourceFile], int]] = {
    "parquet": columnar.count_parquet,
    "arrow": columnar.count_arrow,
    "hdf5": hdf5.count,
}
"""The rows of a file."""
READERS: dict[Format, Callable[[Chunk], Iterator[Row]]] = {
    "jsonl": lines.read_jsonl,
    "json": json_arrays.read,
    "parquet": columnar.read_parquet,
    "arrow": columnar.read_arrow,
    "csv": csv_tables.read,
    "tsv": csv_tables.read,
    "text": lines.read_text,
    "tfrecord": tfrecords.read,
    "hdf5": hdf5.read,
}


def cut(files: Iterable[SourceFile], text_unit: TextUnit, max_records: int) -> list[Chunk]:
    """All records of `files` in order, in chunks of at most `max_records` of one file each.

    Raises `DataError` where a file's records cannot be told apart.
    """
    return [chunk for file in files for chunk in _cut_file(file, text_unit, max_records)]


def read_chunk(chunk: Chunk) -> Iterator[Row]:
    """The raw records of a chunk, each with its place or with what is wrong with it.

    Plain text becomes `{"text": ...}`. Raises `DataError` where the rest of the file cannot be
    read.
    """
    return READERS[chunk.format](chunk)


def _cut_file(file: SourceFile, text_unit: TextUnit, max_records: int) -> Iterator[Chunk]:
    if file.format in SPANS:
        spans = SPANS[file.format](file, text_unit)
        while run := list(islice(spans, max_records)):
            begin, end, first = run[0].begin, run[-1].end, run[0].number
            yield Chunk(file.place, file.format, text_unit, begin, end, first, len(run))
    else:
        rows = COUNTS[file.format](file)
        for begin in range(0, rows, max_records):
            end = min(begin + max_records, rows)
            yield Chunk(file.place, file.format, text_unit, begin, end, begin + 1, end - begin)
