"""One Parquet data file: built whole on local disk, read back by row group."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from teachercache.errors import CorruptFile, InvalidRecord, MissingObject, UnsafeManifest, UsageError
from teachercache.format import layout
from teachercache.format.objects import FileEntry
from teachercache.format.record import Record, check_record
from teachercache.format.spec import CacheSpec
from teachercache.parquet.block import Block
from teachercache.parquet.codecs import get_codec
from teachercache.parquet.columns import META_PREFIX, column, meta_array, meta_kind, meta_type
from teachercache.store.store import Store, sha256_file

ROWS_PER_GROUP = 16_384  # about 4.5 MB: one range request, small enough to shuffle, large enough to compress
GROUP_BYTES = 2**26  # of the top-K of a row group, which a large K reaches before ROWS_PER_GROUP
MAX_GROUP_BYTES = 2**31  # uncompressed; a lying footer must not make a reader allocate more
PRE_BUFFER = True  # one range request for the wanted columns of a row group, from another thread
RECORD_FIELDS = tuple(field.name for field in dataclasses.fields(Record))


class FileBuilder:
    """Write the records of one (split, source) of one shard attempt to a local Parquet file."""

    def __init__(
        self, folder: Path, where: layout.DataPath, spec: CacheSpec, *, rows_per_group: int = ROWS_PER_GROUP
    ) -> None:
        """Begin the file of a name in the cache, below a local folder."""
        self.where = where
        self._rows_per_group = rows_per_group
        self.local = folder / str(where).replace("/", "__")
        self._spec, self._digest = spec, spec.digest
        self._codec = get_codec(where.codec, spec.top_k, spec.tokenizer.vocab_size)
        self._pending: list[Record] = []
        self._pending_rows = self._pending_bytes = 0
        self._meta_kinds: dict[str, set[type]] = {}
        self._writer: pq.ParquetWriter | None = None
        self._windows: set[tuple[str, int]] = set()
        self._tokens = self._rows = self._groups = 0

    def add(self, record: Record) -> None:
        """Check and buffer a record; writes a row group when enough rows wait."""
        check_record(record, vocab_size=self._spec.tokenizer.vocab_size, top_k=self._spec.top_k)
        size = 8 * record.topk_ids.size + 4 * record.input_ids.size  # about, before compression; rows outweigh all else
        if size > MAX_GROUP_BYTES // 2:
            said = f"its rows take {size:,} bytes, limit {MAX_GROUP_BYTES // 2:,}; split it into windows"
            raise InvalidRecord("too_long", said, doc_id=record.doc_id, window=record.window)
        if (record.doc_id, record.window) in self._windows:
            said = "the document and window are in this shard already"
            raise InvalidRecord("duplicate", said, doc_id=record.doc_id, window=record.window)
        self._windows.add((record.doc_id, record.window))
        for key, value in record.meta.items():
            kinds = self._meta_kinds.setdefault(key, set())
            if value is not None:
                kinds.add(meta_kind(value))
        self._pending.append(record)
        self._pending_rows += len(record.row_pos)
        self._pending_bytes += size
        self._tokens += len(record.input_ids)
        self._rows += len(record.row_pos)
        if self._pending_rows >= self._rows_per_group or self._pending_bytes >= GROUP_BYTES:
            self._flush()

    def close(self) -> FileEntry:
        """Finish the file, read all of it back, and describe it."""
        self._flush()
        assert self._writer is not None
        if extra := self._codec.closing_metadata():
            self._writer.add_key_value_metadata(extra)
        self._writer.close()
        self._verify()
        return FileEntry(
            path=str(self.where), codec=self.where.codec, split=self.where.split, source=self.where.source,
            size=self.local.stat().st_size, sha256=sha256_file(self.local), records=len(self._windows),
            documents=len({doc_id for doc_id, _ in self._windows}), tokens=self._tokens, rows=self._rows,
            row_groups=self._groups,
        )  # fmt: skip

    def abandon(self) -> None:
        """Remove the local file."""
        if self._writer is not None:
            self._writer.close()
        self.local.unlink(missing_ok=True)

    def _flush(self) -> None:
        if not self._pending:
            return
        types = {name: meta_type(kinds) for name, kinds in self._meta_kinds.items()}
        table = self._codec.encode(Block.from_records(self._pending), types)
        if self._writer is not None and not self._writer.schema.remove_metadata().equals(table.schema):
            self._widen(types)
        if self._writer is None:
            self._writer = self._open(self.local, table.schema)
        self._writer.write_table(table, row_group_size=len(table))
        self._groups += 1
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0

    def _open(self, path: Path, schema: pa.Schema) -> pq.ParquetWriter:
        named = {
            "teachercache.format_version": str(self._spec.format_version),
            "teachercache.spec_digest": self._digest,
            "teachercache.codec": self.where.codec,
            "teachercache.shard_id": self.where.shard_id,
            "teachercache.attempt": self.where.attempt,
            **self._codec.opening_metadata(),
        }
        return pq.ParquetWriter(path, schema.with_metadata(named), **self._codec.writer_options(schema))

    def _widen(self, types: dict[str, pa.DataType]) -> None:
        """Rewrite what is written so far, since a record brought a new meta column or another type. Rare."""
        assert self._writer is not None
        self._writer.close()
        old = self.local.with_suffix(".old")
        self.local.rename(old)
        file, self._writer = pq.ParquetFile(old), None
        for i in range(file.num_row_groups):
            table = file.read_row_group(i)
            core = table.select([n for n in table.column_names if not n.startswith(META_PREFIX)])
            for name in sorted(types):
                stored = column(table, META_PREFIX + name)
                values = [None] * len(table) if stored is None else stored.to_pylist()
                core = core.append_column(META_PREFIX + name, meta_array(values, types[name]))
            if self._writer is None:
                self._writer = self._open(self.local, core.schema)
            self._writer.write_table(core, row_group_size=len(core))
        old.unlink()

    def _verify(self) -> None:
        """Decode what was written: a bad disk or a codec's bug is found before anything is uploaded."""
        records = rows = tokens = 0
        with pq.ParquetFile(self.local) as file:
            for i in range(file.num_row_groups):
                block = self._codec.decode(file.read_row_group(i))
                records, rows, tokens = records + len(block), rows + len(block.row_pos), tokens + len(block.input_ids)
        if (records, rows, tokens) != (len(self._windows), self._rows, self._tokens):
            raise CorruptFile(
                f"{self.local.name}: wrote {len(self._windows)} records, {self._rows} rows, {self._tokens} tokens but read back "
                f"{records}, {rows}, {tokens}; check the local disk."
            )


