"""RecordStream: an endless, shuffled, prefetching stream of records that resumes exactly.

The order is a pure function of (manifest, split, seed, epoch), so the state is a handful of integers:

    row group   one of one file; the manifest alone says how many there are
    epoch       all row groups in an order permuted by seed and epoch; rank r of W takes every W-th. The count carries over
                between epochs, so that ranks stay balanced when W does not divide the number of row groups
    span        `shuffle_groups` consecutive row groups of one rank, whose records are permuted together
    state       (epoch, span, offset within the span)

Cost: the row groups of two spans in memory (about 15 MB each at K = 100; 2 x 8 of them by default), read by a few
threads with one range request each. Resuming reads one span again. Records mix across a span, not across the
whole epoch: neighbours in a file still meet more often than chance.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from teachercache.errors import CorruptFile, UnsafeManifest, UsageError
from teachercache.format.objects import Manifest, ManifestFile
from teachercache.format.record import Record
from teachercache.format.spec import CacheSpec
from teachercache.parquet.block import Block
from teachercache.parquet.datafile import DataFile, check_columns
from teachercache.read.disk_cache import DiskCache
from teachercache.store.store import Store

STATE_VERSION = 1
FOOTERS = 256  # kept in memory; a footer is some tens of KB
GROUP_BYTES = 2**27  # decoded, of a row group as our writer makes them
SPARE_BYTES = 2**29  # what the row groups of a span may take beyond that, together
RowGroup = tuple[int, int]  # index into files, number within the file
Span = tuple[int, int, list[RowGroup]]  # epoch, number within it, its row groups
Place = tuple[RowGroup, int]  # where a record lies: its row group, and which record of it


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """What a stream reads, in which order, and at which cost."""

    split: str = "train"
    source: str | None = None  # None = all
    seed: int = 0  # with the epoch, decides the order; unused without shuffle
    rank: int = 0  # this process's share of world_size; fixed for the life of a run
    world_size: int = 1
    shuffle: bool = True  # False = the manifest's order
    repeat: bool = True  # False = stop after one epoch (a rank may then get one row group fewer than another)
    columns: Collection[str] | None = None  # Record fields to read; None = all
    prefetch: int = 4  # threads that read ahead, each one row group at a time
    shuffle_groups: int = 8  # row groups whose records are mixed; memory grows with it
    cache_dir: str | os.PathLike[str] | None = None  # keeps whole files for all streams of a node
    cache_bytes: int = 64 * 2**30  # bound of cache_dir

    def __post_init__(self) -> None:
        """Raise UsageError for a share or a size that cannot be."""
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank {self.rank} must lie in [0, world_size {self.world_size}).")
        if min(self.prefetch, self.shuffle_groups) < 1:
            raise UsageError(f"prefetch {self.prefetch} and shuffle_groups {self.shuffle_groups} must be at least 1.")


class _Room:
    """Memory for the row groups that are in memory at once. Thread-safe."""

    def __init__(self, size: int):
        self._size, self._left, self._lock = size, size, threading.Lock()

    def take(self, path: str, size: int) -> None:
        with self._lock:
            self._left -= size
            if self._left >= 0:
                return
        raise UnsafeManifest(
            f"{path}: the row groups that are shuffled together take more than {self._size:,} bytes in memory; the files "
            "were made to harm their reader, or hold enormous documents: try shuffle_groups=1."
        )


class RecordStream(Iterator[Record]):
    """Iterator of Record. Not thread-safe. Close it, or use it as a context manager, to end its threads."""

    def __init__(
        self,
        store: Store,
        spec: CacheSpec,
        manifest: Manifest,
        files: Sequence[ManifestFile],
        options: StreamOptions,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Stream `files` of a manifest; see `Cache.stream`.

        `state` is what `state()` of a stream with the same manifest and options returned; UsageError where they differ.
        """
        self._store, self._spec, self._options = store, spec, options
        self._columns = check_columns(options.columns)
        self._files = [f for f in files if f.records]
        self._groups: list[RowGroup] = [(i, g) for i, file in enumerate(self._files) for g in range(file.row_groups)]
        if not self._groups:
            raise UsageError(f"{store.url} has no records of split {options.split!r}; expected at least one.")
        same = ("split", "source", "seed", "rank", "world_size", "shuffle", "shuffle_groups")
        chosen = {name: getattr(options, name) for name in same}
        self._identity: dict[str, Any] = {"version": STATE_VERSION, "manifest": manifest.digest, **chosen}
        self._number, self._pid = manifest.number, os.getpid()
        self._disk = DiskCache(Path(options.cache_dir), options.cache_bytes) if options.cache_dir is not None else None
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(options.prefetch, thread_name_prefix="teachercache-stream")
        self._fetched: OrderedDict[tuple[RowGroup, frozenset[str]], Future[Block]] = OrderedDict()
        self._place: Place = ((0, 0), 0)
        self._at = self._position(state)
        self._records = self._run(*self._at)

    def __next__(self) -> Record:
        """Return the next record; after an error the next call tries again from the same place, and never skips or ends."""
        if self._pid != os.getpid():  # its threads stayed behind: it would wait for ever
            raise UsageError(
                "a stream does not survive a fork; open it in the process that reads it (a cache may be shared)."
            )
        try:
            return next(self._records)
        except StopIteration:
            raise
        except Exception:
            self._records = self._run(*self._at)  # a generator that raised would only say that there is no more
            raise

    def state(self) -> dict[str, Any]:
        """Return the position after the record that came last, as JSON-able values; a stream opened with it continues there."""
        epoch, span, offset = self._at
        position = {"epoch": epoch, "window": span, "offset": offset}  # "window": the name in states that exist
        return {**self._identity, **position, "manifest_number": self._number}  # the number only to say what to open

    @property
    def epoch(self) -> int:
        """Return the epoch of the record that came last."""
        return self._at[0]

    @property
    def place(self) -> Place:
        """Return where the record lies that came last, for `fetch`."""
        return self._place

    def fetch(self, places: Sequence[Place], columns: Collection[str]) -> list[Record]:
        """Return the records at some places of this stream with other columns.

        For a stream of few columns, of which some records are wanted whole. Row groups are read in its threads; those
        of two spans stay in memory.
        """
        wanted = frozenset(check_columns(columns) or ())
        keys = [(group, wanted) for group, _ in places]
        for key in keys:
            if key not in self._fetched:
                self._fetched[key] = self._pool.submit(self._read, key[0], set(wanted))
            self._fetched.move_to_end(key)
        try:
            found = [self._fetched[key].result().record(i) for key, (_, i) in zip(keys, places, strict=True)]
        except Exception:
            self._fetched.clear()  # the next call tries again
            raise
        while len(self._fetched) > 2 * self._options.shuffle_groups:
            self._fetched.popitem(last=False)
        return found

    def close(self) -> None:
        """Stop reading ahead and join the threads."""
        self._records.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> RecordStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the order ---------------------------------------------------------------------------------------------

    def _position(self, state: Mapping[str, Any] | None) -> tuple[int, int, int]:
        if state is None:
            return 0, 0, 0
        wrong = [f"{k}: state {state.get(k)!r}, stream {v!r}" for k, v in self._identity.items() if state.get(k) != v]
        if wrong:
            pin = state.get("manifest_number", self._number)
            hint = "" if pin == self._number else f": manifest {pin}, where this is {self._number}"
            raise UsageError(
                f"the state belongs to another stream ({'; '.join(wrong)}); open the one that it came from{hint}."
            )
        return int(state["epoch"]), int(state["window"]), int(state["offset"])

    def _epoch_groups(self, epoch: int) -> list[RowGroup]:
        """Return this rank's groups of an epoch, in order."""
        count, options = len(self._groups), self._options
        order = np.random.default_rng([options.seed, epoch]).permutation(count) if options.shuffle else np.arange(count)
        first = (options.rank - epoch * count) % options.world_size
        return [self._groups[i] for i in order[first :: options.world_size]]

    def _spans(self, epoch: int, span: int) -> Iterator[Span]:
        """Yield spans from (epoch, span) on, without end unless repeat is off."""
        size = self._options.shuffle_groups
        while True:
            groups = self._epoch_groups(epoch)
            for w in range(span, -(-len(groups) // size)):
                yield epoch, w, groups[w * size : (w + 1) * size]
            if not self._options.repeat:
                return
            epoch, span = epoch + 1, 0

    def _run(self, epoch: int, span: int, offset: int) -> Generator[Record, None, None]:
        ahead: deque[tuple[Span, list[Future[Block]]]] = deque()
        spans = self._spans(epoch, span)
        while True:
            while len(ahead) < 2 and (coming := next(spans, None)) is not None:
                room = _Room(self._options.shuffle_groups * GROUP_BYTES + SPARE_BYTES)
                reads = (self._pool.submit(self._read, group, self._columns, room) for group in coming[2])
                ahead.append((coming, list(reads)))
            if not ahead:
                return
            (epoch, span, groups), futures = ahead.popleft()
            for i, (record, (b, index)) in enumerate(self._emit(epoch, span, futures, offset), start=offset + 1):
                self._at, self._place = (epoch, span, i), (groups[b], index)
                yield record
            offset = 0

    def _emit(
        self, epoch: int, span: int, futures: list[Future[Block]], offset: int
    ) -> Iterator[tuple[Record, tuple[int, int]]]:
        """Yield the records of one span from `offset` on, each with its block and its number there."""
        if not self._options.shuffle:
            for b, future in enumerate(futures):
                block = future.result()
                for i in range(min(offset, len(block)), len(block)):
                    yield block.record(i), (b, i)
                offset = max(0, offset - len(block))
            return
        blocks = [future.result() for future in futures]
        futures.clear()  # a future keeps its block alive
        where = [(b, i) for b, block in enumerate(blocks) for i in range(len(block))]
        seed = [self._options.seed, epoch, span, self._options.rank]
        order = np.random.default_rng(seed).permutation(len(where))
        for k in order[offset:]:
            b, i = where[k]
            yield blocks[b].record(i), (b, i)

    # ---- reading -----------------------------------------------------------------------------------------------

    def _read(self, group: RowGroup, columns: set[str] | None, room: _Room | None = None) -> Block:
        entry = self._files[group[0]]
        if self._disk is not None and (local := self._disk.fetch(self._store, entry)) is not None:
            try:
                return self._read_from(entry, group[1], columns, room, local)
            except CorruptFile:
                self._disk.forget(entry)  # it was verified when it came: the disk lost it, and the object decides
        return self._read_from(entry, group[1], columns, room, None)

    def _read_from(
        self,
        entry: ManifestFile,
        group: int,
        columns: set[str] | None,
        room: _Room | None,
        local: pa.NativeFile | None,
    ) -> Block:
        with self._lock:
            footer = self._footers.get(entry.path)
        with DataFile(self._store, entry, self._spec, footer=footer, local=local) as file:
            with self._lock:
                self._footers[entry.path] = file.footer
                while len(self._footers) > FOOTERS:
                    self._footers.popitem(last=False)
            if room is not None:
                room.take(entry.path, file.group_bytes(group))  # of all columns: `fetch` may want them
            return file.read_group(group, columns)
