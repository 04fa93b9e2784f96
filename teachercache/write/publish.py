"""Manifests: create-only snapshots that readers pin. And `publish`, which makes the next one.

A publisher loads the newest manifest *before* it lists the commits, and commits are never removed, so what it builds
holds everything that the newest manifest holds. If its number is taken, it starts over. Hence the sequence of manifests
never shrinks, whoever publishes.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Literal, TypeVar

from pydantic import BaseModel, Field

from teachercache.errors import (
    CommitConflict,
    IncompleteCache,
    MissingObject,
    StoreUnavailable,
    UnsafeManifest,
)
from teachercache.format import layout
from teachercache.format.objects import Plan, Quarantine
from teachercache.format.sealed import read_sealed, seal, utc_now
from teachercache.format.spec import CacheSpec, Strict, json_digest
from teachercache.parquet.datafile import MAX_FILE_BYTES, FileEntry
from teachercache.store.store import Exists, ObjectInfo, Store
from teachercache.write.attempt import GRACE_SECONDS, Commit
from teachercache.write.uniqueness import check_unique

M = TypeVar("M", bound=BaseModel)
PUBLISH_TRIES = 50
THREADS = 16


class ManifestFile(FileEntry):
    """A data file and the shard whose commit named it."""

    shard_id: str


class Manifest(Strict):
    """`manifests/<number>.json`."""

    format_version: Literal[1] = 1
    number: int = Field(ge=1, le=99_999_999)
    spec_digest: str
    created: str
    publisher: str = Field(description="random; tells two publishers' equal content apart")
    files: list[ManifestFile] = Field(repr=False)
    plans: list[str]
    replaced: dict[str, str] = Field(default_factory=dict, description="shard -> the shard whose commit replaced it")
    shards_planned: int
    shards_committed: int
    shards_quarantined: int
    documents: int
    records: int
    tokens: int
    rows: int
    drops: dict[str, int] = Field(default_factory=dict)
    repeated_content: int = Field(default=0, description="windows whose content stands in another split too")
    complete: bool
    parent: str | None = Field(default=None, description="digest of the manifest before; informative")

    @property
    def digest(self) -> str:
        """sha256 hex of the whole content; a training run's state names it."""
        return json_digest(self.model_dump(mode="json"))

    def content(self) -> dict[str, object]:
        """What makes two manifests the same snapshot."""
        return self.model_dump(mode="json", exclude={"number", "created", "publisher", "parent"})

    def check(self, spec_digest: str) -> None:
        """Raise UnsafeManifest unless every entry is a plausible, distinct data file of this cache."""
        if self.spec_digest != spec_digest:
            raise UnsafeManifest(
                f"manifest {self.number} belongs to spec {self.spec_digest[:12]}, the cache has {spec_digest[:12]}."
            )
        seen: set[str] = set()
        for entry in self.files:
            where = layout.parse_data_path(entry.path)
            if (where.codec, where.split, where.source, where.shard_id) != (
                entry.codec,
                entry.split,
                entry.source,
                entry.shard_id,
            ):
                raise UnsafeManifest(f"manifest {self.number}: {entry.path} does not agree with its own entry.")
            if entry.size > MAX_FILE_BYTES:
                raise UnsafeManifest(
                    f"manifest {self.number}: {entry.path} claims {entry.size:,} bytes, limit {MAX_FILE_BYTES:,}."
                )
            if entry.path in seen:
                raise UnsafeManifest(f"manifest {self.number} names {entry.path} twice.")
            seen.add(entry.path)
        sums = {name: sum(getattr(entry, name) for entry in self.files) for name in ("rows", "tokens", "records")}
        for name, total in sums.items():
            if getattr(self, name) != total:
                raise UnsafeManifest(
                    f"manifest {self.number} says {getattr(self, name):,} {name}, its files hold {total:,}."
                )


def manifest_numbers(store: Store) -> list[int]:
    """Ascending numbers of the published manifests."""
    found = (layout.manifest_number(o.path) for o in store.list(layout.MANIFESTS))
    return sorted(n for n in found if n is not None)


