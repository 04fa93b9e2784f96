"""gc: remove what no reader and no writer can need. A dry run unless asked to delete.

Kept is every file that a retained manifest names, and every file of a commit that is not replaced. What is left are
orphans (uploads whose attempt died or lost), removed when older than the grace period by the *server's* clock, and
files of replaced shards that no retained manifest names. A commit that came more than half the grace period after its
upload is void (`liveness.is_void`), so an orphan that old never becomes part of the cache, however long its writer slept.

Listing order matters: data first, commits and manifests after. A commit that appears in between then protects its files.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from teachercache.errors import MissingObject, UsageError
from teachercache.format import layout
from teachercache.format.objects import Commit
from teachercache.format.spec import CacheSpec
from teachercache.store.ledger import Ledger, read_sealed
from teachercache.store.liveness import is_dead, is_void
from teachercache.store.store import ObjectInfo, Store
from teachercache.write.attempt import GRACE_SECONDS

MIN_GRACE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Garbage:
    """What `collect` removed, or would remove."""

    dry_run: bool
    manifests: list[ObjectInfo]  # expired
    orphans: list[ObjectInfo]  # uploads without a commit
    replaced: list[ObjectInfo]  # files of replaced shards
    void: list[ObjectInfo]  # commits that came too late, or lost a file: their shards are computed again
    scratch: list[ObjectInfo]  # leftovers of probes, leases that ran out
    kept_files: int
    waiting: int  # orphans that are younger than the grace period

    @property
    def objects(self) -> list[ObjectInfo]:
        """Return all of it, in the order of removal: killed in between, no manifest names a file that is gone."""
        return [*self.manifests, *self.void, *self.orphans, *self.replaced, *self.scratch]

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
    numbers = ledger.manifest_numbers()
    retained = numbers if keep_manifests is None else numbers[-keep_manifests:]
    manifests = [ledger.manifest(n) for n in retained]
    newest = manifests[-1] if manifests else None
    named = {entry.path for manifest in manifests for entry in manifest.files}
    objects = {o.path: o for o in data}
    void: list[ObjectInfo] = []
    live: set[str] = set()
    of_dead: set[str] = set()
    for commit, info in ledger.dated_commits():
        files = {entry.path for entry in commit.files}
        unlisted = sorted(files - named - objects.keys())  # lost? No listing is trusted with that
        if newest is not None and is_dead(commit, newest):  # its files may be gone, its shard is done all the same
            of_dead |= files
        elif is_void(commit, info.modified, objects, named, grace_seconds) or not all(map(store.exists, unlisted)):
            void.append(info)
        else:
            live |= files

    unneeded = [o for o in data if o.path not in named and o.path not in live]
    unclaimed = [o for o in unneeded if o.path not in of_dead]
    expired = {layout.manifest_path(n) for n in numbers if n not in retained}
    found = Garbage(
        dry_run=dry_run,
        manifests=[o for o in store.list(layout.MANIFESTS) if o.path in expired],
        orphans=[o for o in unclaimed if o.modified < limit and not _claimed(store, o, objects, named, grace_seconds)],
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
