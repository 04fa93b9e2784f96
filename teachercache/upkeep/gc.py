"""gc: remove what no reader and no writer can need. A dry run unless asked to delete.

Kept is every file that a retained manifest names, and every file of a commit that is not replaced. What is left are
orphans (uploads whose attempt died or lost), removed when older than the grace period by the *server's* clock, and
files of replaced shards that no retained manifest names. A commit that came more than half the grace period after its
upload is void (`liveness.is_void`), so an orphan that old never becomes part of the cache, however long its writer slept.

Listing order matters: data first, commits and manifests after. A commit that appears in between then protects its files.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from teachercache.errors import MissingObject, UsageError
from teachercache.format import layout
from teachercache.format.objects import Commit, Manifest
from teachercache.format.spec import CacheSpec
from teachercache.store.ledger import Ledger, read_sealed
from teachercache.store.liveness import is_dead, is_void
from teachercache.store.store import ObjectInfo, Store
from teachercache.urls import refuse_read_only
from teachercache.write.attempt import GRACE_SECONDS

MIN_GRACE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Garbage:
    """What `collect` removed, or would remove."""

    dry_run: bool
    manifests: list[ObjectInfo]  # expired
    parts: list[ObjectInfo]  # parts and key runs that no retained manifest names
    orphans: list[ObjectInfo]  # uploads without a commit
    replaced: list[ObjectInfo]  # files of replaced shards
    void: list[ObjectInfo]  # commits that came too late, or lost a file: their shards are computed again
    scratch: list[ObjectInfo]  # leftovers of probes, leases that ran out
    kept_files: int
    waiting: int  # orphans that are younger than the grace period

    @property
    def objects(self) -> list[ObjectInfo]:
        """Return all of it, in the order of removal: killed in between, no manifest names a file that is gone."""
        return [*self.manifests, *self.parts, *self.void, *self.orphans, *self.replaced, *self.scratch]

    @property
    def bytes(self) -> int:
        """Return how many bytes all of it holds."""
        return sum(o.size for o in self.objects)


def collect(
    store: Store,
    spec: CacheSpec,
    *,
    grace_seconds: float = GRACE_SECONDS,
    keep_manifests: int | None = None,
    dry_run: bool = True,
) -> Garbage:
    """Find, and unless `dry_run` remove, what no one needs.

    keep_manifests: expire all but this many of the newest; None keeps every manifest. Runs pinned to an expired one end
    with an error that says so. Every process that writes to the cache must use the same grace period.
    """
    refuse_read_only(store.url)
    if grace_seconds < MIN_GRACE_SECONDS:
        raise UsageError(
            f"a grace period of {grace_seconds:g} s would collect running uploads; expected {MIN_GRACE_SECONDS:g} s or more."
        )
    if keep_manifests is not None and keep_manifests < 1:
        raise UsageError(
            f"keep_manifests must be at least 1, found {keep_manifests}: the newest manifest is never removed."
        )
    data = [o for o in store.list(layout.DATA) if layout.is_data_path(o.path)]  # strangers' objects stay
    limit = store.now() - timedelta(seconds=grace_seconds)

    ledger = Ledger(store, spec)
    of_manifests = store.list(layout.MANIFESTS)
    seen = ledger.snapshot()
    newest = seen.newest
    numbers = sorted(n for o in of_manifests if (n := layout.manifest_number(o.path)) is not None)
    retained = numbers if keep_manifests is None else numbers[-keep_manifests:]
    manifests = [newest if newest and n == newest.number else ledger.manifest(n) for n in retained]
    holders = [*manifests, *([newest] if newest else [])]  # a newer one may have come since the listing
    named = {entry.path for manifest in holders for entry in manifest.files}
    objects = {o.path: o for o in data}
    void: list[ObjectInfo] = []
    live: set[str] = set()
    of_dead: set[str] = set()
    for commit, info in seen.fresh:  # what the newest manifest settled is in `named`, or done with for ever
        files = {entry.path for entry in commit.files}
        unlisted = sorted(files - named - objects.keys())  # lost? No listing is trusted with that
        if newest is not None and is_dead(
            commit, newest.replaced
        ):  # its files may be gone, its shard is done all the same
            of_dead |= files
        elif is_void(commit, info.modified, objects, named, grace_seconds) or not all(map(store.exists, unlisted)):
            void.append(info)
        else:
            live |= files
    done = {*newest.replaced, *newest.idle} if newest else set()
    of_dead |= {path for path in objects if layout.parse_data_path(path).shard_id in done}

    unneeded = [o for o in data if o.path not in named and o.path not in live]
    unclaimed = [o for o in unneeded if o.path not in of_dead]
    kept = {*retained, *([newest.number] if newest else [])}
    expired = {layout.manifest_path(n) for n in numbers if n not in kept}
    in_use = {layout.part_path(ref.sha256) for m in holders for ref in m.parts}
    in_use |= {layout.keys_path(run.name) for m in holders for run in m.keys}
    settled = seen.settled
    found = Garbage(
        dry_run=dry_run,
        manifests=[o for o in of_manifests if o.path in expired],
        parts=_unnamed(of_manifests, in_use, newest, limit),
        orphans=[
            o
            for o in unclaimed
            if o.modified < limit
            and (
                layout.parse_data_path(o.path).shard_id in settled
                or not _claimed(store, o, objects, named, grace_seconds)
            )
        ],
        replaced=[o for o in unneeded if o.path in of_dead],
        void=void,
        scratch=[o for prefix in (layout.PROBES, layout.LEASES) for o in store.list(prefix) if o.modified < limit],
        kept_files=len(data) - len(unneeded),
        waiting=sum(o.modified >= limit for o in unclaimed),
    )
    if not dry_run:
        for item in found.objects:
            store.delete(item.path)
    return found


def _unnamed(objects: list[ObjectInfo], in_use: set[str], newest: Manifest | None, limit: datetime) -> list[ObjectInfo]:
    """Return the parts and key runs that no retained manifest names and that no publisher can still name.

    A publisher makes them after it loaded its newest manifest, for the next number. Once a manifest is there that is
    younger, by the store's clock, that number is taken: its publisher must start over, and makes new ones.
    """
    written = next((o.modified for o in objects if newest and o.path == layout.manifest_path(newest.number)), None)
    if written is None:
        return []
    before = min(limit, written - timedelta(seconds=MIN_GRACE_SECONDS))
    return [o for o in objects if layout.is_of_manifests(o.path) and o.path not in in_use and o.modified < before]


def _claimed(
    store: Store, item: ObjectInfo, data: dict[str, ObjectInfo], settled: set[str], grace_seconds: float
) -> bool:
    """Return whether the one commit that could name an orphan does, in case the listing of commits was stale."""
    path = layout.commit_path(layout.parse_data_path(item.path).shard_id)
    try:
        info = store.head(path)
        commit = read_sealed(store, Commit, path)
    except MissingObject:
        return False
    names_it = any(entry.path == item.path for entry in commit.files)
    return names_it and not is_void(commit, info.modified, data, settled, grace_seconds)
