"""Registration of a cache's files in an Iceberg catalog, without copying a byte (pyiceberg's `add_files`).

pyiceberg is optional and is imported only here. The table is a view of one manifest; registering a later manifest adds its
new files. A manifest that dropped files (`optimize`) cannot be expressed by adding: register it under another name.
"""

from __future__ import annotations

import logging
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from teachercache.errors import UsageError
from teachercache.read.cache import Cache


def register(cache: Cache, catalog: str, table: str) -> int:
    """Make the files of a cache's manifest an Iceberg table; returns how many files were added.

    catalog  a name that pyiceberg's own configuration knows (~/.pyiceberg.yaml, PYICEBERG_CATALOG__NAME__URI ...)
    table    namespace.name; both are created where they do not exist
    """
    try:
        from pyiceberg.catalog import load_catalog
        from pyiceberg.exceptions import NoSuchTableError
    except ImportError as error:
        raise UsageError(
            "registration in Iceberg needs pyiceberg; pip install 'pyiceberg[sql-sqlite]' or the extra of your catalog."
        ) from error
    if "." not in table:
        raise UsageError(f"{table!r} names no namespace; expected NAMESPACE.TABLE.")
    if codecs := {f.codec for f in cache.manifest.files} - {"open"}:
        raise UsageError(
            f"{cache.url} holds files in codec {min(codecs)}, whose rows Iceberg cannot read; `optimize --codec open` first."
        )
    wanted = {cache.file_url(entry) for entry in cache.manifest.files}
    logging.getLogger("pyiceberg.io.pyarrow").setLevel(
        logging.ERROR
    )  # it warns of each nested column without statistics
    try:
        store = load_catalog(catalog)
    except ValueError as error:
        raise UsageError(f"pyiceberg knows no catalog {catalog!r}: {error}".splitlines()[0]) from error
    store.create_namespace_if_not_exists(table.rsplit(".", 1)[0])
    try:
        target: Any = store.load_table(table)
    except NoSuchTableError:
        target = store.create_table(table, schema=common_schema(cache))
    present = set(target.inspect.files().column("file_path").to_pylist()) if target.current_snapshot() else set()
    if gone := present - wanted:
        raise UsageError(
            f"{table} holds {len(gone)} files that manifest {cache.manifest.number} replaced; register it under a new name."
        )
    fresh = sorted(wanted - present)
    if fresh:
        target.add_files(
            fresh,
            snapshot_properties={
                "teachercache.manifest": str(cache.manifest.number),
                "teachercache.manifest_digest": cache.manifest.digest,
                "teachercache.spec_digest": cache.spec.digest,
            },
        )
    return len(fresh)


def common_schema(cache: Cache) -> pa.Schema:
    """All columns of all files; the corpus's differ from source to source."""
    schemas = []
    for entry in cache.manifest.files:
        with cache.store.open_input(entry.path, size=entry.size) as file:
            schemas.append(pq.read_schema(file).remove_metadata())
    try:
        return pa.unify_schemas(schemas)
    except pa.ArrowTypeError as error:
        raise UsageError(
            f"{cache.url} cannot be one table: a column of the corpus has another type in another file ({error}); "
            "`export --to` a folder instead, where it becomes text."
        ) from error
