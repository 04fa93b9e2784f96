"""The open layout: plain Parquet that DuckDB, Polars, pandas and Spark read without our code.

Log-probabilities are float32 columns that hold float16-rounded values: byte-stream-split and zstd then find the 13
zero bits by themselves, and every reader takes float32. Real float16 would be larger, and DuckDB cannot read it in
byte-stream-split. The measurements that chose each encoding: benchmarks/encodings.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from teachercache.format.record import round_logprobs
from teachercache.parquet.block import Block
from teachercache.parquet.columns import (
    COMMON_ENCODINGS,
    LEAF,
    column,
    common_columns,
    decode_block,
    list_parts,
    meta_columns,
    nested,
    numbers,
    row_columns,
    writer_options,
)

# Parquet leaf path -> encoding.
ENCODINGS = COMMON_ENCODINGS | {
    f"topk_ids.{LEAF}.{LEAF}": "BYTE_STREAM_SPLIT",
    f"topk_logprobs.{LEAF}.{LEAF}": "BYTE_STREAM_SPLIT",
}


class OpenCodec:
    """Encode and decode the open layout. Lossless but for the float16 rounding of topk_logprobs."""

    name = "open"

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k

    def encode(self, block: Block, meta_types: Mapping[str, pa.DataType] | None = None) -> pa.Table:
        """Make a table of one row a record; log-probabilities are rounded to float16 values."""
        logprobs = round_logprobs(block.topk_logprobs)
        columns: dict[str, pa.Array] = {
            **common_columns(block),
            "topk_ids": nested(block.topk_ids, block.row_offsets),
            "topk_logprobs": nested(logprobs, block.row_offsets),
            **row_columns(block),
            **meta_columns(block, meta_types),
        }
        return pa.table(columns)

    def decode(self, table: pa.Table) -> Block:
        """Return the Block of a table; columns that it lacks come back as None."""
        return decode_block(
            table,
            topk_ids=_flat_topk(table, "topk_ids", self.top_k),
            topk_logprobs=_flat_topk(table, "topk_logprobs", self.top_k),
            row_lists=("topk_ids", "topk_logprobs"),
        )

    def physical_columns(self, names: set[str]) -> list[str]:
        """Return the stored columns that the given Record fields need."""
        return sorted(names - {"split", "source", "meta"})

    def writer_options(self, schema: pa.Schema) -> dict[str, Any]:
        """Return arguments for pyarrow.parquet.ParquetWriter."""
        return writer_options(schema, ENCODINGS)

    def opening_metadata(self) -> dict[str, str]:
        """Return footer entries that a decoder needs: none."""
        return {}

    def closing_metadata(self) -> dict[str, str]:
        """Return footer entries that are known when the file ends: none."""
        return {}


def _flat_topk(table: pa.Table, name: str, top_k: int) -> Any:
    _, lists = list_parts(column(table, name))
    if lists is None:
        return None
    return numbers(lists.flatten(), np.int32 if name == "topk_ids" else np.float32).reshape(-1, top_k)
