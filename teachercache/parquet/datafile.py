"""One Parquet data file: built whole on local disk, read back by row group."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from teachercache.errors import CorruptFile, InvalidRecord, MissingObject, TeacherCacheError, UnsafeManifest, UsageError
from teachercache.format import layout
from teachercache.format.objects import FileEntry
from teachercache.format.record import Record, check_record
from teachercache.format.spec import CacheSpec
from teachercache.parquet.block import Block
from teachercache.parquet.bounds import (
    MAX_FOOTER_BYTES,
    MAX_GROUPS,
    MAX_TEXT_BYTES,
    Chunk,
    check_column_chunks,
    check_groups,
    check_pages,
    chunks_of,
    group_bytes,
    leaves_of,
    merged,
)
from teachercache.parquet.codecs import get_codec
from teachercache.parquet.columns import META_PREFIX, column, meta_array, meta_kind, meta_type, text_bytes
from teachercache.parquet.types import check_types
from teachercache.store.store import Store, sha256_file

ROWS_PER_GROUP = 16_384  # about 4.5 MB: one range request, small enough to shuffle, large enough to compress
GROUP_BYTES = 2**26  # of the top-K of a row group, which a large K reaches before ROWS_PER_GROUP
MAX_RECORD_BYTES = 2**28  # of one record: 335,000 rows at K = 100
TAIL_BYTES = 2**16  # read from the end of a file, where its footer is
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
        self._codec = get_codec(where.codec, spec.rows, spec.tokenizer.vocab_size)
        self._pending: list[Record] = []
        self._pending_rows = self._pending_bytes = 0
        self._meta_kinds: dict[str, set[type]] = {}
        self._writer: pq.ParquetWriter | None = None
        self._windows: set[tuple[str, int]] = set()
        self._tokens = self._rows = self._groups = 0

    def add(self, record: Record) -> None:
        """Check and buffer a record; writes a row group when enough rows wait."""
        check_record(record, self._spec)
        size = 8 * record.topk_ids.size + 4 * record.input_ids.size  # about, before compression; rows outweigh all else
        size += sum(len(value) for value in record.meta.values() if isinstance(value, str))
        if size > MAX_RECORD_BYTES:
            said = f"its rows take {size:,} bytes, limit {MAX_RECORD_BYTES:,}; split it into windows"
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

    def holds(self, doc_ids: Collection[str]) -> bool:
        """Return whether a record of one of these documents was added."""
        return bool(doc_ids) and any(doc_id in doc_ids for doc_id, _ in self._windows)

    def abandon(self) -> None:
        """Remove the local file."""
        if self._writer is not None:
            self._writer.close()
        self.local.unlink(missing_ok=True)

    def _flush(self) -> None:
        if not self._pending:
            return
        if self._groups >= MAX_GROUPS:
            raise UsageError(
                f"shard {self.where.shard_id} fills more than {MAX_GROUPS:,} row groups of one file; make smaller shards, or "
                "merge into smaller files."
            )
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
            "teachercache.split": self.where.split,
            "teachercache.source": self.where.source,
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
    """A committed file, opened for reading. Every claim of its entry that a footer can show is checked.

    Memory: at most 1 GiB for a row group, whatever the file says; see `teachercache.parquet.bounds`.
    """

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
        self.entry, self._vocab_size = entry, spec.tokenizer.vocab_size
        self._codec = get_codec(entry.codec, spec.rows, spec.tokenizer.vocab_size)
        with _explained(entry, "it is not readable as Parquet"):
            source = store.open_input(entry.path, size=entry.size) if local is None else local
            if source.size() != entry.size:
                raise CorruptFile(f"{entry.path} is {source.size():,} bytes long, its entry says {entry.size:,}.")
            self._held = None if isinstance(source, pa.MemoryMappedFile) else _HeldRanges(source)
            self._source = source if self._held is None else pa.PythonFile(self._held, mode="r")
            if footer is None:
                data = self._bounded_footer()
                checked = pq.ParquetFile(self._source).metadata
                check_column_chunks(data, checked.schema)
                self._check_footer(spec, checked)
            else:
                checked = footer
            names = [checked.schema.column(i).path for i in range(checked.num_columns)]
            self._meta_columns = [name for name in names if name.startswith(META_PREFIX)]
            self._file = pq.ParquetFile(
                self._source, metadata=checked, pre_buffer=PRE_BUFFER, page_checksum_verification=True,
                read_dictionary=["doc_id", *_texts(checked, self._meta_columns)],
            )  # fmt: skip

    def _bounded_footer(self) -> memoryview:
        """Return the footer's bytes; UnsafeManifest for one that would take too much memory. Fetches the file's end."""
        end = self._read_ranges([(max(0, self.entry.size - TAIL_BYTES), self.entry.size)])[0][1]
        size = int.from_bytes(end[-8:-4], "little")
        if bytes(end[-4:]) != b"PAR1":
            raise CorruptFile(f"{self.entry.path} is not readable as Parquet: it does not end like one.")
        if size > MAX_FOOTER_BYTES:
            raise UnsafeManifest(f"{self.entry.path}: its footer claims {size:,} bytes, limit {MAX_FOOTER_BYTES:,}.")
        if size + 8 > len(end):
            end = self._read_ranges([(self.entry.size - size - 8, self.entry.size)])[0][1]
        return end[-size - 8 : -8]

    def _check_footer(self, spec: CacheSpec, footer: pq.FileMetaData) -> None:
        entry = self.entry
        stored = (footer.metadata or {}).items()
        prefix = b"teachercache."
        named = {
            k[len(prefix) :].decode(errors="replace"): v.decode(errors="replace")
            for k, v in stored
            if k.startswith(prefix)
        }
        where = layout.parse_data_path(entry.path)
        for name, expected in (
            ("spec_digest", spec.digest), ("codec", where.codec), ("shard_id", where.shard_id),
            ("attempt", where.attempt), ("split", where.split), ("source", where.source),
        ):  # fmt: skip
            found = named.get(name, expected if name in ("split", "source") else None)  # other writers may lack these
            if found != expected:
                shown = ascii(found)[:80]
                raise CorruptFile(f"{entry.path}: its {name} is {shown}, expected {expected!r}: files were swapped.")
        for what, held, said in (
            ("row groups", footer.num_row_groups, entry.row_groups), ("records", footer.num_rows, entry.records),
        ):  # fmt: skip
            if held != said:
                raise CorruptFile(f"{entry.path} holds {held:,} {what}, its entry says {said:,}.")
        schema = footer.schema.to_arrow_schema()
        metas = [name for name in schema.names if name.startswith(META_PREFIX)]
        columns = self._codec.columns()
        check_types(entry.path, schema, columns, metas)
        check_groups(footer, entry, {name: each for name, (_, each) in columns.items()}, metas)

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
        schema = self.footer.schema.to_arrow_schema()
        return {name.removeprefix(META_PREFIX): schema.field(name).type for name in self._meta_columns}

    def group_bytes(self, i: int) -> int:
        """Return an upper bound of the memory that a row group takes with all its columns, without repeated strings."""
        return group_bytes(self.footer, i, self._leaves(None))

    def _names(self, columns: set[str] | None) -> list[str]:
        names = sorted(self._codec.columns()) if columns is None else self._codec.physical_columns(columns)
        return [*names, *self._meta_columns] if columns is None or "meta" in columns else list(names)

    def _leaves(self, columns: set[str] | None) -> list[int]:
        return [leaf for found in leaves_of(self.footer, self._names(columns)).values() for leaf in found]

    def read_group(self, i: int, columns: set[str] | None = None, *, check: bool = True) -> Block:
        """Read one row group; `columns` are Record fields, None = all.

        Raises CorruptFile, UnsafeManifest; and InvalidRecord for values that must not reach a batch (`Block.wrong`),
        unless `check` is off: for who calls `check_record`.
        """
        entry = self.entry
        with _explained(entry, f"row group {i} cannot be decoded"):
            self._check_pages(chunks_of(self.footer, i, self._leaves(columns)))
            table = self._file.read_row_group(i, columns=self._names(columns), use_threads=False)
            if (size := text_bytes(table)) > MAX_TEXT_BYTES:
                raise UnsafeManifest(
                    f"{entry.path}: row group {i} holds {size:,} bytes of text, limit {MAX_TEXT_BYTES:,}; it was made to harm "
                    "its reader, or by another program."
                )
            block = dataclasses.replace(self._codec.decode(table), split=entry.split, source=entry.source)
            del table
            for name, offsets in (("input_ids", block.token_offsets), ("row_pos", block.row_offsets)):
                if offsets is not None and (np.diff(offsets) < 1).any():
                    raise ValueError(f"a list of {name} is empty")
            said = block.wrong(self._vocab_size) if check else None
        if said is not None:
            record, reason, message = said
            keys = block if block.doc_id is not None else self.read_group(i, {"doc_id", "window"}, check=False)
            window = 0 if keys.window is None else int(keys.window[record])
            raise InvalidRecord(reason, f"{message} ({entry.path})", doc_id=keys.doc_id[record], window=window)
        return block

    def _check_pages(self, chunks: list[Chunk]) -> None:
        ranges = self._read_ranges(merged(chunks))
        for chunk in chunks:
            start, data = next((s, d) for s, d in reversed(ranges) if s <= chunk.start)
            check_pages(data[chunk.start - start : chunk.start - start + chunk.size], chunk)

    def _read_ranges(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, memoryview]]:
        """Return (start, bytes) of each range. What comes from a store is held, so that Arrow need not ask again."""
        found = []
        for start, stop in ranges:
            if not 0 <= start <= stop <= self.entry.size:
                raise ValueError(f"its footer names bytes {start:,} to {stop:,} of {self.entry.size:,}")
            if self._held is None:
                self._source.seek(start)
                found.append((start, memoryview(self._source.read_buffer(stop - start)).cast("B")))
            else:
                found.append((start, memoryview(self._held.fetch(start, stop))))
        if self._held is not None:
            self._held.hold(found)
        return found

    def blocks(self, columns: set[str] | None = None, *, check: bool = True) -> Iterator[Block]:
        """Yield every row group; see `read_group`."""
        for i in range(self.num_groups):
            yield self.read_group(i, columns, check=check)

    def records(self, *, check: bool = True) -> Iterator[Record]:
        """Yield every record with all its columns, one row group in memory; see `read_group`."""
        for block in self.blocks(check=check):
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


class _HeldRanges(io.RawIOBase):
    """A read-only file of a store, which gives again what was fetched last without another request."""

    def __init__(self, source: pa.NativeFile) -> None:
        super().__init__()
        self._inner, self._size, self._at = source, source.size(), 0
        self._ranges: list[tuple[int, memoryview]] = []

    def fetch(self, start: int, stop: int) -> bytes:
        """Read bytes [start, stop)."""
        self._inner.seek(start)
        data: bytes = self._inner.read(stop - start)
        return data

    def hold(self, ranges: list[tuple[int, memoryview]]) -> None:
        """Keep these (start, bytes) in place of those before."""
        self._ranges = ranges

    def readable(self) -> bool:
        """Return True: pyarrow asks."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move, and return the position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, length: int = -1) -> bytes:
        """Read at most `length` bytes, or the rest."""
        stop = self._size if length < 0 else min(self._at + length, self._size)
        start, self._at = self._at, max(self._at, stop)
        for begin, data in self._ranges:
            if begin <= start and stop <= begin + len(data):
                return bytes(data[start - begin : stop - begin])
        return self.fetch(start, stop) if stop > start else b""


@contextmanager
def _explained(entry: FileEntry, what: str) -> Iterator[None]:
    """Turn whatever a damaged or crafted file makes a decoder raise into CorruptFile, and say that a missing file is gone."""
    try:
        yield
    except MissingObject as error:
        raise MissingObject(
            f"{str(error).rstrip('.')}: its manifest expired and gc removed it, or someone else did; open the newest "
            "manifest."
        ) from error
    except TeacherCacheError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise CorruptFile(f"{entry.path}: {what}: {ascii(first)[1:-1][:300]}.") from error


def _texts(footer: pq.FileMetaData, names: list[str]) -> list[str]:
    """Return those of some columns that hold strings; they are read as dictionaries, so that none is repeated in memory."""
    kinds = {footer.schema.column(i).path: footer.schema.column(i).physical_type for i in range(footer.num_columns)}
    return [name for name in names if kinds[name] == "BYTE_ARRAY"]
