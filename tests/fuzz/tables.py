"""Rewrite a data file through pyarrow: another writer's options, other types, values out of range, bombs."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TYPES = {
    "float": pa.float32(), "double": pa.float64(), "int8": pa.int8(), "int64": pa.int64(), "uint32": pa.uint32(),
    "string": pa.string(), "large": pa.large_string(), "bool": pa.bool_(), "date": pa.date32(), "binary": pa.binary(),
    "struct": pa.struct([("a", pa.int32())]), "null": pa.null(), "dictionary": pa.dictionary(pa.int32(), pa.string()),
}  # fmt: skip
ENCODINGS = ["PLAIN", "BYTE_STREAM_SPLIT", "DELTA_BINARY_PACKED", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY", "RLE"]


def rewritten(data: bytes, changes: list[tuple[str, float, Any]], options: dict[str, Any], scratch: Path) -> bytes:
    """Return the file after each change of its table; where pyarrow refuses to write that, the file as it was."""
    before = pq.ParquetFile(pa.BufferReader(data))
    named = {k: v for k, v in before.metadata.metadata.items() if k.startswith(b"teachercache.")}
    table = before.read().replace_schema_metadata(None)
    claimed = table.schema
    try:
        for kind, place, what in changes:
            at = int(place * table.num_columns)
            table = _changed(table, kind, at, what)
        given: dict[str, Any] = {
            "compression": options["compression"], "use_dictionary": options["dictionary"],
            "data_page_version": options["page_version"], "data_page_size": options["page_size"],
            "write_page_checksum": options["checksum"],
        }  # fmt: skip
        if options["claims"]:
            given["store_schema"] = False
            named[b"ARROW:schema"] = base64.b64encode(claimed.serialize().to_pybytes())
        if options["encoding"] is not None and not options["dictionary"]:
            leaf = pq.ParquetFile(pa.BufferReader(data)).schema
            paths = [leaf.column(i).path for i in range(len(leaf))]
            given["column_encoding"] = {paths[options["number"] % len(paths)]: ENCODINGS[options["encoding"]]}
        with pq.ParquetWriter(scratch, table.schema, **given) as writer:
            writer.write_table(table, row_group_size=max(1, options["group"]))
            writer.add_key_value_metadata(named)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError, OverflowError):
        return data
    return scratch.read_bytes()


def _changed(table: pa.Table, kind: str, at: int, what: Any) -> pa.Table:
    name, column = table.schema.names[at], table.column(at).combine_chunks()
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    if kind == "drop":
        return table.remove_column(at)
    if kind == "twice":
        return table.append_column(name, column)
    if kind == "meta":
        return table.append_column(f"meta_{what}", pa.array([str(what) * 3] * len(table)))
    if kind == "rows":
        return pa.concat_tables([table] * (1 + what % 40)).combine_chunks()
    if kind == "type":
        kind_of = TYPES[what]
        if pa.types.is_list(column.type):
            kind_of = pa.list_(kind_of)
        return table.set_column(at, name, column.cast(kind_of))
    if kind == "nulls":
        mask = np.zeros(len(table), bool)
        mask[:: 1 + what % 3] = True
        return table.set_column(at, name, pa.array(column.to_pylist(), column.type, mask=mask))
    if kind == "value" and pa.types.is_list(column.type):
        flat = column.flatten()
        deep = flat.flatten() if pa.types.is_fixed_size_list(flat.type) else flat
        if not len(deep):
            return table
        values = deep.to_pylist()
        values[what % len(values)] = [None, -1, 0, 999, 1000, 2**31 - 1, -(2**31), 7, 200, True][what % 10]
        fresh = pa.array(values, deep.type)
        if pa.types.is_fixed_size_list(flat.type):
            fresh = pa.FixedSizeListArray.from_arrays(fresh, flat.type.list_size)
        return table.set_column(at, name, pa.ListArray.from_arrays(column.offsets, fresh))
    if kind == "bomb" and pa.types.is_list(column.type) and not pa.types.is_fixed_size_list(column.type.value_type):
        n = 1000 * (1 + what % 2000)
        offsets = np.zeros(len(table) + 1, np.int32)
        offsets[1:] = n
        return table.set_column(
            at, name, pa.ListArray.from_arrays(pa.array(offsets), pa.array([0] * n, column.type.value_type))
        )
    return table
