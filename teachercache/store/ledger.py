"""Ledger: what a cache says about itself. Reads its spec, commits, plans, quarantines and manifests; never writes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

from teachercache.errors import (
    CommitConflict,
    CorruptFile,
    MissingObject,
    NotACache,
    StoreDenied,
    StoreUnavailable,
    TeacherCacheError,
    UnsafeManifest,
)
from teachercache.format import layout
from teachercache.format.objects import MAX_RUN_BYTES, Commit, Manifest, ManifestPart, PartRef, Plan, Quarantine, Run
from teachercache.format.sealed import MAX_JSON_BYTES, unseal
from teachercache.format.spec import CacheSpec
from teachercache.store.store import ObjectInfo, Store

M = TypeVar("M", bound=BaseModel)
READS = 3
RUNS = 1000  # newest entries of runs that are read
THREADS = 16  # small objects read at the same time


def read_sealed(
    store: Store, model: type[M], path: str, sha256: str | None = None, *, max_bytes: int = MAX_JSON_BYTES
) -> M:
    """Read and parse a sealed object; a transfer that arrives damaged is repeated twice before CorruptFile.

    sha256: what the object's bytes must have, where another object says so. UnsafeManifest above `max_bytes`.
    """
    for _ in range(READS - 1):
        with suppress(CorruptFile):
            return _unsealed(store, model, path, sha256, max_bytes)
    return _unsealed(store, model, path, sha256, max_bytes)


def _unsealed(store: Store, model: type[M], path: str, sha256: str | None, max_bytes: int) -> M:
    data = store.read(path, max_bytes=max_bytes)
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise CorruptFile(f"{path} is not the object that its manifest names.")
    return unseal(model, data, path)


def read_commit(store: Store, path: str) -> Commit:
    """Read a commit; CommitConflict where it is another shard's, hence a copy."""
    commit = read_sealed(store, Commit, path)
    if layout.commit_path(commit.shard_id) != path:
        raise CommitConflict(f"objects were moved: {path} is the commit of shard {commit.shard_id}; remove it.")
    return commit


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is committed, seen from the newest manifest: only commits that it did not settle are read."""

    newest: Manifest | None
    listed: dict[str, ObjectInfo]  # shard -> its commit's object
    settled: set[str]  # shards that the newest manifest settled
    fresh: list[tuple[Commit, ObjectInfo]]  # the other commits, sorted by shard


class Ledger:
    """The read side of a cache's protocol. Needs read access alone; every call asks the store anew, except `spec`."""

    def __init__(self, store: Store, spec: CacheSpec | None = None) -> None:
        """Read the cache at a store's root; `spec` saves reading spec.json."""
        self.store = store
        self._spec = spec
        self._parts: dict[str, ManifestPart] = {}  # immutable, and shared by manifests

    @classmethod
    def open(cls, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Ledger:
        """Return the ledger of a URL. Touches nothing yet."""
        return cls(Store.open(url, storage_options))

    def spec(self) -> CacheSpec:
        """Return the cache's identity, read once; NotACache where there is none."""
        if self._spec is None:
            try:
                self._spec = read_sealed(self.store, CacheSpec, layout.SPEC)
            except MissingObject as error:
                raise NotACache(
                    f"{self.store.where} is not a teacher cache: it has no {layout.SPEC}; "
                    "`teachercache ls` lists the caches below a URL."
                ) from error
        return self._spec

    # ---- shards ------------------------------------------------------------------------------------------------

    def committed(self) -> set[str]:
        """Return the ids of the shards that have a commit: one listing, nothing is read."""
        return set(self._commit_objects())

    def commits(self, most: int | None = None) -> list[Commit]:
        """Return every commit (or the first `most`), sorted by shard. Cost: one listing, one small read a commit."""
        return self.commits_of(sorted(self._commit_objects())[:most])

    def commits_of(self, shard_ids: Iterable[str]) -> list[Commit]:
        """Return the commits of these shards, in their order; MissingObject where one has none."""
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(lambda shard: read_commit(self.store, layout.commit_path(shard)), shard_ids))

    def snapshot(self) -> Snapshot:
        """Return the newest manifest, and what was committed since. Cost: the manifest, a listing, a read a new commit.

        The manifest is loaded before the commits are listed. Commits of settled shards never change and are never
        removed (docs/FORMAT.md, section 4), so the manifest says all about them.
        """
        newest = self.newest_manifest()
        listed = self._commit_objects()
        settled = newest.settled() if newest else set()
        names = sorted(listed.keys() - settled)
        return Snapshot(newest, listed, settled, [(c, listed[c.shard_id]) for c in self.commits_of(names)])

    def plan(self, digest: str) -> Plan:
        """Read one plan."""
        return read_sealed(self.store, Plan, layout.plan_path(digest))

    def plans(self) -> dict[str, Plan]:
        """Return every plan by its digest."""
        digests = sorted(d for o in self.store.list(layout.PLANS) if (d := layout.plan_digest(o.path)))
        return dict(zip(digests, self._read_many(Plan, map(layout.plan_path, digests)), strict=True))

    def quarantines(self) -> dict[str, Quarantine]:
        """Return the last quarantine of each shard, by its own time of creation; shards that were committed included."""
        listed = (o.path for o in self.store.list(layout.QUARANTINE) if layout.quarantined_shard(o.path))
        return {q.shard_id: q for q in sorted(self._read_many(Quarantine, listed), key=lambda q: q.created)}

    def quarantined(self) -> set[str]:
        """Return the ids of the shards that have a quarantine: one listing, nothing is read."""
        return {s for o in self.store.list(layout.QUARANTINE) if (s := layout.quarantined_shard(o.path))}

    def run(self, path: str) -> Run:
        """Read and check one entry of `runs/`."""
        found = read_sealed(self.store, Run, path, max_bytes=MAX_RUN_BYTES)
        found.check(path, self.spec().digest)
        return found

    def runs(self) -> tuple[list[Run], int]:
        """Return the last entry of each registered run, best held-out KL first, and how many entries could not be read.

        Anyone who trains writes them, so a bad one is counted, and `verify` names it. Reads the newest thousand.
        """
        listed = [o for o in self.store.list(layout.RUNS) if layout.is_run(o.path)]
        newest = sorted(listed, key=lambda o: o.modified)[-RUNS:]

        def read(info: ObjectInfo) -> Run | None:
            try:
                return self.run(info.path)
            except (StoreDenied, StoreUnavailable):
                raise
            except TeacherCacheError:
                return None

        with ThreadPoolExecutor(THREADS) as pool:
            found = list(pool.map(read, newest))
        last = {run.run: run for run in sorted(filter(None, found), key=lambda run: run.steps)}
        runs = sorted(last.values(), key=lambda r: (r.heldout_kl is None, r.heldout_kl or 0.0, r.student, r.run))
        return runs, found.count(None)

    def strange_names(self) -> list[str]:
        """Return the objects whose names no cache has, sorted. Every command ignores them. Cost: a listing of everything."""
        return [o.path for o in self.store.list("") if layout.is_strange(o.path)]

    # ---- manifests ---------------------------------------------------------------------------------------------

    def manifest_numbers(self) -> list[int]:
        """Return the numbers of the published manifests, ascending."""
        found = (layout.manifest_number(o.path) for o in self.store.list(layout.MANIFESTS))
        return sorted(n for n in found if n is not None)

    def manifest(self, number: int) -> Manifest:
        """Read and check one manifest; UnsafeManifest where it does not belong to this cache."""
        path = layout.manifest_path(number)
        head = read_sealed(self.store, Manifest, path)
        if head.number != number:
            raise UnsafeManifest(f"{path} calls itself number {head.number}; objects were moved.")
        with ThreadPoolExecutor(THREADS) as pool:
            manifest = head.whole(list(pool.map(self._part, head.parts)))
        manifest.check(self.spec().digest)
        return manifest

    def newest_manifest(self) -> Manifest | None:
        """Return the manifest with the highest number, or None where nothing was published."""
        numbers = self.manifest_numbers()
        return self.manifest(numbers[-1]) if numbers else None

    def _part(self, ref: PartRef) -> ManifestPart:
        if ref.sha256 not in self._parts:
            path = layout.part_path(ref.sha256)
            self._parts[ref.sha256] = read_sealed(self.store, ManifestPart, path, ref.sha256)
        return self._parts[ref.sha256]

    def _commit_objects(self) -> dict[str, ObjectInfo]:
        return {shard: o for o in self.store.list(layout.COMMITS) if (shard := layout.committed_shard(o.path))}

    def _read_many(self, model: type[M], paths: Iterable[str]) -> list[M]:
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(lambda path: read_sealed(self.store, model, path), paths))
