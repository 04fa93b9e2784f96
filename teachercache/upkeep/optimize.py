"""optimize: small files into large ones, into another codec, or without given documents, as commits with `replaces`.

Nothing is changed in place. The new shard's id is a hash of what it replaces, so running the same command again
resumes, and two processes that do the same work race for one commit instead of doubling it. Where another optimiser
replaced a shard first, ours is void; a document that must go is then looked for again in what the other one wrote.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from teachercache.errors import StoreUnavailable, UsageError
from teachercache.format import layout
from teachercache.format.objects import Manifest, ManifestFile
from teachercache.format.record import Record
from teachercache.format.spec import json_digest
from teachercache.parquet.codecs import get_codec
from teachercache.read.cache import Cache
from teachercache.write.attempt import ShardAttempt
from teachercache.write.writer import CacheWriter

TARGET_BYTES = 256 * 2**20
ROUNDS = 5
THREADS = 8


@dataclass(frozen=True, slots=True)
class Bin:
    """Shards that become one."""

    shards: tuple[str, ...]
    files: tuple[ManifestFile, ...]


@dataclass(frozen=True, slots=True)
class Optimized:
    """What `optimize` changed."""

    manifest: Manifest
    bins: int  # commits that became part of the cache
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
    allow_partial: bool = False,
    allow_repeated_content: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Optimized:
    """Rewrite what needs it, and publish.

    codec         None keeps each file's own
    target_bytes  shards smaller than this are merged up to about this size
    without       doc_ids to leave out; one that is not in the cache, and was not taken out of it by an earlier call,
                  raises UsageError before anything is written
    allow_...     as in `publish`; what the newest manifest was allowed stays allowed

    Publishes first, so that unpublished commits are seen too, and raises what `publish` raises. To take a document down
    for good, expire the older manifests afterwards (`gc --keep-manifests 1`).
    """
    if codec is not None:
        get_codec(codec, writer.spec.rows, writer.spec.tokenizer.vocab_size)
    gone = set(without)
    newest = writer.ledger.newest_manifest()
    partial = allow_partial or (newest is not None and not newest.complete)
    repeated = allow_repeated_content or (newest is not None and newest.repeated_content > 0)
    before = after = writer.publish(allow_partial=partial, allow_repeated_content=repeated)
    holders = _holders(Cache(writer.store, writer.spec, before), gone)
    if missing := gone - holders.keys():
        _refuse_unknown(writer, missing, len(gone))
    written: dict[str, Bin] = {}
    for _ in range(ROUNDS):
        cache = Cache(writer.store, writer.spec, after)
        affected = {shard for shards in holders.values() for shard in shards}
        bins = _pack(after.files, codec, target_bytes, affected)
        for done, bin_ in enumerate(bins, 1):
            written[_rewrite(writer, cache, bin_, codec, gone)] = bin_
            if progress:
                progress(done, len(bins))
        after = writer.publish(allow_partial=partial, allow_repeated_content=repeated)
        holders = _holders(Cache(writer.store, writer.spec, after), gone)
        if not holders:
            break
    else:
        raise StoreUnavailable(
            f"{writer.url}: {len(holders)} of the documents to leave out are still there, since other optimisers were "
            f"faster {ROUNDS} times; end them and run this again."
        )
    # An interrupted call may have written some of them.
    effective = [name for name, bin_ in written.items() if after.replaced.get(bin_.shards[0]) == name]
    return Optimized(
        manifest=after, bins=len(effective), files_before=len(before.files), files_after=len(after.files),
        bytes_before=sum(f.size for f in before.files), bytes_after=sum(f.size for f in after.files),
        removed=sum(c.drops.get("removed", 0) for c in writer.ledger.commits_of(effective)) if gone else 0,
    )  # fmt: skip


def _holders(cache: Cache, without: set[str]) -> dict[str, set[str]]:
    """Return doc_id -> the shards that hold it; reads the doc_id column of every file if there is anything to find."""
    found: dict[str, set[str]] = defaultdict(set)
    if not without:
        return found

    def look(entry: ManifestFile) -> set[str]:
        with cache.open_file(entry) as file:
            return {name for block in file.blocks({"doc_id"}) for name in without.intersection(block.doc_id)}

    with ThreadPoolExecutor(THREADS) as pool:
        for entry, names in zip(cache.manifest.files, pool.map(look, cache.manifest.files), strict=True):
            for name in names:
                found[name].add(entry.shard_id)
    return found


def _mark(doc_id: str) -> str:
    """Return how a commit remembers a document that it left out, without naming it."""
    return hashlib.sha256(doc_id.encode()).hexdigest()[:32]


def _refuse_unknown(writer: CacheWriter, missing: set[str], asked: int) -> None:
    """Raise UsageError for a doc_id that never was in the cache; one that an earlier call took out is done already."""
    done = {mark for c in writer.ledger.commits() for mark in c.provenance.get("optimize", {}).get("without", [])}
    if unknown := {name for name in missing if _mark(name) not in done}:
        raise UsageError(
            f"{writer.url} holds no document {min(unknown)!r} ({len(unknown)} of {asked} are not in it); nothing was done."
        )


def _pack(files: Sequence[ManifestFile], codec: str | None, target: int, affected: set[str]) -> list[Bin]:
    """Put shards of one codec, in the order of their ids, into bins of about `target` bytes.

    Bins that change nothing are left out.
    """
    shards: dict[str, list[ManifestFile]] = defaultdict(list)
    for entry in files:
        shards[entry.shard_id].append(entry)
    full: list[list[str]] = []
    filling: dict[str, list[str]] = {}  # by codec

    def size(names: Sequence[str]) -> int:
        return sum(entry.size for name in names for entry in shards[name])

    for name in sorted(shards):
        kind = codec or shards[name][0].codec
        held = filling.get(kind, [])
        if size([name]) >= target:
            full.append([name])
        elif size([*held, name]) > target:
            full.append(held)
            filling[kind] = [name]
        else:
            filling[kind] = [*held, name]
    bins = []
    for names in [*full, *filling.values()]:
        entries = tuple(entry for name in names for entry in shards[name])
        recoded = codec is not None and any(entry.codec != codec for entry in entries)
        if len(names) > 1 or recoded or affected.intersection(names):
            bins.append(Bin(tuple(names), entries))
    return bins


def _rewrite(writer: CacheWriter, cache: Cache, bin_: Bin, codec: str | None, without: set[str]) -> str:
    """Commit a bin as one shard, unless it is committed; returns the shard's id."""
    kind = codec or bin_.files[0].codec
    digest = json_digest([list(bin_.shards), kind, sorted(without)])
    shard_id = f"opt-{hashlib.sha256(digest.encode()).hexdigest()[:24]}"
    removed: list[str] = []  # a doc_id for each record

    def records() -> Iterator[Record]:
        for entry in bin_.files:
            with cache.open_file(entry) as file:
                for record in file.records():
                    if record.doc_id in without:
                        removed.append(record.doc_id)
                    else:
                        yield record

    if writer.store.exists(layout.commit_path(shard_id)):
        return shard_id
    with ShardAttempt(writer.store, writer.spec, shard_id, codec=kind, grace_seconds=writer.grace_seconds) as attempt:
        attempt.build(records())
        attempt.upload()
        what = {"codec": kind, "shards": len(bin_.shards), "without": sorted({_mark(name) for name in removed})}
        drops = {"removed": len(removed)} if removed else {}
        attempt.commit(replaces=bin_.shards, drops=drops, provenance={"optimize": what})
    return shard_id
