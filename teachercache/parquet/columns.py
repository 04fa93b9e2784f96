"""Codec: the columns of a Parquet file, and the way between a Block's flat arrays and Arrow."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from teachercache.format.record import as_float16, is_unicode
from teachercache.format.spec import Rows
from teachercache.parquet import types
from teachercache.parquet.block import ROW_DTYPES, Block

META_PREFIX = "meta_"  # a column of the corpus; keeps its name apart from columns that later versions may add
LOWEST_FLOAT16 = np.float32(-65504)  # a finite target_logprob stays finite
LEAF = "list.element"  # how Parquet names the entries of a list column
# Parquet leaf path -> encoding, of the columns that every codec has. A column that is not named is PLAIN.
COMMON_ENCODINGS = {
    f"tail_logprob.{LEAF}": "BYTE_STREAM_SPLIT",
    f"target_logprob.{LEAF}": "BYTE_STREAM_SPLIT",
    f"entropy.{LEAF}": "BYTE_STREAM_SPLIT",
    f"input_ids.{LEAF}": "BYTE_STREAM_SPLIT",
    f"row_pos.{LEAF}": "DELTA_BINARY_PACKED",
    "window": "DELTA_BINARY_PACKED",
    "start": "DELTA_BINARY_PACKED",
}


class Codec(ABC):
    """One way to write a Block. Codecs differ in the columns of the top K; decoding gives the same Block."""

    topk_columns: ClassVar[tuple[str, ...]]  # list<fixed_size_list<K>>, one list a row
    value_types: ClassVar[Mapping[str, pa.DataType]]  # of these
    row_types: ClassVar[Mapping[str, pa.DataType]] = {}  # of further columns with one value a row

    def __init__(self, rows: Rows) -> None:
        self.rows, self.top_k = rows, rows.entries

    def columns(self) -> dict[str, tuple[pa.DataType, int]]:
        """Return the type of a value of each column, and how many there are: see `teachercache.parquet.types`."""
        topk = {name: (kind, self.top_k) for name, kind in self.value_types.items()}
        sampled = types.SAMPLED if self.rows.kind == "sampled" else {}
        return types.COMMON | sampled | topk | {name: (kind, types.A_ROW) for name, kind in self.row_types.items()}

    @abstractmethod
    def encode_topk(self, block: Block) -> dict[str, pa.Array]:
        """Return the columns of the top K."""

    @abstractmethod
    def decode_topk(self, table: pa.Table) -> tuple[Any, Any]:
        """Return ids and log-probabilities [R, K]; None for what the table lacks."""

    def encode(self, block: Block, meta_types: Mapping[str, pa.DataType] | None = None) -> pa.Table:
        """Make a table of one row a record. `meta_types` fixes the corpus's columns over all row groups of a file."""
        target = as_float16(np.maximum(block.target_logprob, LOWEST_FLOAT16))
        columns = {
            "doc_id": pa.array(block.doc_id, pa.string()),
            "window": pa.array(block.window),
            "start": pa.array(block.start),
            "content_key": pa.array(block.content_key, pa.binary(16)),
            "input_ids": ragged(pa.array(block.input_ids), block.token_offsets),
            "row_pos": ragged(pa.array(block.row_pos), block.row_offsets),
            **self.encode_topk(block),
            "tail_logprob": ragged(pa.array(block.tail_logprob), block.row_offsets),
            "target_logprob": ragged(nullable(target), block.row_offsets),
            "loss_mask": ragged(pa.array(block.loss_mask), block.row_offsets),
            "entropy": ragged(nullable(as_float16(block.entropy)), block.row_offsets),
        }
        if block.exact is not None:
            columns["exact"] = ragged(pa.array(block.exact), block.row_offsets)
        return pa.table(columns | meta_columns(block, meta_types))

    def decode(self, table: pa.Table) -> Block:
        """Return the Block of a table that may lack columns: those come back as None."""
        topk_ids, topk_logprobs = self.decode_topk(table)
        token_offsets, input_ids = list_parts(table, "input_ids")
        flat = ("row_pos", "tail_logprob", "target_logprob", "loss_mask", "entropy", "exact")
        parts = {name: list_parts(table, name) for name in (*flat, *self.topk_columns)}
        objects = {name: objects_of(table, name) for name in ("doc_id", "content_key")}
        metas = [name for name in table.column_names if name.startswith(META_PREFIX)]
        decoded: dict[str, Any] = {
            **objects,
            **{name: numbers(column(table, name), np.int32) for name in ("window", "start")},
            **{name: numbers(parts[name][1], ROW_DTYPES[name]) for name in flat},
            "row_offsets": next((offsets for offsets, _ in parts.values() if offsets is not None), None),
            "meta": {name.removeprefix(META_PREFIX): objects_of(table, name) for name in metas},
        }
        return Block(
            split="", source="", topk_ids=topk_ids, topk_logprobs=topk_logprobs, token_offsets=token_offsets,
            input_ids=numbers(input_ids, np.int32), size=table.num_rows, **decoded,
        )  # fmt: skip

    def flat_topk(self, table: pa.Table, name: str, dtype: Any) -> Any:
        """Return a column of the top K as [R, K], or None where it was not read."""
        _, lists = list_parts(table, name)
        return None if lists is None else numbers(lists.flatten(), dtype).reshape(-1, self.top_k)

    def physical_columns(self, names: set[str]) -> list[str]:
        """Return the stored columns that the given Record fields need."""
        return sorted(names - {"split", "source", "meta"} - (set() if self.rows.kind == "sampled" else {"exact"}))

    def writer_options(self, schema: pa.Schema) -> dict[str, Any]:
        """Return arguments for ParquetWriter: dictionaries only for the corpus's text, a page index, page checksums.

        zstd 6 takes 276 bytes a row where 3 takes 283 and 15 takes 274, at two thirds and a ninth of the speed; pages of
        4 MiB instead of 1 save three more (a row group is read whole, so small pages buy nothing).
        """
        texts = [f.name for f in schema if f.name.startswith(META_PREFIX) and pa.types.is_string(f.type)]
        encodings = COMMON_ENCODINGS | self.leaf_encodings()
        return {
            "compression": "zstd",
            "compression_level": 6,
            "use_dictionary": texts or False,
            "column_encoding": encodings,
            "write_page_index": True,
            "write_page_checksum": True,
            "write_statistics": ["doc_id", "window"],
            "data_page_size": 2**22,
        }

    def leaf_encodings(self) -> dict[str, str]:
        """Return Parquet leaf path -> encoding of the top K's columns."""
        return {f"{name}.{LEAF}.{LEAF}": "BYTE_STREAM_SPLIT" for name in self.topk_columns}

    def opening_metadata(self) -> dict[str, str]:
        """Return footer entries that a decoder needs; known after the first encode."""
        return {}

    def closing_metadata(self) -> dict[str, str]:
        """Return footer entries that are known when the file ends."""
        return {}


