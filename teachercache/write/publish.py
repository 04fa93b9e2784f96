"""publish: make everything that is committed visible as the next manifest.

A publisher loads the newest manifest *before* it lists the commits, and commits are never removed, so what it builds
holds everything that the newest manifest holds. If its number is taken, it starts over. Hence the sequence of manifests
never shrinks, whoever publishes.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping

from teachercache.errors import Exists, IncompleteCache, MissingObject, StoreUnavailable
from teachercache.format import layout
from teachercache.format.objects import COUNTS, Manifest, ManifestFile
from teachercache.format.sealed import seal, utc_now
from teachercache.format.spec import CacheSpec
from teachercache.store.ledger import Ledger
from teachercache.store.liveness import is_void, live_commits, resolve_replacements
from teachercache.store.store import ObjectInfo, Store
from teachercache.write.attempt import GRACE_SECONDS
from teachercache.write.uniqueness import check_unique

PUBLISH_TRIES = 50


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
    ledger = Ledger(store, spec)
    for _ in range(PUBLISH_TRIES):
        newest = ledger.newest_manifest()  # before the listing of commits: see the module
        candidate = _snapshot(ledger, newest, allow_partial, allow_repeated_content, grace_seconds)
        if newest is not None and candidate.content() == newest.content():
            return newest
        try:
            store.create(layout.manifest_path(candidate.number), seal(candidate))
        except Exists:
            continue
        return candidate
    raise StoreUnavailable(f"{store.url}: {PUBLISH_TRIES} other publishers were faster each time; publish again.")


def _snapshot(
    ledger: Ledger, newest: Manifest | None, allow_partial: bool, allow_repeated_content: bool, grace_seconds: float
) -> Manifest:
    store, spec = ledger.store, ledger.spec()
    listed, plans, quarantined = ledger.dated_commits(), ledger.plans(), ledger.quarantines()
    data = {o.path: o for o in store.list(layout.DATA)}
    settled = {entry.path for entry in newest.files} if newest else set()
    commits = [c for c, info in listed if not is_void(c, info.modified, data, settled, grace_seconds)]
    for commit in commits:
        commit.check(spec.digest)
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
    documents, repeated = check_unique(store, files, spec, allow_repeated_content=allow_repeated_content)
    counts = {name: sum(getattr(f, name) for f in files) for name in COUNTS} | {"documents": documents}
    drops: Counter[str] = Counter()
    winners = set(replaced.values())
    for commit in commits:
        if not commit.replaces or commit.shard_id in winners:  # what a void replacement left out is still there
            drops.update(commit.drops)
    return Manifest(
        number=layout.number_after(newest.number) if newest else 1,
        spec_digest=spec.digest,
        created=utc_now(),
        publisher=uuid.uuid4().hex,
        files=files,
        plans=sorted(plans),
        replaced=replaced,
        shards_planned=len(planned),
        shards_committed=len(planned & committed) if planned else len(committed),
        shards_quarantined=len(held),
        **counts,
        drops=dict(sorted(drops.items())),
        repeated_content=repeated,
        complete=not missing,
        parent=newest.digest if newest else None,
    )


def _check_present(store: Store, files: list[ManifestFile], data: Mapping[str, ObjectInfo]) -> None:
    """Raise MissingObject for a file that a listing lacks: one request; S3's listings are strongly consistent."""
    for entry in files:
        there = data.get(entry.path)
        if there is None or there.size != entry.size:
            found = "is not there" if there is None else f"has {there.size:,} bytes, expected {entry.size:,}"
            raise MissingObject(
                f"{store.url}: {entry.path} of shard {entry.shard_id} {found}; nothing was published. "
                "`gc` drops such a commit, and the job then computes the shard again."
            )
