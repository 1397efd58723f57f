"""The files that a spec names, cut into chunks that always hold the same raw records.

`finding` -> `cutting` -> one module a format. A chunk is the unit of preparation: one task reads
one chunk and writes one shard of each split.
"""

from pliant.data.sources.cutting import cut, read_chunk
from pliant.data.sources.digests import checksum, sha256_of
from pliant.data.sources.finding import find_files
from pliant.data.sources.parts import Chunk, Format, Record, Row, SourceFile, TextUnit
from pliant.data.sources.places import Place

__all__ = [
    "Chunk",
    "Format",
    "Place",
    "Record",
    "Row",
    "SourceFile",
    "TextUnit",
    "checksum",
    "cut",
    "find_files",
    "read_chunk",
    "sha256_of",
]
