"""The head of a safetensors file, for those who write its data themselves: a tensor at a time, or
into memory.

The format: 8 bytes with the length of the head, little-endian; the head, JSON; the data.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
ALIGNMENT = 64
"""The data begins at a multiple of it, in bytes."""


def entry(dtype: torch.dtype, shape: Sequence[int], begin: int, end: int) -> dict[str, Any]:
    """A tensor whose bytes are [begin, end) of the data."""
    return {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}


def head(entries: Mapping[str, Any]) -> bytes:
    """Everything before the data, padded with blanks; `entries` are by the tensor's name."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
