"""Exact de-duplication over a whole job while it is planned: one pass over all inputs, 28 bytes of memory a document.

The first copy is kept, in this order: shards that are committed already, then the plan's own order.  So a file that is
added later loses its copies of what is cached, and no cached shard changes.  A shard's id does not depend on the
duplicates; what it leaves out stands in the plan (`detail.duplicates`, by ordinal) and is counted as a drop.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np

from pipeline.config import JobConfig
from pipeline.corpus.documents import Dropped, extract
from pipeline.corpus.readers import InputDamaged, read_documents
from teachercache import PlanShard


def content_hashes(job: JobConfig, shard: PlanShard) -> tuple[np.ndarray, np.ndarray]:
    """(hashes void[16] [n], ordinals int64 [n]) of a shard's usable documents."""
    corpus = job.corpora[int(shard.detail.get("corpus", 0))]
    filters = job.recipe.filters
    hashes: list[bytes] = []
    ordinals: list[int] = []
    raws = read_documents(shard.input, corpus, shard.start, shard.stop, shard.unit, filters.invalid_utf8)
    try:
        for raw in islice(raws, corpus.limit_documents if shard.unit == "file" else None):
            try:
                document = extract(raw, corpus, filters, shard.input_digest)
            except Dropped:
                continue
            hashes.append(document.content_hash)
            ordinals.append(raw.ordinal)
    except InputDamaged:
        pass  # the shard itself reports its damaged file; what was readable counts
    return np.frombuffer(b"".join(hashes), dtype="V16"), np.asarray(ordinals, dtype=np.int64)


def mark_duplicates(job: JobConfig, shards: Sequence[PlanShard], committed: Set[str] = frozenset()) -> list[PlanShard]:
    """The same shards in the same order, each with the ordinals of its documents that have an earlier copy."""
    order = sorted(range(len(shards)), key=lambda i: (shards[i].shard_id not in committed, i))
    with ThreadPoolExecutor(max_workers=4) as pool:
        parts = list(pool.map(lambda i: content_hashes(job, shards[i]), order))
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
            result[place] = shard.model_copy(update={"detail": {**shard.detail, "duplicates": again}})
    return result
