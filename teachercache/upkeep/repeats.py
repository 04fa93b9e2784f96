"""Publish a cache in which documents are committed more than once: the first copy of each stays, no row is computed.

The order of copies: files that the newest manifest names; then the time of the shard's commit by the store's clock; then
the shard's id. A shard that holds later copies is written again without them, as a commit that replaces it, so running
the same command again resumes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from teachercache.format import layout
from teachercache.format.objects import Commit, FileEntry, Manifest
from teachercache.format.record import Record
from teachercache.parquet.datafile import DataFile
from teachercache.store.liveness import is_void, live_commits, resolve_replacements
from teachercache.write.attempt import ShardAttempt
from teachercache.write.writer import CacheWriter

THREADS = 8
Name = tuple[str, str, str]  # split, source, doc_id


def publish_without_repeats(
    writer: CacheWriter,
    *,
    allow_partial: bool = False,
    allow_repeated_content: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Manifest, int]:
    """Leave later copies of documents out, and publish; return the manifest and how many copies were left out.

    Raises what `publish` raises. Cost: reads the doc_id column of every file, and rewrites the files that hold copies.
    """
    repeats = _repeats(writer)
    for done, (commit, names) in enumerate(repeats, 1):
        _rewrite(writer, commit, names)
        if progress:
            progress(done, len(repeats))
    manifest = writer.publish(allow_partial=allow_partial, allow_repeated_content=allow_repeated_content)
    return manifest, sum(len(names) for _, names in repeats)


def _repeats(writer: CacheWriter) -> list[tuple[Commit, set[Name]]]:
    """Return the live commits that hold later copies, with the documents to leave out of each."""
    store, newest = writer.store, writer.ledger.newest_manifest()
    settled = {entry.path for entry in newest.files} if newest else set()
    data = {o.path: o for o in store.list(layout.DATA)}
    made = {o.path: o.modified for o in store.list(layout.COMMITS)}
    every = [c for c in writer.ledger.commits() if layout.commit_path(c.shard_id) in made]
    dated = {commit.shard_id: made[layout.commit_path(commit.shard_id)] for commit in every}
    commits = [c for c in every if not is_void(c, dated[c.shard_id], data, settled, writer.grace_seconds)]
    live = live_commits(commits, resolve_replacements(commits, newest.replaced if newest else {}))

    def place(commit: Commit) -> tuple[bool, object, str]:
        fresh = not settled.issuperset(entry.path for entry in commit.files)
        return fresh, dated[commit.shard_id], commit.shard_id

    def names(commit: Commit) -> set[Name]:
        return {name for entry in commit.files for name in _names(writer, entry)}

    ordered = sorted((commit for commit in live if commit.files), key=place)
    seen: set[bytes] = set()
    found = []
    with ThreadPoolExecutor(THREADS) as pool:
        for commit, held in zip(ordered, pool.map(names, ordered), strict=True):
            hashes = {_hash(name): name for name in held}
            if again := {hashes[key] for key in seen & hashes.keys()}:
                found.append((commit, again))
            seen.update(hashes)
    return found


def _hash(name: Name) -> bytes:
    return hashlib.blake2b("\0".join(name).encode(), digest_size=16).digest()


def _names(writer: CacheWriter, entry: FileEntry) -> set[Name]:
    with DataFile(writer.store, entry, writer.spec) as file:
        return {(entry.split, entry.source, doc_id) for block in file.blocks({"doc_id"}) for doc_id in block.doc_id}


def _rewrite(writer: CacheWriter, commit: Commit, names: set[Name]) -> None:
    """Commit a shard again without some documents, unless that is committed."""
    kept = hashlib.sha256("\n".join([commit.shard_id, *("\0".join(name) for name in sorted(names))]).encode())
    shard_id = f"opt-{kept.hexdigest()[:24]}"
    if writer.store.exists(layout.commit_path(shard_id)):
        return

    def records() -> Iterator[Record]:
        for entry in commit.files:
            with DataFile(writer.store, entry, writer.spec) as file:
                for record in file.records():
                    if (entry.split, entry.source, record.doc_id) not in names:
                        yield record

    codec = commit.files[0].codec
    with ShardAttempt(writer.store, writer.spec, shard_id, codec=codec, grace_seconds=writer.grace_seconds) as attempt:
        attempt.build(records())
        attempt.upload()
        attempt.commit(
            replaces=[commit.shard_id],
            drops={"duplicate_id": len(names)},
            provenance={"optimize": {"codec": codec, "shards": 1, "without_repeats": len(names)}},
        )
