"""TFRecord files of `tf.train.Example`, read without TensorFlow.

A record is its length, the length's checksum, the data, the data's checksum; both are checked. Each
feature is a column. Bytes are text where they are UTF-8, and a feature of one text is that text;
numbers are always a list, so that a column of token ids stays one when a row has a single id.
"""

import struct
from collections.abc import Iterator
from functools import cache
from typing import Any, BinaryIO, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import DecodeError

from pliant.data.sources.crc32c import masked_crc32c
from pliant.data.sources.parts import (
    MAX_RECORD_BYTES,
    Chunk,
    Record,
    Row,
    SourceFile,
    Span,
    TextUnit,
    row_of,
)
from pliant.data.sources.places import Place, content, reading
from pliant.errors import DataError

_LENGTH = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")


class _Framed(NamedTuple):
    begin: int
    end: int
    data: bytes
    checksum: int


def spans(file: SourceFile, text_unit: TextUnit) -> Iterator[Span]:
    with reading(file.place), content(file.place) as source:
        for number, framed in enumerate(_framed(source, file.place, 0, None), 1):
            yield Span(framed.begin, framed.end, number)


def read(chunk: Chunk) -> Iterator[Row]:
    name = str(chunk.place)
    with reading(chunk.place), content(chunk.place, chunk.begin) as source:
        records = _framed(source, chunk.place, chunk.begin, chunk.end)
        for number, framed in enumerate(records, chunk.first):
            yield _row(framed, f"{name} record {number}")


def _framed(source: BinaryIO, place: Place, begin: int, end: int | None) -> Iterator[_Framed]:
    """The records between two offsets. Raises `DataError` where the next one cannot be found."""
    while (end is None or begin < end) and (header := source.read(_LENGTH.size)):
        if len(header) < _LENGTH.size:
            raise _torn(place, begin)
        length, checksum = _LENGTH.unpack(header)
        if masked_crc32c(header[:8]) != checksum:
            raise _no_tfrecord(place, begin)
        if length > MAX_RECORD_BYTES:
            raise _too_long(place, begin, length)
        data = source.read(length + _CHECKSUM.size)
        if len(data) < length + _CHECKSUM.size:
            raise _torn(place, begin)
        after = begin + len(header) + len(data)
        yield _Framed(begin, after, data[:length], _CHECKSUM.unpack_from(data, length)[0])
        begin = after


def _row(framed: _Framed, where: str) -> Row:
    if masked_crc32c(framed.data) == framed.checksum:
        return row_of(_parse, framed.data, where)
    problem = DataError(
        f"{where} is damaged: its CRC-32C is not the one that was written. Fetch or write the file "
        "again.",
        where=where,
    )
    return Row(where, None, problem, framed.data)


def _parse(raw: bytes, where: str) -> Record:
    example = _example_class()()
    try:
        example.ParseFromString(raw)
    except DecodeError as error:
        raise DataError(
            f"{where} is no tf.train.Example: {error}. Write the file with tf.io.TFRecordWriter "
            "and tf.train.Example.",
            where=where,
        ) from None
    return {
        entry.key.decode("utf-8", "replace"): _value(entry.value)
        for entry in example.features.feature
    }


def _value(feature: Any) -> Any:
    kind = feature.WhichOneof("kind")
    if kind is None:
        return None
    values = list(getattr(feature, kind).value)
    if kind != "bytes_list":
        return values
    texts = [_text(value) for value in values]
    return texts[0] if len(texts) == 1 else texts


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value


@cache
def _example_class() -> Any:
    """The message `tf.train.Example`; a map is a list of entries on the wire."""
    file = json_format.ParseDict(_SCHEMA, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pliant.Example"))


def _field(name: str, number: int, type: str, repeated: bool = False, **more: Any) -> Any:
    label = "LABEL_REPEATED" if repeated else "LABEL_OPTIONAL"
    if type.startswith("TYPE_"):
        return {"name": name, "number": number, "label": label, "type": type, **more}
    typed = {"type": "TYPE_MESSAGE", "typeName": f".pliant.{type}"}
    return {"name": name, "number": number, "label": label, **typed, **more}


_SCHEMA = {
    "name": "pliant/example.proto",
    "package": "pliant",
    "syntax": "proto3",
    "messageType": [
        {"name": "Example", "field": [_field("features", 1, "Features")]},
        {"name": "Features", "field": [_field("feature", 1, "Entry", repeated=True)]},
        {
            "name": "Entry",
            "field": [_field("key", 1, "TYPE_BYTES"), _field("value", 2, "Feature")],
        },
        {
            "name": "Feature",
            "oneofDecl": [{"name": "kind"}],
            "field": [
                _field("bytes_list", 1, "BytesList", oneofIndex=0),
                _field("float_list", 2, "FloatList", oneofIndex=0),
                _field("int64_list", 3, "Int64List", oneofIndex=0),
            ],
        },
        {"name": "BytesList", "field": [_field("value", 1, "TYPE_BYTES", repeated=True)]},
        {"name": "FloatList", "field": [_field("value", 1, "TYPE_FLOAT", repeated=True)]},
        {"name": "Int64List", "field": [_field("value", 1, "TYPE_INT64", repeated=True)]},
    ],
}


def _torn(place: Place, begin: int) -> DataError:
    return DataError(
        f"{place} ends within the record at byte {begin:,}. Fetch or write the file again.",
        path=str(place),
    )


def _no_tfrecord(place: Place, begin: int) -> DataError:
    return DataError(
        f"{place} has no whole record at byte {begin:,}: the checksum of its length is wrong, so "
        "that no further record can be found. Fetch or write the file again, or set data.format "
        "to what it is.",
        path=str(place),
    )


def _too_long(place: Place, begin: int, length: int) -> DataError:
    return DataError(
        f"{place} has a record of {length:,} bytes at byte {begin:,}, and {MAX_RECORD_BYTES:,} are "
        "the most that is read at once. Cut it into several.",
        path=str(place),
    )
