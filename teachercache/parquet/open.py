"""The open layout: plain Parquet that DuckDB, Polars, pandas and Spark read without our code.

Log-probabilities are float32 columns that hold float16-rounded values: byte-stream-split and zstd then find the 13
zero bits by themselves, and every reader takes float32. Real float16 would be larger, and DuckDB cannot read it in
byte-stream-split. The measurements that chose each encoding: benchmarks/encodings.py.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from teachercache.format.record import Float32Array, as_float16, round_logprobs
from teachercache.parquet.block import Block
from teachercache.parquet.columns import Codec, nested


class OpenCodec(Codec):
    """Encode and decode the open layout. Of the entries it changes only topk_logprobs, by rounding to float16."""

    topk_columns = ("topk_ids", "topk_logprobs")
    value_types: ClassVar = {"topk_ids": pa.int32(), "topk_logprobs": pa.float32()}

    def encode_topk(self, block: Block) -> dict[str, pa.Array]:
        """Return both columns; log-probabilities are rounded to float16 values."""
        return {
            "topk_ids": nested(block.topk_ids, block.row_offsets),
            "topk_logprobs": nested(self._rounded(block.topk_logprobs), block.row_offsets),
        }

    def _rounded(self, logprobs: Float32Array) -> Float32Array:
        """Return float16 values; of a sampled row to the nearest always, since rounding all down would be a bias."""
        return as_float16(logprobs) if self.rows.kind == "sampled" else round_logprobs(logprobs)

    def decode_topk(self, table: pa.Table) -> tuple[Any, Any]:
        """Return ids and log-probabilities [R, K]; None for what the table lacks."""
        return self.flat_topk(table, "topk_ids", np.int32), self.flat_topk(table, "topk_logprobs", np.float32)
