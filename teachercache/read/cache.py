"""Cache: a published cache, opened at one manifest."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from teachercache.errors import NotACache, TeacherCacheError, UsageError
from teachercache.format import layout
from teachercache.format.objects import Manifest, ManifestFile
from teachercache.format.record import Record
from teachercache.format.spec import CacheSpec
from teachercache.parquet.datafile import DataFile, check_columns
from teachercache.read.stream import RecordStream, StreamOptions
from teachercache.read.tokenizer import download_tokenizer
from teachercache.store.ledger import Ledger
from teachercache.store.store import Store

READ_AHEAD_BYTES = 2**28  # of the row group in hand and the next


def open(
    url: str | os.PathLike[str], manifest: int | None = None, *, storage_options: Mapping[str, Any] | None = None
) -> Cache:
    """Open a cache, pinned to its newest manifest unless a number is given; NotACache where nothing was published."""
    ledger = Ledger.open(url, storage_options)
    store = ledger.store
    try:
        spec = ledger.spec()
    except NotACache as error:
        if (below := _caches_below(store)) and len(below) == 1:
            raise NotACache(f"{store.where} is not a teacher cache; there is one below it: {below[0]}") from error
        raise
    numbers = ledger.manifest_numbers()
    if not numbers:
        raise NotACache(
            f"{store.where} has no manifest yet; expected a published cache: wait for its job, or publish it."
        )
    number = numbers[-1] if manifest is None else manifest
    if number not in numbers:
        raise NotACache(f"{store.url} has no manifest {number}; it has {numbers[0]} to {numbers[-1]}.")
    cache = Cache(store, spec, ledger.manifest(number))
    if not cache.manifest.complete:
        warnings.warn(incomplete_message(cache), IncompleteCacheWarning, stacklevel=2)
    return cache


def _caches_below(store: Store) -> list[str]:
    """Return the URLs of caches in the folders just below: one listing, and a request for each of the first 16."""
    with suppress(TeacherCacheError):
        return [store.child(name).url for name in store.folders("")[:16] if store.exists(name + layout.SPEC)]
    return []


class IncompleteCacheWarning(UserWarning):
    """The manifest was published although planned shards were missing."""


def incomplete_message(cache: Cache) -> str:
    """Return the sentence that every reader of an incomplete cache sees."""
    m = cache.manifest
    return (
        f"{cache.url} manifest {m.number} is incomplete: {m.shards_committed} of {m.shards_planned} planned shards are in it "
        f"({m.shards_quarantined} in quarantine); re-run its job for the rest."
    )


def made_up_message(cache: Cache) -> str:
    """Return the sentence that every reader of a cache without a teacher sees."""
    return f"{cache.url} holds made-up rows (engine noop): it tests a pipeline, and there is nothing to learn from it."


class Cache:
    """One manifest of one cache. Reads only files that the manifest names."""

    def __init__(self, store: Store, spec: CacheSpec, manifest: Manifest) -> None:
        """Read the files of `manifest`; `open` finds the three arguments."""
        self.store, self.spec, self.manifest = store, spec, manifest

    def __repr__(self) -> str:
        m = self.manifest
        state = "" if m.complete else ", incomplete"
        return f"Cache({self.url!r}, manifest={m.number}, records={m.records:,}, rows={m.rows:,}, splits={self.splits}{state})"

    @property
    def url(self) -> str:
        """Return where the cache is."""
        return self.store.url

    @property
    def made_up(self) -> bool:
        """Return whether no teacher made the rows: they come from the engine `noop`."""
        return self.spec.teacher.engine == "noop"

    @property
    def splits(self) -> list[str]:
        """Return the names of the splits, sorted."""
        return sorted({f.split for f in self.manifest.files})

    @property
    def sources(self) -> list[str]:
        """Return the names of the sources, sorted."""
        return sorted({f.source for f in self.manifest.files})

    def files(self, split: str | None = None, source: str | None = None) -> list[ManifestFile]:
        """Return entries of the manifest, sorted by path; UsageError names what there is where nothing matches."""
        found = [f for f in self.manifest.files if split in (None, f.split) and source in (None, f.source)]
        if not found and (split is not None or source is not None):
            asked = " and ".join(f"{k} {v!r}" for k, v in (("split", split), ("source", source)) if v is not None)
            raise UsageError(
                f"{self.url} has no records of {asked}; its splits: {', '.join(self.splits) or 'none'}"
                f", its sources: {', '.join(self.sources) or 'none'}."
            )
        return found

    def file_url(self, entry: ManifestFile) -> str:
        """Return where a data file lies, as DuckDB, Polars, pandas or Spark take it: s3://..., or a plain local path."""
        return f"{self.store.root if self.store.is_local else self.url}/{entry.path}"

    def tokenizer_path(self) -> Path:
        """Return a local folder with the teacher's tokenizer files, downloaded once; UsageError where the cache has none."""
        return download_tokenizer(self.store, self.spec.tokenizer)

    def open_file(self, entry: ManifestFile) -> DataFile:
        """Open one data file for reading; use it as a context manager."""
        return DataFile(self.store, entry, self.spec)

    def records(
        self,
        split: str | None = None,
        source: str | None = None,
        columns: Collection[str] | None = None,
        limit: int | None = None,
    ) -> Iterator[Record]:
        """Yield records in the manifest's order. `columns` are Record fields; those left out come back as None.

        One row group is read ahead in another thread, unless it is large. Memory: about two row groups (30 MB).
        """
        wanted = check_columns(columns)
        left = float("inf") if limit is None else limit
        for entry in self.files(split, source):
            # In this order: the thread ends before its file closes.
            with self.open_file(entry) as file, ThreadPoolExecutor(1) as ahead:
                waiting = None
                for i in range(file.num_groups):
                    block = file.read_group(i, wanted) if waiting is None else waiting.result()
                    early = i + 1 < file.num_groups and file.group_bytes(i) + file.group_bytes(i + 1) < READ_AHEAD_BYTES
                    waiting = ahead.submit(file.read_group, i + 1, wanted) if early else None
                    for record in block.records():
                        if left <= 0:
                            return
                        left -= 1
                        yield record

    def stream(
        self,
        split: str = "train",
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        state: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> RecordStream:
        """Return an endless, shuffled, prefetching stream that resumes exactly from a `state`.

        `options` are the other fields of `teachercache.read.stream.StreamOptions`: source, shuffle, repeat, columns,
        prefetch, shuffle_groups, cache_dir, cache_bytes. Raises UsageError where nothing matches.
        """
        chosen = StreamOptions(split=split, seed=seed, rank=rank, world_size=world_size, **options)
        files = self.files(split, chosen.source)
        return RecordStream(self.store, self.spec, self.manifest, files, chosen, state)
