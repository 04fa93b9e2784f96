"""optimize: small files into large ones, into another codec, or without given documents, as commits with `replaces`.

Nothing is changed in place. The new shard's id is a hash of what it replaces, so running the same command again
resumes, and two processes that do the same work race for one commit instead of doubling it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from teachercache.codec import get_codec
from teachercache.commit import ShardAttempt
from teachercache.errors import UsageError
from teachercache.manifest import Manifest, ManifestFile
from teachercache.reader import Cache
from teachercache.record import Record
from teachercache.spec import json_digest
from teachercache.writer import CacheWriter

TARGET_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Bin:
    """Shards that become one."""

    shards: tuple[str, ...]
    files: tuple[ManifestFile, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Optimized:
    manifest: Manifest
    bins: int
    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int
    removed: int  # records


def optimize(
    writer: CacheWriter,
    *,
    codec: str | None = None,
    target_bytes: int = TARGET_BYTES,
    without: Collection[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Optimized:
    """Rewrite what needs it, and publish.

    codec         None keeps each file's own
    target_bytes  shards smaller than this are merged up to about this size
    without       doc_ids to leave out; those that are not in the cache raise UsageError before anything is written

    Publishes first, so that unpublished commits are seen too. To take a document down for good, expire the older
    manifests afterwards (`gc --keep-manifests 1`).
    """
    if codec is not None:
        get_codec(codec, writer.spec.top_k, writer.spec.tokenizer.vocab_size)
    before = writer.publish(allow_partial=True, allow_repeated_content=True)
    cache = Cache(writer.store, writer.spec, before)
    holders = _holders(cache, set(without))
    bins = _plan(before.files, codec, target_bytes, {shard for shards in holders.values() for shard in shards})
    removed = 0
    for done, work in enumerate(bins, 1):
        removed += _rewrite(writer, cache, work, codec, set(without))
        if progress:
            progress(done, len(bins))
    after = writer.publish(allow_partial=True, allow_repeated_content=True)
    return Optimized(
        manifest=after, bins=len(bins), files_before=len(before.files), files_after=len(after.files),
        bytes_before=sum(f.size for f in before.files), bytes_after=sum(f.size for f in after.files), removed=removed,
    )  # fmt: skip


def _holders(cache: Cache, without: set[str]) -> dict[str, set[str]]:
    """doc_id -> the shards that hold it; reads the doc_id column of every file where there is anything to find."""
    if not without:
        return {}
    found: dict[str, set[str]] = defaultdict(set)
    for entry in cache.manifest.files:
        with cache.open_file(entry) as file:
            for block in file.blocks({"doc_id"}):
                assert block.doc_id is not None
                for doc_id in without.intersection(block.doc_id):
                    found[doc_id].add(entry.shard_id)
    if missing := without - found.keys():
        raise UsageError(
            f"{cache.url} holds no document {min(missing)!r} ({len(missing)} of {len(without)} are not in it); nothing was done."
        )
    return found


def _plan(files: Sequence[ManifestFile], codec: str | None, target: int, affected: set[str]) -> list[Bin]:
    """Shards with the same codec, in the order of their ids, into bins of about `target` bytes; bins that change nothing
    are left out."""
    shards: dict[str, list[ManifestFile]] = defaultdict(list)
    for entry in files:
        shards[entry.shard_id].append(entry)
    open_bins: dict[str, list[str]] = defaultdict(list)
    bins: list[Bin] = []

    def size(names: Sequence[str]) -> int:
        return sum(entry.size for name in names for entry in shards[name])

    def close(names: list[str]) -> None:
        entries = tuple(entry for name in names for entry in shards[name])
        recoded = codec is not None and any(entry.codec != codec for entry in entries)
        if len(names) > 1 or recoded or affected.intersection(names):
            bins.append(Bin(tuple(names), entries, size(names)))

    for name in sorted(shards):
        kind = codec or shards[name][0].codec
        if size([name]) >= target:
            close([name])
            continue
        if size(open_bins[kind]) + size([name]) > target:
            close(open_bins.pop(kind))
        open_bins[kind].append(name)
    for names in open_bins.values():
        if names:
            close(names)
    return bins


def _rewrite(writer: CacheWriter, cache: Cache, work: Bin, codec: str | None, without: set[str]) -> int:
    kind = codec or work.files[0].codec
    gone = sorted(without)
    digest = hashlib.sha256(json_digest([list(work.shards), kind, gone]).encode()).hexdigest()
    shard_id = f"opt-{digest[:24]}"
    removed = 0

    def records() -> Iterator[Record]:
        nonlocal removed
        for entry in work.files:
            with cache.open_file(entry) as file:
                for block in file.blocks():
                    for i in range(len(block)):
                        record = block.record(i)
                        if record.doc_id in without:
                            removed += 1
                        else:
                            yield record

    if shard_id in writer.committed():
        return 0
    with ShardAttempt(writer.store, writer.spec, shard_id, codec=kind, grace_seconds=writer.grace_seconds) as attempt:
        attempt.build(records())
        attempt.upload()
        drops = {"removed": removed} if removed else {}
        attempt.commit(
            replaces=work.shards, drops=drops, provenance={"optimize": {"codec": kind, "shards": len(work.shards)}}
        )
    return removed
