"""The life of one attempt at a shard: NEW -> BUILT -> UPLOADED -> COMMITTED or LOST.

Each step is safe to be killed in. Until the commit object exists, nothing that a reader can see has changed; once it
exists, everything that it names is there and whole. The order (build and verify locally, upload create-only, HEAD,
commit create-only) is the protocol; docs/FORMAT.md states it and tests/teachercache/test_faults.py enumerates it.
"""

from __future__ import annotations

import dataclasses
import enum
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from teachercache.errors import CommitConflict, CorruptFile, Exists, StaleAttempt
from teachercache.format import layout
from teachercache.format.objects import COUNTS, Commit, FileEntry
from teachercache.format.record import Record, content_key
from teachercache.format.sealed import seal, utc_now
from teachercache.format.spec import CacheSpec
from teachercache.parquet.datafile import ROWS_PER_GROUP, DataFile, FileBuilder
from teachercache.store.ledger import read_sealed
from teachercache.store.store import Store

GRACE_SECONDS = 7 * 24 * 3600.0  # the collector's default; an attempt gives up after half of it


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What became of an attempt. `won` is False where another attempt committed the shard first: not an error."""

    won: bool
    records: int
    documents: int
    tokens: int
    rows: int
    bytes: int
    files: list[FileEntry]


class State(enum.Enum):
    """Where an attempt is in its life."""

    NEW = "new"
    BUILT = "built"
    UPLOADED = "uploaded"
    COMMITTED = "committed"
    LOST = "lost"


def boot_clock() -> float:
    """Return seconds since boot, time asleep included: a suspended machine must notice that it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.time()


