"""The mean of the sampled rows that several teachers have of the same documents.

A sampled row p^_c is an unbiased estimate of a teacher's softmax p_c, so the mean sum_c w_c p^_c is one of sum_c w_c p_c:
expectations are linear. Its entries are the union of the rows' entries, with the weights of an id added up. No spec has
such rows (their weights are neither exact nor equal), so they are made while training and are not stored.

`entropy` of a mean row is sum_c w_c H(p_c), not the entropy of the mean, which no cache knows. The loss is then
sum_c w_c KL(p_c || q): it has the gradient of KL(mean || q), is least at q = mean, and is positive there by as much as
the teachers differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from teachercache import Cache, Record
from teachercache.errors import UsageError
from teachercache.format.record import TAIL_FLOOR
from teachercache.format.sampled import LOG_ZERO, row_weights
from teachercache.format.spec import SampledRows
from teachercache.read.stream import Place, RecordStream

Key = tuple[str, str, int]
"""The source, doc_id and window of a record: what is unique in a split."""
SAME = ("input_ids", "row_pos")
"""What records of the same document have in common, next to the key."""


class MeanCache(Cache):
    """The first of several sampled caches, with the weighted mean of the rows that all of them have of a document.

    splits, weights   of each cache; the weights need not sum to 1
    Records are the same document where source, doc_id, window, input_ids and row_pos are equal; a row is learnt where
    every cache says so. A document that is not in all caches is kept, with loss_mask false everywhere. These are rows to train
    on: evaluate on each cache alone, since a mean row has no standard error and its KL is a mean of several.

    Cost: reads doc_id and window of every record, and holds about 300 bytes for each record of the other caches. Their
    rows are read by row groups, those of two spans at a time: caches of one plan lie alike, others cost a row group a
    document. Raises UsageError for top-K rows, and where no document is in all caches.
    """

    def __init__(self, caches: Sequence[Cache], *, splits: Sequence[str], weights: Sequence[float]) -> None:
        first = caches[0]
        super().__init__(first.store, first.spec, first.manifest)
        for cache in caches:
            check_averages(cache)
        self.caches, self.own_splits = list(caches), list(splits)
        self.shares = [weight / sum(weights) for weight in weights]
        self._places = [dict(_keys(cache, split)) for cache, split in zip(caches[1:], splits[1:], strict=True)]
        self.in_all = sum(all(key in places for places in self._places) for key, _ in _keys(first, splits[0]))
        """Records of the first cache whose key every other one has."""
        if not self.in_all:
            raise UsageError(
                f"data.combine=mean finds no document of {first.url} in all of {', '.join(c.url for c in caches[1:])}: "
                "source, doc_id and window must be equal, as those of one corpus and recipe are"
            )

    def describe(self) -> str:
        """Return a line: how many documents are averaged, and how many are in one cache alone."""
        records = [
            sum(f.records for f in cache.files(split=split))
            for cache, split in zip(self.caches, self.own_splits, strict=True)
        ]
        return (
            f"combine: the mean of {len(records)} teachers' rows for {self.in_all:,} records; left out as not in all caches: "
            + ", ".join(f"{n - self.in_all:,} of {n:,} in {c.url}" for n, c in zip(records, self.caches, strict=True))
        )

    def stream(
        self,
        split: str = "train",
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        state: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Return the first cache's stream of a split, with the other caches' rows in it: a MeanStream."""
        options |= {"split": split, "seed": seed, "rank": rank, "world_size": world_size}
        return MeanStream(self, state, **options)

    def others_of(self, record: Record) -> list[Place] | None:
        """Return where the other caches have a record; None where one of them does not."""
        places = [each.get(key_of(record)) for each in self._places]
        found = [place for place in places if place is not None]
        return found if len(found) == len(places) else None


