"""thin: a smaller sampled cache from a larger one, without a teacher.

A sampled row is an unbiased estimate p^ of the teacher's p. Drawing again, from p^, gives an unbiased estimate of p^
and so of p. The new row keeps a first part of the exact entries as they are and draws the rest from all other entries
by their weights, as teachercache/format/sampled.py draws from a softmax. Its noise is that of both draws.

Top-K rows cannot be thinned: they do not say what the tail holds, and the first K' of them are there already
(data.top_k).

The shards of the new cache have the ids of the old one's. So the same command again resumes, two processes race for one
commit, and what was merged or taken out of the old cache replaces its shards in the new one. Where `optimize` rewrote
the new cache too, its shards are not those of the old one any more, and such a change is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from teachercache.errors import UsageError
from teachercache.format.objects import Manifest, ManifestFile
from teachercache.format.record import (
    TAIL_FLOOR,
    Float32Array,
    Int32Array,
    Record,
    Uint16Array,
    content_key,
    row_uniforms,
)
from teachercache.format.sampled import LEAST_MASS, SLACK, row_weights
from teachercache.format.spec import CacheSpec, SampledRows
from teachercache.parquet.codecs import get_codec
from teachercache.read.cache import Cache
from teachercache.store.liveness import live_commits, resolve_replacements
from teachercache.write.tokenizer import upload_tokenizer
from teachercache.write.writer import CacheWriter, create

ROWS = 256
"""Rows that are drawn at a time: about n entries of n' comparisons each, a byte apiece."""


@dataclass(frozen=True, slots=True)
class Thinned:
    """What `thin` made."""

    manifest: Manifest
    shards: int  # commits that this call added
    rows: int
    bytes_before: int
    bytes_after: int