class ShardAttempt:
    """One execution of one shard. Use as a context manager: leaving it removes the local folder."""

    def __init__(
        self,
        store: Store,
        spec: CacheSpec,
        shard_id: str,
        *,
        codec: str = "open",
        grace_seconds: float = GRACE_SECONDS,
        clock: Callable[[], float] = boot_clock,
        folder: Path | None = None,
        rows_per_group: int = ROWS_PER_GROUP,
    ) -> None:
        """Begin an attempt; its files are built below `folder` (TMPDIR by default)."""
        self.shard_id = layout.check_shard_id(shard_id)
        self.attempt = uuid.uuid4().hex
        self.state = State.NEW
        self.codec = codec
        self.entries: list[FileEntry] = []
        self._store, self._spec, self._digest = store, spec, spec.digest
        self._grace, self._clock, self._rows_per_group = grace_seconds, clock, rows_per_group
        self._folder = Path(tempfile.mkdtemp(prefix=f"teachercache-{shard_id[:16]}-", dir=folder))
        self._builders: dict[tuple[str, str], FileBuilder] = {}
        self._discarded: dict[str, set[str]] = {}  # split -> doc_ids
        self._upload_began = float("nan")

    def __enter__(self) -> ShardAttempt:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget the local files. What was uploaded without a commit is an orphan, which `gc` removes."""
        for builder in self._builders.values():
            builder.abandon()
        shutil.rmtree(self._folder, ignore_errors=True)

    def build(self, records: Iterable[Record]) -> None:
        """Add records and finish: NEW -> BUILT. Raises InvalidRecord at the first that breaks an invariant."""
        for record in records:
            self.add(record)
        self.finish()

    def add(self, record: Record) -> None:
        """Add one record to the local file of its (split, source)."""
        self._expect(State.NEW)
        key = content_key(self._digest, record.input_ids, record.row_pos)
        if record.content_key != key:
            record = dataclasses.replace(record, content_key=key)
        where = (record.split, record.source)
        if where not in self._builders:
            path = layout.DataPath(self.codec, *where, self.shard_id, self.attempt)
            self._builders[where] = FileBuilder(self._folder, path, self._spec, rows_per_group=self._rows_per_group)
        self._builders[where].add(record)

    def discard(self, split: str, doc_id: str) -> None:
        """Leave a document out of the files, with all its windows that were added already."""
        self._expect(State.NEW)
        self._discarded.setdefault(split, set()).add(doc_id)

    def finish(self) -> None:
        """Close and verify the local files: NEW -> BUILT. Files that hold a discarded document are written again."""
        self._expect(State.NEW)
        for where in sorted(self._builders):
            entry = self._builders[where].close()
            if self._builders[where].holds(self._discarded.get(where[0], set())):
                rebuilt = self._without(where, entry)
                if rebuilt is None:
                    continue
                entry = rebuilt
            self.entries.append(entry)
        self.state = State.BUILT

    def _without(self, where: tuple[str, str], entry: FileEntry) -> FileEntry | None:
        """Write a local file again without the discarded documents; None where nothing is left of it."""
        old = self._builders.pop(where)
        whole = old.local.with_suffix(".whole")
        old.local.rename(whole)
        gone = self._discarded[where[0]]
        with DataFile(self._store, entry, self._spec, local=pa.memory_map(str(whole))) as file:
            for record in file.records():
                if record.doc_id not in gone:
                    self.add(record)
        whole.unlink()
        return self._builders[where].close() if where in self._builders else None

    def upload(self) -> None:
        """Create each file whole: BUILT -> UPLOADED. A failure leaves at most orphans."""
        self._expect(State.BUILT)
        self._upload_began = self._clock()
        for entry in self.entries:
            self._store.create(entry.path, self._builders[entry.split, entry.source].local)
        self.state = State.UPLOADED

    def commit(
        self,
        *,
        drops: Mapping[str, int] | None = None,
        provenance: Mapping[str, Any] | None = None,
        replaces: Iterable[str] = (),
    ) -> CommitResult:
        """Create the commit: UPLOADED -> COMMITTED, or LOST where another attempt was first.

        Raises StaleAttempt when the upload began more than half of the collector's grace period ago.
        """
        self._expect(State.UPLOADED)
        counts = {name: sum(getattr(entry, name) for entry in self.entries) for name in COUNTS}
        commit = Commit(
            shard_id=self.shard_id, attempt=self.attempt, spec_digest=self._digest, files=self.entries,
            drops=dict(drops or {}), replaces=sorted(replaces), provenance=dict(provenance or {}), created=utc_now(), **counts,
        )  # fmt: skip
        for entry in self.entries:
            found = self._store.head(entry.path).size
            if found != entry.size:
                raise CorruptFile(
                    f"{entry.path} arrived with {found:,} bytes, expected {entry.size:,}; run the shard again."
                )
        self._refuse_if_stale()
        path = layout.commit_path(self.shard_id)
        try:
            self._store.create(path, seal(commit))
            won = True
        except Exists:
            # An acknowledgement can be lost twice over: the object may be ours although its bytes came back damaged.
            winner = read_sealed(self._store, Commit, path)
            if winner.spec_digest != self._digest:
                raise CommitConflict(
                    f"{path} was committed under spec {winner.spec_digest[:12]}, this cache has {self._digest[:12]}; "
                    "run `teachercache verify`."
                ) from None
            won = winner.attempt == self.attempt
        self.state = State.COMMITTED if won else State.LOST
        if won:
            self._refuse_if_stale()  # suspended between the check and the request: publishers judge this commit void too
        return CommitResult(won=won, bytes=sum(e.size for e in self.entries), files=self.entries, **counts)

    def _refuse_if_stale(self) -> None:
        age = self._clock() - self._upload_began
        if age > self._grace / 2:
            raise StaleAttempt(
                f"shard {self.shard_id}: the upload began {age:,.0f} s ago, longer than half of the grace period "
                f"({self._grace:,.0f} s), so its files may be collected; run the shard again."
            )

    def _expect(self, state: State) -> None:
        if self.state is not state:
            raise RuntimeError(f"attempt {self.attempt} is {self.state.value}, expected {state.value}")
