"""TFRecord files written byte by byte, by the descriptions of the formats: a second opinion on the
reader in `pliant.data.sources.tfrecords`."""

import struct
from typing import Any


def tfrecord_file(records: list[dict[str, Any]]) -> bytes:
    return b"".join(framed(example(record)) for record in records)


def framed(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def example(record: dict[str, Any]) -> bytes:
    """A `tf.train.Example`; texts, numbers and lists of either become features."""
    entries = (
        _field(1, _field(1, name.encode()) + _field(2, _feature(value)))
        for name, value in record.items()
    )
    return _field(1, b"".join(entries))


def _feature(value: Any) -> bytes:
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], float):
        packed = struct.pack(f"<{len(values)}f", *values)
        return _field(2, _field(1, packed))
    if isinstance(values[0], int):
        return _field(3, _field(1, b"".join(_varint(number % 2**64) for number in values)))
    texts = (text.encode() if isinstance(text, str) else text for text in values)
    return _field(1, b"".join(_field(1, text) for text in texts))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    digits = []
    while number >= 0x80:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def _masked(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)
