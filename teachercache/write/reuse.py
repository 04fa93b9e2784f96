"""ReuseIndex: rows that are already committed under the same spec are copied instead of being computed again.

The index holds the content_key of every record of every live commit (never of anything uncommitted): 32 bytes each.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from teachercache.errors import MissingObject
from teachercache.format.objects import FileEntry
from teachercache.format.record import Record
from teachercache.format.spec import CacheSpec
from teachercache.parquet.block import Block
from teachercache.parquet.datafile import DataFile
from teachercache.store.ledger import Ledger
from teachercache.store.liveness import live_commits, resolve_replacements
from teachercache.store.store import Store

THREADS = 8
BLOCKS = 4  # row groups kept decoded: documents of one input tend to lie together


class ReuseIndex:
    """content_key -> the committed record. Build one per process; it does not see later commits."""

    def __init__(self, store: Store, spec: CacheSpec) -> None:
        """Read the content_key column of every live file: one request a row group, eight at a time."""
        self._store, self._spec = store, spec
        ledger = Ledger(store, spec)
        seen = ledger.snapshot()
        commits = [commit for commit, _ in seen.fresh]
        replaced = resolve_replacements(commits, seen.newest.replaced if seen.newest else {}, seen.settled)
        kept = [entry for entry in (seen.newest.files if seen.newest else ()) if entry.shard_id not in replaced]
        self._files: list[FileEntry] = [*kept, *(e for c in live_commits(commits, replaced) for e in c.files)]
        with ThreadPoolExecutor(THREADS) as pool:
            parts = list(pool.map(self._keys_of, range(len(self._files))))
        keys = np.concatenate([np.empty(0, "V16"), *(keys for keys, _ in parts)])
        places = np.concatenate([np.empty((0, 3), np.int64), *(places for _, places in parts)])
        order = np.argsort(keys, kind="stable")
        self._keys, self._places = keys[order], places[order]
        self._block = functools.lru_cache(BLOCKS)(self._read_block)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, content_key: bytes) -> bool:
        return self._find(content_key) is not None

    def get(self, content_key: bytes) -> Record | None:
        """Return the committed record, or None.

        Give it its new doc_id, split, source, mask and meta by dataclasses.replace.
        """
        i = self._find(content_key)
        if i is None:
            return None
        file, group, row = (int(v) for v in self._places[i])
        try:
            return self._block(file, group).record(row)
        except MissingObject:  # merged away and collected since the index was built: nothing to copy, so compute it
            return None

    def _find(self, content_key: bytes) -> int | None:
        key = np.frombuffer(content_key, dtype="V16")[0]
        i = int(np.searchsorted(self._keys, key))
        return i if i < len(self._keys) and self._keys[i] == key else None

    def _read_block(self, file: int, group: int) -> Block:
        with DataFile(self._store, self._files[file], self._spec) as data:
            return data.read_group(group)

    def _keys_of(self, file: int) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
        keys: list[bytes] = []
        places: list[tuple[int, int, int]] = []
        try:
            with DataFile(self._store, self._files[file], self._spec) as data:
                for group, block in enumerate(data.blocks({"content_key"})):
                    keys += block.content_key
                    places += [(file, group, row) for row in range(len(block))]
        except MissingObject:  # a void commit, or one that was merged away meanwhile: it offers nothing
            keys, places = [], []
        return np.frombuffer(b"".join(keys), dtype="V16"), np.array(places, dtype=np.int64).reshape(-1, 3)