class DataFile:
    """A committed file, opened for reading. Every claim of its entry that a footer can show is checked."""

    def __init__(
        self,
        store: Store,
        entry: FileEntry,
        spec: CacheSpec,
        *,
        footer: pq.FileMetaData | None = None,
        local: pa.NativeFile | None = None,
    ) -> None:
        """Open a file. `footer` saves reading it again; `local` is a verified copy, read instead of the object.

        Raises MissingObject, CorruptFile, UnsafeManifest.
        """
        self.entry = entry
        self._codec = get_codec(entry.codec, spec.top_k, spec.tokenizer.vocab_size)
        try:
            source = store.open_input(entry.path, size=entry.size) if local is None else local
            if source.size() != entry.size:
                raise CorruptFile(f"{entry.path} is {source.size():,} bytes long, its entry says {entry.size:,}.")
            self._file = pq.ParquetFile(source, metadata=footer, pre_buffer=PRE_BUFFER, page_checksum_verification=True)
        except MissingObject as error:
            raise _gone(error) from error
        except (pa.ArrowException, OSError) as error:
            raise CorruptFile(f"{entry.path} is not readable as Parquet: {_first_line(error)}") from error
        if footer is None:
            self._check_footer(spec)

    def _check_footer(self, spec: CacheSpec) -> None:
        entry, footer = self.entry, self._file.metadata
        stored = (footer.metadata or {}).items()
        prefix = b"teachercache."
        named = {k[len(prefix) :].decode(): v.decode(errors="replace") for k, v in stored if k.startswith(prefix)}
        for name, expected in (("spec_digest", spec.digest), ("codec", entry.codec)):
            if named.get(name) != expected:
                raise CorruptFile(f"{entry.path}: its {name} is {named.get(name)}, expected {expected}.")
        where = layout.parse_data_path(entry.path)
        if (named.get("shard_id"), named.get("attempt")) != (where.shard_id, where.attempt):
            raise CorruptFile(f"{entry.path} holds the data of shard {named.get('shard_id')}: files were swapped.")
        counts = {"row groups": (footer.num_row_groups, entry.row_groups), "records": (footer.num_rows, entry.records)}
        for what, (found, said) in counts.items():
            if found != said:
                raise CorruptFile(f"{entry.path} holds {found} {what}, its entry says {said}.")
        for i in range(footer.num_row_groups):
            size = footer.row_group(i).total_byte_size
            if not 0 <= size <= MAX_GROUP_BYTES:
                raise UnsafeManifest(f"{entry.path}: row group {i} claims {size:,} bytes.")

    @property
    def num_groups(self) -> int:
        """Return the number of row groups."""
        return int(self._file.num_row_groups)

    @property
    def footer(self) -> pq.FileMetaData:
        """Return the Parquet footer."""
        return self._file.metadata

    def meta_types(self) -> dict[str, pa.DataType]:
        """Return name -> type of each column of the corpus."""
        fields = (field for field in self._file.schema_arrow if field.name.startswith(META_PREFIX))
        return {field.name.removeprefix(META_PREFIX): field.type for field in fields}

    def read_group(self, i: int, columns: set[str] | None = None) -> Block:
        """Read one row group; `columns` are Record fields, None = all. Raises CorruptFile."""
        names = None
        if columns is not None:
            names = self._codec.physical_columns(columns)
            if "meta" in columns:
                names += [name for name in self._file.schema_arrow.names if name.startswith(META_PREFIX)]
        try:
            table = self._file.read_row_group(i, columns=names, use_threads=False)
            block = self._codec.decode(table)
        except MissingObject as error:
            raise _gone(error) from error
        except (pa.ArrowException, OSError, ValueError) as error:
            raise CorruptFile(f"{self.entry.path}: row group {i} cannot be decoded: {_first_line(error)}") from error
        return dataclasses.replace(block, split=self.entry.split, source=self.entry.source)

    def blocks(self, columns: set[str] | None = None) -> Iterator[Block]:
        """Yield every row group; see `read_group`."""
        for i in range(self.num_groups):
            yield self.read_group(i, columns)

    def records(self) -> Iterator[Record]:
        """Yield every record with all its columns, one row group in memory."""
        for block in self.blocks():
            yield from block.records()

    def close(self) -> None:
        """Close the file; blocks that were read stay valid."""
        self._file.close(force=True)

    def __enter__(self) -> DataFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def check_columns(columns: Collection[str] | None) -> set[str] | None:
    """Return the Record fields to read, None = all; UsageError for one that a record does not have."""
    if columns is None:
        return None
    if isinstance(columns, str):
        raise UsageError(f"columns must be a collection of names, found the string {columns!r}; write [{columns!r}].")
    if unknown := set(columns) - set(RECORD_FIELDS):
        raise UsageError(f"unknown columns {sorted(unknown)}; a record has {', '.join(RECORD_FIELDS)}.")
    return set(columns)


def _gone(error: MissingObject) -> MissingObject:
    """Return the error for a file that a manifest or commit names."""
    return MissingObject(
        f"{str(error).rstrip('.')}: its manifest expired and gc removed it, or someone else did; open the newest manifest."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