class MeanStream(Iterator[Record]):
    """The stream of a MeanCache: that of its first cache, each record with what the others have of it."""

    def __init__(
        self,
        cache: MeanCache,
        state: Mapping[str, Any] | None,
        *,
        columns: Collection[str] | None = None,
        **options: Any,
    ) -> None:
        self._cache, self._columns = cache, columns
        self._others = {
            "manifests": [other.manifest.digest for other in cache.caches[1:]],
            "splits": cache.own_splits[1:],
            "shares": cache.shares,
        }
        if state is not None and state.get("others") != self._others:
            raise UsageError(
                f"the state belongs to a mean of other caches ({state.get('others')}), found {self._others}"
            )
        self._first = Cache.stream(cache, state=state, columns=columns, **options)
        self._rest: list[RecordStream] = [
            other.stream(split=own, shuffle=False)
            for other, own in zip(cache.caches[1:], cache.own_splits[1:], strict=True)
        ]
        self.place: list[Place] = []
        """Where the record that came last lies in each cache, for `fetch`."""
        self.in_all = True
        """Whether all caches have the record that came last."""

    def __next__(self) -> Record:
        record = next(self._first)
        places = self._cache.others_of(record)
        self.place = [self._first.place, *(places or [])]
        records = [record]
        if places is not None:
            wanted = self._columns or {
                *SAME,
                "loss_mask",
                "entropy",
                "topk_ids",
                "topk_logprobs",
                "tail_logprob",
                "exact",
            }
            records += [other.fetch([p], wanted)[0] for other, p in zip(self._rest, places, strict=True)]
        self.in_all = places is not None and all(
            np.array_equal(getattr(record, name), getattr(other, name)) for other in records[1:] for name in SAME
        )
        if not self.in_all:
            return replace(record, loss_mask=np.zeros_like(record.loss_mask))
        shares = self._cache.shares
        entropies = np.stack([np.asarray(each.entropy, dtype=np.float64) for each in records])
        record = replace(
            record,
            loss_mask=np.logical_and.reduce([each.loss_mask for each in records]),
            entropy=(np.asarray(shares) @ entropies).astype(np.float32),
        )
        return record if record.topk_ids is None else replace(record, **mean_rows(records, shares))

    def fetch(self, places: Sequence[list[Place]], columns: Collection[str]) -> list[Record]:
        """Return records whose `place` was as given, with the mean of their rows. As `RecordStream.fetch`."""
        streams = [self._first, *self._rest]
        found = [s.fetch([place[c] for place in places], columns) for c, s in enumerate(streams)]
        return [replace(records[0], **mean_rows(records, self._cache.shares)) for records in zip(*found, strict=True)]

    def state(self) -> dict[str, Any]:
        """Return the position of the first cache's stream, and which the other caches are."""
        return {**self._first.state(), "others": self._others}

    def close(self) -> None:
        """End all threads."""
        for stream in (self._first, *self._rest):
            stream.close()


def check_averages(cache: Cache) -> None:
    """Raise UsageError for a cache whose rows have no mean."""
    rows = cache.spec.rows
    if not isinstance(rows, SampledRows):
        raise UsageError(
            f"data.combine=mean averages sampled rows, but {cache.url} has top-{rows.entries} rows: each teacher leaves out "
            "other tokens, and what it gives them is not known, so the mean of two such rows is not a row of the mean. "
            "Make the cache with rows: {kind: sampled}, or leave data.combine out"
        )


def mean_rows(records: Sequence[Record], shares: Sequence[float]) -> dict[str, Any]:
    """Return topk_ids, topk_logprobs, tail_logprob and exact of the weighted mean of records' sampled rows.

    shares sum to 1. Rows [r, K] with K the sum of the records' entries, by descending weight; every entry counts as
    exact: it is worth its weight and no more. Where an id is in several rows, the row ends in ids of weight 0.
    """
    ids = np.concatenate([record.topk_ids for record in records], axis=1).astype(np.int64)
    weights = np.concatenate(
        [
            share * row_weights(record.topk_logprobs, record.tail_logprob, np.asarray(record.exact))
            for share, record in zip(shares, records, strict=True)
        ],
        axis=1,
    )
    r, width = ids.shape
    order, row, slot = np.argsort(ids, axis=1, kind="stable"), np.arange(r)[:, None], np.arange(width)
    ids, weights = np.take_along_axis(ids, order, 1), np.take_along_axis(weights, order, 1)
    entry = np.cumsum(np.diff(ids, axis=1, prepend=-1) > 0, axis=1) - 1  # which of the distinct ids
    merged = np.bincount((row * width + entry).ravel(), weights.ravel(), r * width).reshape(r, width)
    taken = np.zeros((r, width), dtype=np.bool_)
    taken[np.nonzero(ids < width)[0], ids[ids < width]] = True
    spare = np.argsort(taken, axis=1, kind="stable")  # of the ids below `width`, those that are in no row come first
    distinct = entry[:, -1:] + 1
    kept = np.take_along_axis(spare, np.maximum(slot - distinct, 0), 1)
    np.put_along_axis(kept, entry, ids, 1)
    order = np.lexsort((kept, -merged), axis=1)
    with np.errstate(divide="ignore"):
        logprobs = np.maximum(np.log(np.take_along_axis(merged, order, 1)), LOG_ZERO)
    return {
        "topk_ids": np.take_along_axis(kept, order, 1).astype(np.int32),
        "topk_logprobs": logprobs.astype(np.float32),
        "tail_logprob": np.full(r, TAIL_FLOOR, dtype=np.float32),
        "exact": np.full(r, width, dtype=np.uint16),
    }


def _keys(cache: Cache, split: str) -> Iterator[tuple[Key, Place]]:
    with cache.stream(split=split, shuffle=False, repeat=False, columns={"doc_id", "window"}) as stream:
        for record in stream:
            yield key_of(record), stream.place


def key_of(record: Record) -> Key:
    """Return what names a record in its split."""
    return record.source, record.doc_id, record.window
