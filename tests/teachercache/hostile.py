"""Caches whose one data file is crafted, and whose commit and manifest agree with it: what a liar with a key could write."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from teachercache.format import layout
from teachercache.format.spec import canonical_json
from tests.teachercache.caches import make, write_sealed


def data_file(root: Path) -> Path:
    """Return the only data file of a cache."""
    (path,) = (root / "data").rglob("*.parquet")
    return path


def reseal(root: Path, path: Path, **entry) -> None:
    """Make commit and manifest of the shard `s` agree with what `path` holds now."""
    data = path.read_bytes()
    changes = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), **entry}
    for name in ("commits/s.json", layout.manifest_path(1)):
        value = json.loads((root / name).read_bytes())
        value.pop("seal")
        value["files"][0].update(changes)
        value.update({k: v for k, v in entry.items() if k in ("tokens", "rows", "records", "documents")})
        write_sealed(root / name, canonical_json(value))


def craft_file(
    root: Path, change, *, codec: str = "open", count: int = 3, entry: dict | None = None, **options
) -> None:
    """Make a cache at `root` and rewrite its file as `change(table)`, with `options` of pyarrow's writer."""
    make(root, count, codec=codec)
    write_table(data_file(root), change(pq.read_table(data_file(root))), **options)
    reseal(root, data_file(root), row_groups=pq.read_metadata(data_file(root)).num_row_groups, **(entry or {}))


def write_table(path: Path, table: pa.Table, *, claimed: pa.Schema | None = None, **options) -> None:
    """Write a table in place of a data file, with its footer's entries; the stored Arrow schema may be another one."""
    named = {k: v for k, v in pq.read_metadata(path).metadata.items() if k.startswith(b"teachercache.")}
    if claimed is not None:
        named[b"ARROW:schema"] = base64.b64encode(claimed.serialize().to_pybytes())
    rows = options.pop("row_group_size", max(1, len(table)))
    bare = table.replace_schema_metadata(None)
    with pq.ParquetWriter(
        path, bare.schema, **{"compression": "zstd", "store_schema": claimed is None, **options}
    ) as writer:
        writer.write_table(bare, row_group_size=rows)
        writer.add_key_value_metadata(named)


def with_column(name: str, make_column) -> object:
    """Return a change that replaces, or appends, one column by `make_column(table)`."""

    def change(table: pa.Table) -> pa.Table:
        column = make_column(table)
        at = table.schema.get_field_index(name)
        return table.append_column(name, column) if at < 0 else table.set_column(at, name, column)

    return change
