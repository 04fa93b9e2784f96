"""Exact de-duplication over a whole job while it is planned: one pass over all inputs, 28 bytes of memory a document.

The first copy is kept, in this order: shards that are committed already, then the plan's own order. So a file that is
added later loses its copies of what is cached, and no cached shard changes. A shard's id does not depend on the
duplicates; what it leaves out is in the plan (`PlanShard.duplicates`, by ordinal) and is counted as a drop.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, islice

import numpy as np

from pipeline.config import JobConfig
from pipeline.corpus.documents import Dropped, extract
from pipeline.corpus.readers import read_documents
from pipeline.errors import InputDamaged
from teachercache.format.objects import PlanShard

Hashes = tuple[np.ndarray, np.ndarray]  # hashes void[16] [n], ordinals int64 [n]


def content_hashes(job: JobConfig, shards: Sequence[PlanShard]) -> list[Hashes]:
    """Hash each shard's usable documents. The shards are one file's, in order: it is read (and decompressed) once."""
    first, last = shards[0], shards[-1]
    corpus = job.corpora[first.corpus]
    filters = job.recipe.filters
    found: list[list[bytes]] = [[] for _ in shards]
    ordinals: list[list[int]] = [[] for _ in shards]
    starts = [shard.start for shard in shards]
    raws = read_documents(first.input, corpus, first.start, last.stop, first.unit)
    try:
        for raw in islice(raws, corpus.limit_documents if first.unit in ("file", "items") else None):
            try:
                document = extract(raw, corpus, filters, first.input_digest)
            except Dropped:
                continue
            place = bisect_right(starts, raw.ordinal) - 1
            found[place].append(document.content_hash)
            ordinals[place].append(raw.ordinal)
    except InputDamaged:
        pass  # the shard itself reports its damaged file; what was readable counts
    return [
        (np.frombuffer(b"".join(h), dtype="V16"), np.asarray(o, dtype=np.int64))
        for h, o in zip(found, ordinals, strict=True)
    ]


def mark_duplicates(job: JobConfig, shards: Sequence[PlanShard], committed: Set[str] = frozenset()) -> list[PlanShard]:
    """Return the same shards in the same order, each with the ordinals of its documents that have an earlier copy."""
    files = [list(group) for _, group in groupby(shards, key=lambda s: (s.corpus, s.input))]
    with ThreadPoolExecutor(max_workers=4) as pool:
        by_shard = [part for file in pool.map(lambda group: content_hashes(job, group), files) for part in file]
    order = sorted(range(len(shards)), key=lambda i: (shards[i].shard_id not in committed, i))
    parts = [by_shard[i] for i in order]
    counts = [len(h) for h, _ in parts]
    if not sum(counts):
        return list(shards)
    hashes = np.concatenate([h for h, _ in parts])
    _, first = np.unique(hashes, return_index=True)  # the first index of each value
    kept = np.zeros(len(hashes), dtype=bool)
    kept[first] = True
    result = list(shards)
    begin = 0
    for place, count, (_, ordinals) in zip(order, counts, parts, strict=True):
        again = ordinals[~kept[begin : begin + count]].tolist()
        begin += count
        if again:
            shard = shards[place]
            result[place] = shard.model_copy(update={"duplicates": again})
    return result
