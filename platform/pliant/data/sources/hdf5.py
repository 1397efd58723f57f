"""HDF5 files: each dataset is a column, named by its path; the i-th entries of all are a record.

Strings, numbers, and arrays of either are read; arrays of numbers may differ in length. Datasets of
a single value, without dimensions, are no columns. It needs the extra `pliant[hdf5]`.
"""

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pliant.data.sources.parts import Chunk, Record, Row, SourceFile
from pliant.data.sources.places import Place, reading, seekable
from pliant.errors import DataError

HDF5 = "a readable HDF5 file"
BATCH_ROWS = 1024


def count(file: SourceFile) -> int:
    with reading(file.place, HDF5), _columns(file.place) as columns:
        lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
        raise DataError(
            f"{file.place} has datasets of several lengths ({found}), and each must have one entry "
            "a record. Put what is no column into a file of its own.",
            path=str(file.place),
        )
    return next(iter(lengths.values()), 0)


def read(chunk: Chunk) -> Iterator[Row]:
    place = str(chunk.place)
    with reading(chunk.place, HDF5), _columns(chunk.place) as columns:
        for begin in range(chunk.begin, chunk.end, BATCH_ROWS):
            end = min(begin + BATCH_ROWS, chunk.end)
            read = {name: column[begin:end] for name, column in columns.items()}
            for i in range(end - begin):
                row = {name: values[i] for name, values in read.items()}
                yield _row(row, f"{place} row {begin + i + 1}")


@contextmanager
def _columns(place: Place) -> Iterator[dict[str, Any]]:
    h5py = _library(place)
    with seekable(place) as source, h5py.File(source, "r") as file:
        columns: dict[str, Any] = {}

        def take(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset) and item.shape:
                columns[name] = item

        file.visititems(take)
        for name, column in columns.items():
            _check_type(h5py, column, f"{place} dataset {name}")
        yield columns


def _library(place: Place) -> Any:
    try:
        return importlib.import_module("h5py")
    except ImportError:
        raise DataError(
            f"{place} is an HDF5 file, and h5py, which reads them, is not installed. Install it: "
            "pip install 'pliant[hdf5]'.",
            path=str(place),
        ) from None


def _check_type(h5py: Any, column: Any, where: str) -> None:
    base = h5py.check_vlen_dtype(column.dtype) or column.dtype
    if h5py.check_string_dtype(column.dtype) is None and np.dtype(base).kind not in "biufS":
        raise DataError(
            f"{where} has the type {column.dtype}, and strings, numbers and arrays of them can be "
            "read. Write it as one of these.",
            where=where,
        )


def _row(values: dict[str, Any], where: str) -> Row:
    record: Record = {}
    broken = []
    for name, value in values.items():
        try:
            record[name] = _plain(value)
        except UnicodeDecodeError:
            broken.append(name)
    if not broken:
        return Row(where, record, None, b"")
    problem = DataError(
        f"{where} is not UTF-8 text in {', '.join(broken)}. Convert the dataset to UTF-8.",
        where=where,
    )
    return Row(where, None, problem, json.dumps(record, default=repr).encode())


def _plain(value: Any) -> Any:
    """A value of Python's own types."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, np.ndarray):
        return [_plain(inner) for inner in value] if value.dtype.kind in "SO" else value.tolist()
    return value.item() if isinstance(value, np.generic) else value
