"""CRC-32C (Castagnoli), the checksum of TFRecord files, a byte at a time by table.

The standard library has CRC-32 of another polynomial only.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78
"""Bits reversed."""


def _table() -> NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table[:] = (table >> 1) ^ (table & 1) * np.uint32(_POLYNOMIAL)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    return int(_crc(np.frombuffer(data, dtype=np.uint8), _TABLE))


def masked_crc32c(data: bytes) -> int:
    """As TFRecord stores it: turned by 15 bits and shifted, so that a checksum of data that itself
    holds checksums is sound."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@njit(cache=True)  # type: ignore[misc, unused-ignore]
def _crc(
    data: NDArray[np.uint8], table: NDArray[np.uint32]
) -> np.uint32:  # pragma: no cover - compiled
    crc = np.uint32(0xFFFFFFFF)
    for byte in data:
        crc = table[(crc ^ byte) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    return crc ^ np.uint32(0xFFFFFFFF)
