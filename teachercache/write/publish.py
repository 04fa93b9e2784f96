"""publish: make everything that is committed visible as the next manifest.

A publisher loads the newest manifest *before* it lists the commits, and commits are never removed, so what it builds
holds everything that the newest manifest holds. If its number is taken, it starts over. Hence the sequence of manifests
never shrinks, whoever publishes. What the newest manifest settled is remembered: only commits that came since are read.
"""

from __future__ import annotations

import hashlib
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from teachercache.errors import Exists, IncompleteCache, MissingObject, StoreUnavailable, UsageError
from teachercache.format import layout
from teachercache.format.objects import COUNTS, Commit, Manifest, ManifestFile, ManifestPart, PartRef
from teachercache.format.sealed import seal, utc_now
from teachercache.format.spec import CacheSpec
from teachercache.store.ledger import Ledger, Snapshot
from teachercache.store.liveness import is_dead, is_void, live_commits, planned_shards, resolve_replacements
from teachercache.store.store import ObjectInfo, Store
from teachercache.write.attempt import GRACE_SECONDS
from teachercache.write.remembered import Remembered
from teachercache.write.uniqueness import judge, read_keys, refuse_repeated

PUBLISH_TRIES = 50
PART_ENTRIES = 2**14  # files and replaced shards that a manifest holds itself, and that a part holds: about 8 MB
PAGE = 1000  # names that one request of a listing gives
THREADS = 16


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
    IncompleteCache (unless allow_partial). Cost: two listings, the newest manifest, and the key columns of new files.
    """
    ledger = Ledger(store, spec)
    for _ in range(PUBLISH_TRIES):
        with tempfile.TemporaryDirectory(prefix="teachercache-publish-") as folder:
            seen = ledger.snapshot()  # the newest manifest first: see the module
            known = Remembered(store, Path(folder), list(seen.newest.keys) if seen.newest else [])
            candidate = _next(ledger, seen, known, allow_partial, allow_repeated_content, grace_seconds)
            if seen.newest is not None and candidate.says_as(seen.newest):
                return seen.newest
            known.upload()
            head, held, new = split_manifest(candidate, seen.newest)
            for ref, part in held[len(held) - new :]:
                store.create(layout.part_path(ref.sha256), seal(part))
            try:
                store.create(layout.manifest_path(candidate.number), seal(head))
            except Exists:
                continue
            return head.whole([part for _, part in held])
    raise StoreUnavailable(f"{store.url}: {PUBLISH_TRIES} other publishers were faster each time; publish again.")


def _next(
    ledger: Ledger,
    seen: Snapshot,
    known: Remembered,
    allow_partial: bool,
    allow_repeated_content: bool,
    grace_seconds: float,
) -> Manifest:
    store, spec, newest = ledger.store, ledger.spec(), seen.newest
    unseen = {entry.shard_id for entry in newest.files} - seen.listed.keys() if newest else set()
    if newest and unseen:
        raise MissingObject(
            f"{store.url}: the commit of shard {min(unseen)}, which manifest {newest.number} names, is not listed; "
            "nothing was published: the store's listing is stale, or the commit was removed."
        )
    settled_files = newest.files if newest else []
    data, whole = _data_of(store, settled_files, [commit for commit, _ in seen.fresh])
    commits = [c for c, info in seen.fresh if not is_void(c, info.modified, data, (), grace_seconds)]
    for commit in commits:
        commit.check(spec.digest)
    committed = seen.settled | {commit.shard_id for commit in commits}
    plans = ledger.plans()
    planned = planned_shards(plans.values(), committed).keys()
    missing = planned - committed
    held = missing & ledger.quarantined() if missing else set()
    if missing and not allow_partial:
        voids = len(seen.fresh) - len(commits)
        void = f", {voids} void commits: run gc" if voids else ""
        raise IncompleteCache(
            f"{store.url}: {len(missing)} of {len(planned)} planned shards have no commit ({len(held)} in quarantine{void}); "
            "run the job again, or publish with --allow-partial."
        )
    before = newest.replaced if newest else {}
    replaced = resolve_replacements(commits, before, seen.settled)
    fresh = [
        ManifestFile(**f.model_dump(), shard_id=c.shard_id) for c in live_commits(commits, replaced) for f in c.files
    ]
    kept = [entry for entry in settled_files if entry.shard_id not in replaced]
    files = sorted([*kept, *fresh], key=lambda f: f.path)
    _check_present(store, files if whole else fresh, data)
    documents, repeated = _unique(ledger, newest if replaced == before else None, known, files, fresh)
    refuse_repeated(store, repeated, allowed=allow_repeated_content)
    if not documents and newest is None:
        lost: Counter[str] = Counter()
        for commit in commits:
            lost.update(commit.drops)
        reasons = ", ".join(f"{reason} {count}" for reason, count in lost.most_common(4)) or "no shard holds one"
        raise UsageError(f"{store.url} holds no document ({reasons}); nothing was published.")
    counts = {name: sum(getattr(f, name) for f in files) for name in COUNTS} | {"documents": documents}
    drops, reused = Counter(newest.drops if newest else {}), newest.reused_rows if newest else 0
    winners, idle = set(replaced.values()), set(newest.idle if newest else ())
    for commit in commits:
        if not commit.replaces or commit.shard_id in winners:  # what a void replacement left out is still there
            drops.update(commit.drops)
            reused += _reused_rows(commit)
            if not commit.files and commit.shard_id not in replaced:
                idle.add(commit.shard_id)
        elif is_dead(commit, replaced):
            idle.add(commit.shard_id)
    return Manifest(
        number=layout.number_after(newest.number) if newest else 1,
        spec_digest=spec.digest,
        created=utc_now(),
        publisher=uuid.uuid4().hex,
        files=files,
        plans=sorted(plans),
        replaced=replaced,
        idle=sorted(idle),
        keys=known.runs,
        shards_planned=len(planned),
        shards_committed=len(planned & committed) if planned else len(committed),
        shards_quarantined=len(held),
        **counts,
        drops=dict(sorted(drops.items())),
        repeated_content=repeated,
        reused_rows=reused,
        complete=not missing and documents > 0,
        parent=newest.digest if newest else None,
    )


def _data_of(
    store: Store, settled: Sequence[ManifestFile], fresh: Iterable[Commit]
) -> tuple[dict[str, ObjectInfo], bool]:
    """Return the data objects by path, and whether that is all of them or those of `fresh` commits alone.

    A listing, or a HEAD of each new file: whichever takes fewer requests. S3's listings are strongly consistent.
    """
    paths = [entry.path for commit in fresh for entry in commit.files]
    if len(paths) > (len(settled) + len(paths)) // PAGE:
        return {o.path: o for o in store.list(layout.DATA)}, True

    def look(path: str) -> ObjectInfo | None:
        try:
            return store.head(path)
        except MissingObject:
            return None

    with ThreadPoolExecutor(THREADS) as pool:
        return {o.path: o for o in pool.map(look, paths) if o is not None}, False


def _unique(
    ledger: Ledger, base: Manifest | None, known: Remembered, files: list[ManifestFile], fresh: list[ManifestFile]
) -> tuple[int, int]:
    """Return the documents of all files and the records whose content is in two splits; raises DuplicateDocument.

    base: the newest manifest, where `fresh` files are all that is new and nothing of it was replaced. Then the keys of new
    files are enough, unless one meets what is remembered: that is decided by the keys of every file.
    """
    store, spec = ledger.store, ledger.spec()
    if base is not None and not fresh:
        return base.documents, base.repeated_content
    if base is not None and known.runs:
        keys = read_keys(store, fresh, spec)
        documents, repeated = judge(store, fresh, keys, spec)
        if not known.meets(fresh, keys):
            known.add(fresh, keys)
            return base.documents + documents, base.repeated_content + repeated
    keys = read_keys(store, files, spec)
    result = judge(store, files, keys, spec)
    known.runs = []
    known.add(files, keys)
    return result


def _reused_rows(commit: Commit) -> int:
    reused: Any = commit.provenance.get("reused") or {}
    rows = reused.get("rows", 0) if isinstance(reused, dict) else 0
    return rows if isinstance(rows, int) and rows > 0 else 0


def split_manifest(
    manifest: Manifest, newest: Manifest | None
) -> tuple[Manifest, list[tuple[PartRef, ManifestPart]], int]:
    """Return a manifest as it is to be stored, its parts, and how many of these, at the end, are new.

    Parts of the newest manifest are shared where all their entries still hold.

    A manifest of up to PART_ENTRIES files and replaced shards has no parts; of more, it holds at most that number itself.
    """
    left = {entry.path: entry for entry in manifest.files}
    replaced = dict(manifest.replaced)
    held: list[tuple[PartRef, ManifestPart]] = []
    for ref, part in newest.held_parts if newest else ():
        if all((found := left.get(entry.path)) is entry or found == entry for entry in part.files):
            held.append((ref, part))
            for entry in part.files:
                del left[entry.path]
            for name in part.replaced:
                del replaced[name]
    files, pairs, new = list(left.values()), sorted(replaced.items()), 0
    while len(files) + len(pairs) > PART_ENTRIES or (new and (files or pairs)):
        mine, files = files[:PART_ENTRIES], files[PART_ENTRIES:]
        room = PART_ENTRIES - len(mine)
        theirs, pairs = pairs[:room], pairs[room:]
        part = ManifestPart(
            spec_digest=manifest.spec_digest, publisher=uuid.uuid4().hex, files=mine, replaced=dict(theirs)
        )
        digest = hashlib.sha256(seal(part)).hexdigest()
        held.append((PartRef(sha256=digest, files=len(mine), replaced=len(theirs)), part))
        new += 1
    refs = [ref for ref, _ in held]
    return manifest.model_copy(update={"files": files, "replaced": dict(pairs), "parts": refs}), held, new


def _check_present(store: Store, files: list[ManifestFile], data: Mapping[str, ObjectInfo]) -> None:
    """Raise MissingObject for a file that is not among the data objects, or not whole."""
    for entry in files:
        there = data.get(entry.path)
        if there is None or there.size != entry.size:
            found = "is not there" if there is None else f"has {there.size:,} bytes, expected {entry.size:,}"
            raise MissingObject(
                f"{store.url}: {entry.path} of shard {entry.shard_id} {found}; nothing was published. "
                "`gc` drops such a commit, and the job then computes the shard again."
            )
