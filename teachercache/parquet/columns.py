"""Columns that every codec stores in the same way, and the way between a Block's flat arrays and Arrow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from teachercache.format.record import is_unicode
from teachercache.parquet.block import ROW_DTYPES, Block

META_PREFIX = "meta_"  # a column of the corpus; keeps its name apart from columns that later versions may add
LEAF = "list.element"  # how Parquet names the entries of a list column
# Parquet leaf path -> encoding, of the common columns. A column that is not named is PLAIN.
COMMON_ENCODINGS = {
    f"tail_logprob.{LEAF}": "BYTE_STREAM_SPLIT",
    f"target_logprob.{LEAF}": "BYTE_STREAM_SPLIT",
    f"input_ids.{LEAF}": "BYTE_STREAM_SPLIT",
    f"row_pos.{LEAF}": "DELTA_BINARY_PACKED",
    "window": "DELTA_BINARY_PACKED",
    "start": "DELTA_BINARY_PACKED",
}


def writer_options(schema: pa.Schema, encodings: dict[str, str]) -> dict[str, Any]:
    """Return arguments for ParquetWriter: dictionaries only for the corpus's text, a page index, a checksum for each page.

    zstd 6 takes 277 bytes a row where 3 takes 282 and 15 takes 275, at two thirds and a ninth of the speed; pages of 4 MiB
    instead of 1 save three more (a row group is read whole, so small pages buy nothing).
    """
    dictionary = [
        name for name in schema.names if name.startswith(META_PREFIX) and pa.types.is_string(schema.field(name).type)
    ]
    top_level = {name.split(".", 1)[0] for name in schema.names}
    return {
        "compression": "zstd",
        "compression_level": 6,
        "use_dictionary": dictionary or False,
        "column_encoding": {path: how for path, how in encodings.items() if path.split(".", 1)[0] in top_level},
        "write_page_index": True,
        "write_page_checksum": True,
        "write_statistics": [n for n in ("doc_id", "window") if n in top_level],
        "data_page_size": 2**22,
    }


def nested(values: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any]) -> pa.ListArray:
    """Make list<fixed_size_list<K>> [B] of values [R, K] and offsets [B+1]; no copy."""
    flat = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), flat)


def ragged(values: pa.Array, offsets: np.ndarray[Any, Any]) -> pa.ListArray:
    """Make a list column [B] of flat values [R] and offsets [B+1]."""
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)


def common_columns(block: Block) -> dict[str, pa.Array]:
    """Return the columns of documents and tokens."""
    return {
        "doc_id": pa.array(block.doc_id, pa.string()),
        "window": pa.array(block.window),
        "start": pa.array(block.start),
        "content_key": pa.array(block.content_key, pa.binary(16)),
        "input_ids": ragged(pa.array(block.input_ids), block.token_offsets),
        "row_pos": ragged(pa.array(block.row_pos), block.row_offsets),
    }


def row_columns(block: Block) -> dict[str, pa.Array]:
    """Return the columns with one value a row."""
    target = pa.array(block.target_logprob, mask=np.isnan(block.target_logprob))
    return {
        "tail_logprob": ragged(pa.array(block.tail_logprob), block.row_offsets),
        "target_logprob": ragged(target, block.row_offsets),
        "loss_mask": ragged(pa.array(block.loss_mask), block.row_offsets),
    }


def meta_columns(block: Block, types: Mapping[str, pa.DataType] | None = None) -> dict[str, pa.Array]:
    """Return the corpus's columns, one for each name in `types` (default: what the block itself shows)."""
    if types is None:
        types = {
            name: meta_type({meta_kind(v) for v in values if v is not None}) for name, values in block.meta.items()
        }
    absent = [None] * len(block)
    return {META_PREFIX + name: meta_array(block.meta.get(name, absent), types[name]) for name in sorted(types)}


def meta_kind(value: Any) -> type:
    """Return the Python type that decides a column's; an integer beyond 64 bits counts as text."""
    return str if type(value) is int and not -(2**63) <= value < 2**63 else type(value)


def meta_type(kinds: set[type]) -> pa.DataType:
    """Return string, int64, double or bool where every value has that Python type; string (JSON text) otherwise."""
    if len(kinds) == 1:
        return {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}.get(next(iter(kinds)), pa.string())
    return pa.string()


def meta_array(values: Sequence[Any], arrow_type: pa.DataType) -> pa.Array:
    """Make a column of the corpus; in a string column, what is no string becomes JSON text."""
    if arrow_type != pa.string():
        return pa.array(values, arrow_type)
    return pa.array([None if v is None else _meta_text(v) for v in values], pa.string())


def _meta_text(value: Any) -> str:
    """Return a string as it is, else JSON; what JSON lacks (dates, decimals) by its str, lone surrogates as U+FFFD."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    return text if is_unicode(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def column(table: pa.Table, name: str) -> pa.Array | None:
    """Return a column as one array, or None where it was not read."""
    if name not in table.column_names:
        return None
    chunks = table.column(name)
    return chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()


def list_parts(array: pa.ListArray | None) -> tuple[Any, Any]:
    """Return offsets from zero [B+1] and flat values [R] of a list column; no copy of the values. None gives None."""
    if array is None:
        return None, None
    offsets = array.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0], array.flatten()


def numbers(array: pa.Array | None, dtype: Any) -> Any:
    """Return a flat numpy array; nulls of a float column become NaN. None gives None."""
    if array is None:
        return None
    if array.null_count:
        return np.asarray(array.to_numpy(zero_copy_only=False), dtype=dtype)
    return array.to_numpy(zero_copy_only=array.type != pa.bool_()).astype(dtype, copy=False)


def decode_block(table: pa.Table, *, topk_ids: Any, topk_logprobs: Any, row_lists: Sequence[str]) -> Block:
    """Decode a table whose top-K columns are decoded already; `row_lists` are their list columns, with r entries."""
    token_offsets, input_ids = list_parts(column(table, "input_ids"))
    flat_names = ("row_pos", "tail_logprob", "target_logprob", "loss_mask")
    parts = {name: list_parts(column(table, name)) for name in (*flat_names, *row_lists)}
    doc_id, key = column(table, "doc_id"), column(table, "content_key")
    decoded: dict[str, Any] = {
        "doc_id": None if doc_id is None else doc_id.to_pylist(),
        "content_key": None if key is None else key.to_pylist(),
        "window": numbers(column(table, "window"), np.int32),
        "start": numbers(column(table, "start"), np.int32),
        "token_offsets": token_offsets,
        "input_ids": numbers(input_ids, np.int32),
        "row_offsets": next((offsets for offsets, _ in parts.values() if offsets is not None), None),
        **{name: numbers(parts[name][1], ROW_DTYPES[name]) for name in flat_names},
    }
    metas = [name for name in table.column_names if name.startswith(META_PREFIX)]
    return Block(
        split="",
        source="",
        topk_ids=topk_ids,
        topk_logprobs=topk_logprobs,
        meta={name[len(META_PREFIX) :]: table.column(name).to_pylist() for name in metas},
        size=table.num_rows,
        **decoded,
    )
