"""Codecs: how a block of records becomes Parquet and comes back. Chosen for each file, named in its path and manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import pyarrow as pa

from teachercache.errors import UnsupportedFormat
from teachercache.parquet.block import Block
from teachercache.parquet.compact import CompactCodec
from teachercache.parquet.open import OpenCodec

CODECS = ("open", "compact")

__all__ = ["CODECS", "Block", "Codec", "CompactCodec", "OpenCodec", "get_codec"]


class Codec(Protocol):
    """One way to write the columns of a Block. Decoding gives the same Block whatever the codec."""

    name: str

    def encode(self, block: Block, meta_types: Mapping[str, pa.DataType] | None = None) -> pa.Table:
        """Make a table of one row a record. `meta_types` fixes the corpus's columns over all row groups of a file."""
        ...

    def decode(self, table: pa.Table) -> Block:
        """Return the Block of a table that may lack columns: those come back as None."""
        ...

    def physical_columns(self, names: set[str]) -> list[str]:
        """Return the stored columns that the given Record fields need."""
        ...

    def writer_options(self, schema: pa.Schema) -> dict[str, Any]:
        """Return arguments for pyarrow.parquet.ParquetWriter."""
        ...

    def opening_metadata(self) -> dict[str, str]:
        """Return footer entries that a decoder needs; known after the first encode."""
        ...

    def closing_metadata(self) -> dict[str, str]:
        """Return footer entries that are known when the file ends."""
        ...


def get_codec(name: str, top_k: int, vocab_size: int) -> Codec:
    """Return the codec called `name`; UnsupportedFormat where this version does not have it."""
    if name == "open":
        return OpenCodec(top_k)
    if name == "compact":
        return CompactCodec(top_k, vocab_size)
    raise UnsupportedFormat(
        f"codec {name!r} is unknown to this version, which has {', '.join(CODECS)}; upgrade teachercache."
    )