def nested(values: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any]) -> pa.ListArray:
    """Make list<fixed_size_list<K>> [B] of values [R, K] and offsets [B+1]; no copy."""
    return ragged(pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1]), offsets)


def nullable(values: np.ndarray[Any, Any]) -> pa.Array:
    """Make an array of float32 [R] in which NaN is null."""
    return pa.array(values, mask=np.isnan(values))


def ragged(values: pa.Array, offsets: np.ndarray[Any, Any]) -> pa.ListArray:
    """Make a list column [B] of flat values [R] and offsets [B+1]."""
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)


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
    """Return a column as one array, or None where it was not read. ValueError for a null where FORMAT excludes it."""
    if name not in table.column_names:
        return None
    chunks = table.column(name)
    if chunks.null_count and not name.startswith(META_PREFIX):
        raise ValueError(f"column {name} holds a null")
    return chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()


def objects_of(table: pa.Table, name: str) -> list[Any] | None:
    """Return a column as Python objects, or None where it was not read. Equal strings of a dictionary are one object."""
    if name not in table.column_names:
        return None
    if table.column(name).null_count and not name.startswith(META_PREFIX):
        raise ValueError(f"column {name} holds a null")
    values: list[Any] = []
    for chunk in table.column(name).chunks:
        if pa.types.is_dictionary(chunk.type):
            known = [*chunk.dictionary.to_pylist(), None]
            values += [known[i] for i in chunk.indices.fill_null(len(known) - 1).to_pylist()]
        else:
            values += chunk.to_pylist()
    return values


def text_bytes(table: pa.Table) -> int:
    """Return the bytes of all strings of a table that was read with dictionaries, each repetition counted."""
    total = 0
    for chunks in table.columns:
        for chunk in chunks.chunks if pa.types.is_dictionary(chunks.type) else ():
            lengths = pc.binary_length(chunk.dictionary).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
            total += int(lengths[chunk.indices.drop_null().to_numpy()].sum())
    return total


def list_parts(table: pa.Table, name: str) -> tuple[Any, Any]:
    """Return offsets from zero [B+1] and flat values [R] of a list column; no copy of the values. None twice without it.

    Raises ValueError for a null, except in target_logprob.
    """
    array = column(table, name)
    if array is None:
        return None, None
    offsets = array.offsets.to_numpy().astype(np.int64)
    values = array.flatten()
    deepest = values.flatten() if pa.types.is_fixed_size_list(values.type) else values
    if (values.null_count or deepest.null_count) and name not in types.MAY_BE_NULL:
        raise ValueError(f"column {name} holds a null")
    return offsets - offsets[0], values


def numbers(array: pa.Array | None, dtype: Any) -> Any:
    """Return a flat numpy array; nulls of a float column become NaN. None gives None."""
    if array is None:
        return None
    if array.null_count:
        return np.asarray(array.to_numpy(zero_copy_only=False), dtype=dtype)
    return array.to_numpy(zero_copy_only=array.type != pa.bool_()).astype(dtype, copy=False)