def load_manifest(store: Store, number: int, spec_digest: str) -> Manifest:
    """Read and check one manifest."""
    path = layout.manifest_path(number)
    manifest = read_sealed(store, Manifest, path)
    if manifest.number != number:
        raise UnsafeManifest(f"{path} calls itself number {manifest.number}; objects were moved.")
    manifest.check(spec_digest)
    return manifest


def newest_manifest(store: Store, spec_digest: str) -> Manifest | None:
    numbers = manifest_numbers(store)
    return load_manifest(store, numbers[-1], spec_digest) if numbers else None


def read_many(store: Store, model: type[M], paths: Iterable[str]) -> list[M]:
    """Sealed objects, read in parallel, in the order of the paths."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(lambda path: read_sealed(store, model, path), paths))


def read_commits(store: Store) -> list[Commit]:
    """Every commit, sorted by shard."""
    return [commit for commit, _ in list_commits(store)]


def list_commits(store: Store) -> list[tuple[Commit, ObjectInfo]]:
    """Every commit with its object, sorted by shard."""
    objects = [o for o in store.list(layout.COMMITS) if o.path.endswith(".json")]
    return list(zip(read_many(store, Commit, [o.path for o in objects]), objects, strict=True))


def is_void(
    commit: Commit, created: datetime, data: Mapping[str, ObjectInfo], settled: Collection[str], grace_seconds: float
) -> bool:
    """Whether a commit came so long after its upload that the collector may already have taken its files.

    A writer checks its own age before it commits, but it can be suspended between the check and the request. Both times
    here are the server's, so every publisher and every collector judges alike, whatever the writers' clocks say. What a
    manifest has settled stays.
    """
    limit = timedelta(seconds=grace_seconds / 2)
    return any(
        entry.path not in settled and entry.path in data and created - data[entry.path].modified > limit
        for entry in commit.files
    )


def read_plans(store: Store) -> dict[str, Plan]:
    paths = [o.path for o in store.list(layout.PLANS) if o.path.endswith(".json")]
    return {
        path.removeprefix(layout.PLANS).removesuffix(".json"): plan
        for path, plan in zip(paths, read_many(store, Plan, paths), strict=True)
    }


def read_quarantines(store: Store) -> dict[str, Quarantine]:
    """The last quarantine of each shard, by its own time of creation."""
    paths = [o.path for o in store.list(layout.QUARANTINE) if o.path.endswith(".json")]
    found = sorted(read_many(store, Quarantine, paths), key=lambda q: q.created)
    return {q.shard_id: q for q in found}


def resolve_replacements(commits: Iterable[Commit], settled: dict[str, str]) -> dict[str, str]:
    """shard -> the shard that replaced it. What an earlier manifest settled stays; then the first by name wins.

    Two optimisers may have replaced overlapping sets. The second one's commit is void as a whole: applying half of it
    would repeat or lose documents.
    """
    by_shard = {commit.shard_id: commit for commit in commits}
    replaced = dict(settled)
    winners = set(settled.values())
    for shard_id in sorted(by_shard):
        commit = by_shard[shard_id]
        if not commit.replaces or shard_id in winners:
            continue
        if all(old in by_shard and old not in replaced for old in commit.replaces):
            replaced |= dict.fromkeys(commit.replaces, shard_id)
    return replaced


def live_commits(commits: Iterable[Commit], replaced: dict[str, str]) -> list[Commit]:
    """The commits whose files are the cache: neither replaced, nor a replacement that lost."""
    winners = set(replaced.values())
    return [c for c in commits if c.shard_id not in replaced and (not c.replaces or c.shard_id in winners)]


def publish(
    store: Store,
    spec: CacheSpec,
    *,
    allow_partial: bool = False,
    allow_repeated_content: bool = False,
    grace_seconds: float = GRACE_SECONDS,
) -> Manifest:
    """Create the next manifest from every commit, or return the newest one where nothing is new.

    Raises MissingObject (a committed file is gone), DuplicateDocument, RepeatedContent (unless allowed),
    IncompleteCache (unless allow_partial).
    """
    for _ in range(PUBLISH_TRIES):
        newest = newest_manifest(store, spec.digest)  # before the listing of commits: see the module
        candidate = _snapshot(store, spec, newest, allow_partial, allow_repeated_content, grace_seconds)
        if newest is not None and candidate.content() == newest.content():
            return newest
        try:
            store.create(layout.manifest_path(candidate.number), seal(candidate))
        except Exists:
            continue
        return candidate
    raise StoreUnavailable(f"{store.url}: {PUBLISH_TRIES} other publishers were faster each time; publish again.")


def _snapshot(
    store: Store,
    spec: CacheSpec,
    newest: Manifest | None,
    allow_partial: bool,
    allow_repeated: bool,
    grace_seconds: float,
) -> Manifest:
    listed, plans, quarantined = list_commits(store), read_plans(store), read_quarantines(store)
    data = {o.path: o for o in store.list(layout.DATA)}
    settled = {entry.path for entry in newest.files} if newest else set()
    commits = [c for c, info in listed if not is_void(c, info.modified, data, settled, grace_seconds)]
    for commit in commits:
        check_commit(commit, spec.digest)
    committed = {commit.shard_id for commit in commits}
    if newest and (unseen := {entry.shard_id for entry in newest.files} - committed):
        raise MissingObject(
            f"{store.url}: the commit of shard {min(unseen)}, which manifest {newest.number} names, is not listed; "
            "nothing was published: the store's listing is stale, or the commit was removed."
        )
    planned = {shard.shard_id for plan in plans.values() for shard in plan.shards}
    missing = planned - committed
    held = missing & quarantined.keys()
    if missing and not allow_partial:
        void = f", {len(listed) - len(commits)} void commits: run gc" if len(listed) > len(commits) else ""
        raise IncompleteCache(
            f"{store.url}: {len(missing)} of {len(planned)} planned shards have no commit ({len(held)} in quarantine{void}); "
            "run the job again, or publish with --allow-partial."
        )
    replaced = resolve_replacements(commits, newest.replaced if newest else {})
    live = live_commits(commits, replaced)
    files = [ManifestFile(**entry.model_dump(), shard_id=c.shard_id) for c in live for entry in c.files]
    files.sort(key=lambda f: f.path)
    _check_present(store, files, data)
    uniqueness = check_unique(store, files, spec, allow_repeated_content=allow_repeated)
    drops: Counter[str] = Counter()
    winners = set(replaced.values())
    for commit in commits:
        if not commit.replaces or commit.shard_id in winners:  # what a void replacement left out is still there
            drops.update(commit.drops)
    return Manifest(
        number=newest.number + 1 if newest else 1,
        spec_digest=spec.digest,
        created=utc_now(),
        publisher=uuid.uuid4().hex,
        files=files,
        plans=sorted(plans),
        replaced=replaced,
        shards_planned=len(planned),
        shards_committed=len(planned & committed) if planned else len(committed),
        shards_quarantined=len(held),
        documents=uniqueness.documents,
        records=sum(f.records for f in files),
        tokens=sum(f.tokens for f in files),
        rows=sum(f.rows for f in files),
        drops=dict(sorted(drops.items())),
        repeated_content=uniqueness.repeated_content,
        complete=not missing,
        parent=newest.digest if newest else None,
    )


def check_commit(commit: Commit, spec_digest: str) -> None:
    """Raise unless a commit belongs to this spec and names only files of its own shard and attempt."""
    if commit.spec_digest != spec_digest:
        raise CommitConflict(
            f"the commit of shard {commit.shard_id} belongs to spec {commit.spec_digest[:12]}, this cache has {spec_digest[:12]}."
            " It was copied here from another cache: remove it."
        )
    for entry in commit.files:
        where = layout.parse_data_path(entry.path)
        if (where.shard_id, where.attempt) != (commit.shard_id, commit.attempt):
            raise UnsafeManifest(
                f"the commit of shard {commit.shard_id} names {entry.path}, which is not its own file."
            )


def _check_present(store: Store, files: list[ManifestFile], data: Mapping[str, ObjectInfo]) -> None:
    """By one listing instead of a HEAD a file; S3's listings are strongly consistent."""
    for entry in files:
        there = data.get(entry.path)
        if there is None or there.size != entry.size:
            found = "is not there" if there is None else f"has {there.size:,} bytes, expected {entry.size:,}"
            raise MissingObject(
                f"{store.url}: {entry.path} of shard {entry.shard_id} {found}; nothing was published. "
                "`gc` drops such a commit, and the job then computes the shard again."
            )