def thin(
    cache: Cache,
    out: str | os.PathLike[str],
    *,
    entries: int,
    exact: int | None = None,
    codec: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Thinned:
    """Write the cache's records with `entries` entries a row into the cache at `out`, and publish it.

    exact   least number of exact entries; a quarter of `entries` by default
    codec   None keeps each shard's own
    Raises UsageError for a top-K or an unfinished cache, for numbers that are not below the cache's own, for a manifest
    older than one that was thinned into `out`, and where shards of the cache were replaced that `optimize` merged in
    the new one; SpecMismatch where `out` is another cache.
    Cost: about 50 microseconds a row, from 100 entries to 24.
    """
    spec = thinned_spec(cache, entries, exact)
    if codec is not None:
        get_codec(codec, spec.rows, spec.tokenizer.vocab_size)
    writer = create(out, spec, storage_options=storage_options)
    todo, added = _missing(cache, writer), 0
    copy_tokenizer(cache, writer)
    for number, (shard_id, files, replaces) in enumerate(todo, 1):
        writer.codec = codec or (files[0].codec if files else writer.codec)
        added += writer.commit(
            shard_id,
            _thinned_records(cache, files, spec),
            replaces=replaces,
            provenance={"thin": {"manifest": cache.manifest.number, "spec_digest": cache.spec.digest}},
        ).won
        if progress:
            progress(number, len(todo))
    manifest = writer.publish(allow_repeated_content=cache.manifest.repeated_content > 0)
    before, after = (sum(entry.size for entry in m.files) for m in (cache.manifest, manifest))
    return Thinned(manifest=manifest, shards=added, rows=manifest.rows, bytes_before=before, bytes_after=after)


def thinned_spec(cache: Cache, entries: int, exact: int | None) -> CacheSpec:
    """Return the spec of a thinned cache, or raise UsageError where there can be none."""
    rows = cache.spec.rows
    if not isinstance(rows, SampledRows):
        raise UsageError(
            f"{cache.url} has top-{rows.entries} rows, which do not say how the mass outside the {rows.entries} is spread: "
            f"no unbiased row can be drawn from them. Train with data.top_k={entries}, or make a cache with "
            "rows: {kind: sampled}"
        )
    if not cache.manifest.complete:
        raise UsageError(
            f"{cache.url} manifest {cache.manifest.number} is incomplete; finish its job first, then thin it"
        )
    if not 1 < entries < rows.entries:
        raise UsageError(
            f"{cache.url} has {rows.entries} entries a row; expected --entries from 2 to {rows.entries - 1}"
        )
    least = max(1, entries // 4) if exact is None else exact
    if not 1 <= least <= min(rows.exact, entries - 1):
        raise UsageError(
            f"expected --exact from 1 to {min(rows.exact, entries - 1)}: below --entries, and no more than the "
            f"{rows.exact} that every row of {cache.url} has; found {least}"
        )
    kind = SampledRows(entries=entries, exact=least, seed=rows.seed, thinned_from=cache.spec.digest)
    return cache.spec.model_copy(update={"rows": kind})


def _thinned_records(cache: Cache, files: list[ManifestFile], spec: CacheSpec) -> Iterator[Record]:
    for entry in files:
        with cache.open_file(entry) as file:
            for record in file.records():
                yield thin_record(record, spec)


def thin_record(record: Record, spec: CacheSpec) -> Record:
    """Return a sampled record with the rows of `spec`, fewer entries each. Everything else is as it was."""
    assert isinstance(spec.rows, SampledRows)
    assert record.exact is not None
    u = row_uniforms(spec.digest, content_key(spec.digest, record.input_ids, record.row_pos), record.row_pos)
    entries, least = spec.rows.entries, spec.rows.exact
    parts = []
    for start in range(0, len(u), ROWS):
        part = slice(start, start + ROWS)
        kept = record.topk_ids[part], record.topk_logprobs[part], record.tail_logprob[part], record.exact[part]
        parts.append(thin_rows(*kept, u[part], entries, least))
    ids, logprobs, tail, exact = (np.concatenate(column) for column in zip(*parts, strict=True))
    return replace(
        record, topk_ids=ids, topk_logprobs=logprobs, tail_logprob=tail, exact=exact.astype(np.uint16), content_key=b""
    )


def thin_rows(
    ids: Int32Array,
    logprobs: Float32Array,
    tail: Float32Array,
    exact: Uint16Array,
    u: npt.NDArray[np.float64],
    entries: int,
    least: int,
) -> tuple[Int32Array, Float32Array, Float32Array, npt.NDArray[np.int64]]:
    """Draw rows of `entries` from sampled rows [r, n] with u [r] in [0, 1): ids, logprobs, tail and exact.

    least: the least number of exact entries, at most the rows' own. The exact part ends at the first k from `least` on
    at which no other entry weighs more than P(k) / (entries - k), P(k) the weight of all others: an entry's exact
    probability, or what a drawn one counts.
    """
    r, n = ids.shape
    place, new_place, count = np.arange(n), np.arange(entries), exact.astype(np.int64)
    weights = row_weights(logprobs, tail, exact)
    after = np.cumsum(weights[:, ::-1], axis=1)[:, ::-1]  # [r, n]: P(k)
    heaviest = np.maximum.accumulate(weights[:, ::-1], axis=1)[:, ::-1]
    k = np.arange(least, entries)
    ends = heaviest[:, k] * (entries - k) <= after[:, k] * (1 + SLACK)
    ends[:, -1] = True
    kept = least + ends.argmax(axis=1)
    rows = np.arange(r)
    all_exact = (after[rows, kept] < LEAST_MASS) & (count >= entries)
    kept = np.where(all_exact, entries, kept)
    mass = np.where(all_exact, after[:, entries], after[rows, np.minimum(kept, entries - 1)])
    # The other entries by ascending id; the points u, u + 1, ... of their cumulative weights hit distinct ones.
    order = np.argsort(np.where(place < kept[:, None], -1, ids), axis=1, kind="stable")
    cumulative = np.cumsum(np.where(place < kept[:, None], 0.0, np.take_along_axis(weights, order, axis=1)), axis=1)
    draws = np.maximum(entries - kept, 1)
    step = cumulative[:, -1] / draws
    points = (u[:, None] + np.maximum(new_place - kept[:, None], 0)) * step[:, None]
    hit = np.minimum((cumulative[:, None, :] <= points[:, :, None]).sum(axis=2), n - 1)
    is_drawn = new_place >= kept[:, None]
    drawn = np.take_along_axis(np.take_along_axis(ids, order, axis=1), hit, axis=1)
    with np.errstate(divide="ignore"):
        weight = np.log(mass) - np.log(draws)
        new_tail = np.maximum(np.log(mass), TAIL_FLOOR).astype(np.float32)
    new_ids = np.where(is_drawn, drawn, ids[:, :entries]).astype(np.int32)
    new_logprobs = np.where(is_drawn, weight[:, None], logprobs[:, :entries]).astype(np.float32)
    return new_ids, new_logprobs, new_tail, kept


def _missing(cache: Cache, writer: CacheWriter) -> list[tuple[str, list[ManifestFile], list[str]]]:
    """Return what the new cache lacks: shards of the old one, their files, and which shards of the new one each replaces.

    A shard without files is one from which `optimize` took every document: it replaces others all the same.
    """
    merged, done = cache.manifest.replaced, writer.committed()
    shards: dict[str, list[ManifestFile]] = {shard: [] for shard in merged.values() if shard not in merged}
    for entry in cache.manifest.files:
        shards.setdefault(entry.shard_id, []).append(entry)
    before: dict[str, set[str]] = {shard: set() for shard in shards}  # shards of the new cache that it replaces
    for old in merged.keys() & done:
        before[_last(old, merged)].add(old)
    missing = sorted(shards.keys() - done)
    if done and (missing or done - shards.keys() - merged.keys()):
        _refuse_older(cache, writer)
    live: set[str] = set()
    if any(before[shard] for shard in missing):
        commits, newest = writer.ledger.commits(), writer.ledger.newest_manifest()
        ours = resolve_replacements(commits, newest.replaced if newest else {})
        live = {commit.shard_id for commit in live_commits(commits, ours)}
        for shard in missing:
            if rewritten := sorted(old for old in before[shard] if _last(old, ours) not in before[shard]):
                raise UsageError(
                    f"{writer.url} was rewritten by `optimize`: it has {_last(rewritten[0], ours)} in place of "
                    f"{rewritten[0]}, so what {cache.url} merged or left out since cannot be taken over; thin into a new URL"
                )
    return [
        (shard, shards[shard], sorted(before[shard] & live))
        for shard in missing
        if shards[shard] or before[shard] & live
    ]


def _refuse_older(cache: Cache, writer: CacheWriter) -> None:
    """Raise UsageError where the new cache has commits of a newer manifest: what that merged or left out would come back."""
    asked = cache.manifest.number
    newest = max(
        (commit.provenance.get("thin", {}).get("manifest", 0) for commit in writer.ledger.commits()), default=0
    )
    if newest > asked:
        raise UsageError(
            f"{writer.url} was thinned from manifest {newest} of {cache.url}; manifest {asked}, which was asked for, is older, "
            f"and nothing was written. Thin manifest {newest} or a newer one, or thin manifest {asked} into a new URL"
        )


def _last(shard_id: str, replaced: Mapping[str, str]) -> str:
    """Return the shard that a shard was replaced by in the end; itself where it is live."""
    while shard_id in replaced:
        shard_id = replaced[shard_id]
    return shard_id


def copy_tokenizer(cache: Cache, writer: CacheWriter) -> None:
    """Give the new cache the old one's tokenizer files, where it has them."""
    try:
        folder = cache.tokenizer_path()
    except UsageError:
        return
    upload_tokenizer(writer.store, writer.spec.tokenizer, folder)
