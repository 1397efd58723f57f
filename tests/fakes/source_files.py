"""Source files of every format, written for tests, and read back through `pliant.data.sources`."""

import csv
import gzip
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fakes.tf_examples import tfrecord_file
from pliant.data.sources import Row, cut, find_files, read_chunk
from pliant.errors import DataError


def rows_of(
    source: Any, format: str = "auto", text_unit: str = "paragraph", max_records: int = 65536
) -> list[list[Row]]:
    """The rows of each chunk; a chunk is pickled before it is read, as on its way to a node."""
    files = find_files(
        source if isinstance(source, list) else str(source),
        "data.train",
        format,  # type: ignore[arg-type]
        Path("unused"),
    )
    chunks = cut(files, text_unit, max_records)  # type: ignore[arg-type]
    return [list(read_chunk(pickle.loads(pickle.dumps(chunk)))) for chunk in chunks]


def records_of(source: Any, **settings: Any) -> list[Any]:
    return [row.record_or_raise() for rows in rows_of(source, **settings) for row in rows]


def message_of(source: Any, **settings: Any) -> str:
    """The sentence with which all of a source, or a row of it, is refused."""
    with pytest.raises(DataError) as caught:
        records_of(source, **settings)
    return str(caught.value)


def problems_of(source: Any, **settings: Any) -> list[str | None]:
    rows = [row for rows in rows_of(source, **settings) for row in rows]
    return [row.problem and str(row.problem) for row in rows]


def written(path: Path, records: list[dict[str, Any]]) -> Path:
    """`records` in the format, and compressed in the way, that the path's endings say."""
    first, *rest = path.suffixes
    plain = path.with_name(path.name.removesuffix("".join(rest)))
    _WRITERS[first](plain, records)
    for ending in rest:
        path.write_bytes(compressed(plain.read_bytes(), ending))
    return path


def compressed(content: bytes, ending: str) -> bytes:
    if ending == ".gz":
        return gzip.compress(content)
    return pa.Codec("zstd").compress(content, asbytes=True)  # type: ignore[no-any-return]


def _jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in records))


def _json(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(records, indent=2))


def _parquet(path: Path, records: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=4)


def _arrow_stream(path: Path, records: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(records)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def _arrow_file(path: Path, records: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(records)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def _table(path: Path, records: list[dict[str, Any]]) -> None:
    text = io.StringIO(newline="")
    separator = "\t" if path.suffix == ".tsv" else ","
    writer = csv.DictWriter(text, list(records[0]), delimiter=separator)
    writer.writeheader()
    writer.writerows(records)
    path.write_bytes(text.getvalue().encode())


def _tfrecord(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_bytes(tfrecord_file(records))


def _hdf5(path: Path, records: list[dict[str, Any]]) -> None:
    h5py = pytest.importorskip("h5py", reason="h5py, which reads HDF5 files, is not installed")
    with h5py.File(path, "w") as file:
        for name in records[0]:
            file.create_dataset(name, data=[record[name] for record in records])


_WRITERS = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".parquet": _parquet,
    ".arrow": _arrow_stream,
    ".feather": _arrow_file,
    ".csv": _table,
    ".tsv": _table,
    ".tfrecord": _tfrecord,
    ".hdf5": _hdf5,
}
ENDINGS = list(_WRITERS)
