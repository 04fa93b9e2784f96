"""What a job has twice: equal texts, and ids that repeat. One pass over all inputs, 40 bytes of memory a document.

The first copy is kept, in this order: shards that are committed already, then the plan's own order. So a file that is
added later loses its copies of what is cached, and no cached shard changes. A shard's id does not depend on the
duplicates; what it leaves out is in the plan (`PlanShard.duplicates` and `repeated_ids`, by ordinal) and is counted as a
drop.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby, islice

import numpy as np

from pipeline.config import JobConfig
from pipeline.corpus.documents import Dropped, extract, id_hash
from pipeline.corpus.readers import read_documents
from pipeline.errors import InputDamaged
from teachercache.format.objects import PlanShard


@dataclass(slots=True)
class Keys:
    """Of a shard's usable documents, in order: hashes of 16 bytes of their content and ids, and their ordinals."""

    content: bytearray = field(default_factory=bytearray)
    ids: bytearray = field(default_factory=bytearray)
    ordinals: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Marked:
    """The shards in their order, with what each leaves out; of the ids that repeat, counts by corpus and the first place."""

    shards: list[PlanShard]
    documents: Counter[int] = field(default_factory=Counter)
    repeated: Counter[int] = field(default_factory=Counter)
    first: dict[int, str] = field(default_factory=dict)


def keys_of(job: JobConfig, shards: Sequence[PlanShard]) -> list[Keys]:
    """Hash each shard's usable documents. The shards are one file's, in order: it is read (and decompressed) once."""
    first, last = shards[0], shards[-1]
    corpus = job.corpora[first.corpus]
    filters = job.recipe.filters
    found = [Keys() for _ in shards]
    seen: list[set[bytes]] = [set() for _ in shards]
    starts = [shard.start for shard in shards]
    raws = read_documents(first.input, corpus, first.start, last.stop, first.unit)
    try:
        for raw in islice(raws, corpus.limit_documents if first.unit in ("file", "items") else None):
            try:
                document = extract(raw, corpus, filters, first.input_digest, first.input)
            except Dropped:
                continue
            place = bisect_right(starts, raw.ordinal) - 1
            if filters.dedup != "none":  # what the shard drops as a copy claims no id
                if document.content_hash in seen[place] and filters.dedup == "shard":
                    continue
                seen[place].add(document.content_hash)
            found[place].content += document.content_hash
            found[place].ids += id_hash(document)
            found[place].ordinals.append(raw.ordinal)
    except InputDamaged:
        pass  # the shard itself reports its damaged file; what was readable counts
    return found


def _first_of_each(hashes: np.ndarray) -> np.ndarray:
    """Return bool [n]: the first place of each value."""
    kept = np.zeros(len(hashes), dtype=bool)
    kept[np.unique(hashes, return_index=True)[1]] = True
    return kept


def mark_duplicates(job: JobConfig, shards: Sequence[PlanShard], committed: Set[str] = frozenset()) -> Marked:
    """Mark documents of which the job has an earlier copy, where it wants that, and those whose id an earlier one has."""
    files = [list(group) for _, group in groupby(shards, key=lambda s: (s.corpus, s.input))]
    with ThreadPoolExecutor(max_workers=4) as pool:
        by_shard = [part for file in pool.map(lambda group: keys_of(job, group), files) for part in file]
    order = sorted(range(len(shards)), key=lambda i: (shards[i].shard_id not in committed, i))
    result = Marked(list(shards))
    content = np.frombuffer(b"".join(by_shard[i].content for i in order), dtype="V16")
    if not len(content):
        return result
    kept = _first_of_each(content) if job.recipe.filters.dedup == "corpus" else np.ones(len(content), dtype=bool)
    ids = np.frombuffer(b"".join(by_shard[i].ids for i in order), dtype="V16")
    repeated = np.zeros(len(ids), dtype=bool)
    repeated[kept] = ~_first_of_each(ids[kept])
    begin = 0
    for place in order:
        shard, ordinals = shards[place], np.asarray(by_shard[place].ordinals, dtype=np.int64)
        part = slice(begin, begin + len(ordinals))
        begin = part.stop
        copies, again = ordinals[~kept[part]].tolist(), ordinals[repeated[part]].tolist()
        result.documents[shard.corpus] += len(ordinals)
        if again:
            result.repeated[shard.corpus] += len(again)
            result.first.setdefault(shard.corpus, f"{shard.input}@{again[0]}")
        if copies or again:
            result.shards[place] = shard.model_copy(update={"duplicates": copies, "repeated_ids": again})
    return result
