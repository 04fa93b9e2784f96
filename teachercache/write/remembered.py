"""Key runs: what a publisher remembers of the records that the newest manifest has, so that it reads new shards alone.

A run is a Parquet file with a line a record: the first 8 bytes of the hash of (split, source, doc_id), the window, the
first 8 bytes of the content key, the place of the split in the run's list. The runs that a manifest names cover its
files. Runs never decide that something is there twice: a truncated hash that meets another one only makes the publisher
read the keys of every file, as it does without runs. Runs that nothing meets prove that nothing is there twice, since
equal keys have equal hashes.

A new run takes in the older ones that are at most twice as large, so n records are in about log n runs.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from teachercache.errors import CorruptFile, MissingObject, StoreUnavailable
from teachercache.format import layout
from teachercache.format.objects import FileEntry, KeyRun
from teachercache.parquet.bounds import check_column_chunks, check_pages, chunks_of
from teachercache.store.store import Store
from teachercache.write.uniqueness import FileKeys

GROUP = 2**20  # records of a row group: 16 MB
LARGEST = 2**25  # a run of more records is left alone: merging sorts in memory
Hashes = npt.NDArray[np.uint64]
SCHEMA = pa.schema([("split", pa.int16()), ("document", pa.uint64()), ("window", pa.int32()), ("content", pa.uint64())])


def _head(keys: npt.NDArray[np.void]) -> Hashes:
    return keys.view(np.dtype("<u8")).reshape(-1, 2)[:, 0]


@dataclass(slots=True)
class Remembered:
    """The runs of one manifest, and the files that hold them here; `folder` is removed by its owner."""

    store: Store
    folder: Path
    runs: list[KeyRun]
    local: dict[str, Path] = field(default_factory=dict)  # name of a run -> its copy here, or what is to be uploaded
    new: list[KeyRun] = field(default_factory=list)

    def meets(self, files: Sequence[FileEntry], keys: Sequence[FileKeys]) -> bool:
        """Return whether a document of these files, or content of another split, may be in a run.

        A run that is gone or damaged may hold anything. Cost: every run once, 12 to 20 bytes a record, a row group in
        memory at a time.
        """
        documents = np.unique(np.concatenate([_head(k.documents) for k in keys]))
        splits = sorted({entry.split for entry in files})
        content = {
            split: np.unique(
                np.concatenate([_head(k.content) for f, k in zip(files, keys, strict=True) if f.split == split])
            )
            for split in splits
        }
        try:
            return any(self._run_meets(run, documents, content) for run in self.runs)
        except (MissingObject, CorruptFile, StoreUnavailable, pa.ArrowException, OSError):
            return True

    def _run_meets(self, run: KeyRun, documents: Hashes, content: dict[str, Hashes]) -> bool:
        with self._opened(run) as file:
            for i in range(file.num_row_groups):
                group = file.read_row_group(i)
                if np.isin(documents, group["document"].to_numpy()).any():
                    return True
                codes, hashes = group["split"].to_numpy(), group["content"].to_numpy()
                if codes.size and not 0 <= codes.min() <= codes.max() < len(run.splits):
                    raise CorruptFile(f"{layout.keys_path(run.name)} names a split that its manifest does not.")
                for split, ours in content.items():
                    others = hashes[codes != run.splits.index(split)] if split in run.splits else hashes
                    if others.size and np.isin(ours, others).any():
                        return True
        return False

    def _opened(self, run: KeyRun) -> pq.ParquetFile:
        """Open a run; CorruptFile unless it is one whose row groups take no more memory than ours."""
        path = self._fetched(run)
        try:
            file = pq.ParquetFile(path, memory_map=True)
            _check(file, run, path)
        except (ValueError, IndexError, KeyError, pa.ArrowException) as error:
            raise CorruptFile(f"{layout.keys_path(run.name)} cannot be decoded: {ascii(str(error))[1:-1]}.") from error
        return file

    def _fetched(self, run: KeyRun) -> Path:
        if run.name not in self.local:
            path = self.folder / run.name
            with path.open("wb") as out:
                digest = self.store.download(layout.keys_path(run.name), run.size, out)
            if digest != run.sha256:
                raise CorruptFile(f"{layout.keys_path(run.name)} is not the object that its manifest names.")
            self.local[run.name] = path
        return self.local[run.name]

    def add(self, files: Sequence[FileEntry], keys: Sequence[FileKeys]) -> None:
        """Make a run of the keys of these files, with the older runs that are at most twice as large taken in."""
        size = sum(len(k) for k in keys)
        kept, merged = list(self.runs), list[KeyRun]()
        while kept and kept[-1].records <= min(2 * size, LARGEST):
            merged.append(kept.pop())
            size += merged[-1].records
        splits = sorted({entry.split for entry in files}.union(*(run.splits for run in merged)))
        tables = [
            _table(np.full(len(k), splits.index(entry.split)), _head(k.documents), k.window, _head(k.content))
            for entry, k in zip(files, keys, strict=True)
        ]
        for run in merged:
            with self._opened(run) as file:
                old = file.read()
            codes = np.array([splits.index(split) for split in run.splits])[old["split"].to_numpy()]
            tables.append(_table(codes, *(old[name].to_numpy() for name in ("document", "window", "content"))))
        self.runs = kept
        if not size:
            return
        table = pa.concat_tables(tables).sort_by([("document", "ascending"), ("window", "ascending")])
        name = uuid.uuid4().hex  # not of the content: no other publisher's clean-up can concern it
        path = self.folder / name
        pq.write_table(
            table, path, row_group_size=GROUP, compression="zstd", use_dictionary=False, write_statistics=False,
            column_encoding={"document": "DELTA_BINARY_PACKED", "window": "DELTA_BINARY_PACKED"},
        )  # fmt: skip
        data = path.read_bytes()
        made = KeyRun(name=name, sha256=hashlib.sha256(data).hexdigest(), size=len(data), records=size, splits=splits)
        self.local[name] = path
        self.runs = [*kept, made]
        self.new = [made]

    def upload(self) -> None:
        """Create the new run's object; before the manifest that names it."""
        for run in self.new:
            self.store.create(layout.keys_path(run.name), self.local[run.name])


def _table(split: npt.NDArray[np.int64], document: Hashes, window: npt.NDArray[np.int32], content: Hashes) -> pa.Table:
    return pa.table([split.astype(np.int16), document, window, content], schema=SCHEMA)


def _check(file: pq.ParquetFile, run: KeyRun, path: Path) -> None:
    footer, size = file.metadata, file.metadata.serialized_size
    groups = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
    if not file.schema_arrow.equals(SCHEMA) or footer.num_rows != run.records or max(groups, default=0) > GROUP:
        raise CorruptFile(f"{layout.keys_path(run.name)} is no key run of {run.records:,} records.")
    data = memoryview(pa.memory_map(str(path)).read_buffer()).cast("B")
    check_column_chunks(data[-size - 8 : -8], file.schema)
    for i, rows in enumerate(groups):
        for chunk in chunks_of(footer, i, range(footer.num_columns)):
            if chunk.num_values != rows or chunk.start < 0 or chunk.plain_size > 2**26:
                raise ValueError("a column chunk is not of its row group")
            check_pages(data[chunk.start : chunk.start + chunk.size], chunk)
