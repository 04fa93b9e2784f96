"""Ledger: what a cache says about itself. Reads its spec, commits, plans, quarantines and manifests; never writes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import BaseModel

from teachercache.errors import CorruptFile, MissingObject, NotACache, UnsafeManifest
from teachercache.format import layout
from teachercache.format.objects import Commit, Manifest, Plan, Quarantine
from teachercache.format.sealed import unseal
from teachercache.format.spec import CacheSpec
from teachercache.store.store import ObjectInfo, Store

M = TypeVar("M", bound=BaseModel)
READS = 3
THREADS = 16  # small objects read at the same time


def read_sealed(store: Store, model: type[M], path: str) -> M:
    """Read and parse a sealed object; a transfer that arrives damaged is repeated twice before CorruptFile."""
    for _ in range(READS - 1):
        with suppress(CorruptFile):
            return unseal(model, store.read(path), path)
    return unseal(model, store.read(path), path)


class Ledger:
    """The read side of a cache's protocol. Needs read access alone; every call asks the store anew, except `spec`."""

    def __init__(self, store: Store, spec: CacheSpec | None = None) -> None:
        """Read the cache at a store's root; `spec` saves reading spec.json."""
        self.store = store
        self._spec = spec

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
        return {_name(o, layout.COMMITS) for o in self._objects(layout.COMMITS)}

    def commits(self, most: int | None = None) -> list[Commit]:
        """Return every commit (or the first `most`), sorted by shard. Cost: one listing, one small read a commit."""
        return self._read_many(Commit, (o.path for o in self._objects(layout.COMMITS)[:most]))

    def commits_of(self, shard_ids: Iterable[str]) -> list[Commit]:
        """Return the commits of these shards, in their order; MissingObject where one has none."""
        return self._read_many(Commit, map(layout.commit_path, shard_ids))

    def dated_commits(self) -> list[tuple[Commit, ObjectInfo]]:
        """Return every commit with its object, whose time is the server's, sorted by shard."""
        objects = self._objects(layout.COMMITS)
        return list(zip(self._read_many(Commit, (o.path for o in objects)), objects, strict=True))

    def plans(self) -> dict[str, Plan]:
        """Return every plan by its digest."""
        objects = self._objects(layout.PLANS)
        plans = self._read_many(Plan, (o.path for o in objects))
        return {_name(o, layout.PLANS): plan for o, plan in zip(objects, plans, strict=True)}

    def quarantines(self) -> dict[str, Quarantine]:
        """Return the last quarantine of each shard, by its own time of creation; shards that were committed included."""
        found = self._read_many(Quarantine, (o.path for o in self._objects(layout.QUARANTINE)))
        return {q.shard_id: q for q in sorted(found, key=lambda q: q.created)}

    # ---- manifests ---------------------------------------------------------------------------------------------

    def manifest_numbers(self) -> list[int]:
        """Return the numbers of the published manifests, ascending."""
        found = (layout.manifest_number(o.path) for o in self.store.list(layout.MANIFESTS))
        return sorted(n for n in found if n is not None)

    def manifest(self, number: int) -> Manifest:
        """Read and check one manifest; UnsafeManifest where it does not belong to this cache."""
        path = layout.manifest_path(number)
        manifest = read_sealed(self.store, Manifest, path)
        if manifest.number != number:
            raise UnsafeManifest(f"{path} calls itself number {manifest.number}; objects were moved.")
        manifest.check(self.spec().digest)
        return manifest

    def newest_manifest(self) -> Manifest | None:
        """Return the manifest with the highest number, or None where nothing was published."""
        numbers = self.manifest_numbers()
        return self.manifest(numbers[-1]) if numbers else None

    def _objects(self, prefix: str) -> list[ObjectInfo]:
        return [o for o in self.store.list(prefix) if o.path.endswith(".json")]

    def _read_many(self, model: type[M], paths: Iterable[str]) -> list[M]:
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(lambda path: read_sealed(self.store, model, path), paths))


def _name(item: ObjectInfo, prefix: str) -> str:
    return item.path.removeprefix(prefix).removesuffix(".json")
