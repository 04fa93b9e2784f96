"""From a stream of cached records to packed sequences of torch tensors, resumable exactly.

A packed sequence is flat: one row of tokens in which documents follow one another, each with positions from 0 and
attention to itself alone. Longest documents come first, so that attention can treat the long ones one at a time and
the short ones together (trainer/model/attention.py).

State = epoch, the stream's state where the current block of records began, and how many sequences of it were used.
Resuming re-reads that block, packs it again and skips: packing depends on the records and the seed alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset

from teachercache import Cache, Record
from teachercache.errors import TeacherCacheError
from trainer.data.packing import pack_block
from trainer.data.sequence import PackedSequence, cut_record, pack_records

RESUME_MUST_MATCH = ("manifest", "split", "seed")


@dataclass
class DataCounts:
    """What happened to the data so far; kept in checkpoints, printed at the end."""

    documents: int = 0
    tokens_read: int = 0
    tokens_trained: int = 0
    tokens_done: int = 0
    """Trained on, or discarded on the way there: what progress is measured by."""
    tokens_pending: int = 0
    """Discarded since the last record that was kept; counted as done with the next one."""
    truncated_documents: int = 0
    dropped_documents: int = 0
    without_rows: int = 0


class _Pooled(NamedTuple):
    """A record and the corpus tokens it accounts for: its own, those cut off it, and those discarded just before it."""

    record: Record
    tokens: int


class PackedCache(IterableDataset[PackedSequence]):
    """Packed sequences of one split of a cache, as a torch IterableDataset that resumes exactly.

        dataset = PackedCache(cache, split="train", seq_len=4096, epochs=1, seed=0)
        for sequence in dataset: ...
        dataset.state()            # JSON-able; PackedCache(..., state=that) continues with the next sequence

    cache      an open cache (its manifest is pinned for the life of this object)
    epochs     passes over the split; None is endless
    seq_len    tokens in a sequence; may be a function of the tokens done so far (a length curriculum)
    pad        fill each sequence to seq_len: equal shapes for a GPU
    long_documents   a record longer than seq_len: "truncate" keeps its head, "drop" leaves it out, "refuse" raises
    block_sequences  sequences' worth of records that are packed together: more packs tighter and holds more in memory
    blocks_per_flush blocks until the packer empties itself: a resumed run re-reads at most this much
    weights    source -> weight: records of a source are kept with probability weight / largest weight, decided by a
               hash of seed, epoch and document, so the choice does not depend on the order of reading
    Raises TeacherCacheError when a record is longer than seq_len and long_documents="refuse", when a split has no row
    to train on, and when `state` is of another run.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        split: str = "train",
        seq_len: int | Callable[[int], int] = 2048,
        seed: int = 0,
        epochs: int | None = 1,
        shuffle: bool = True,
        pad: bool = False,
        long_documents: str = "truncate",
        block_sequences: int = 16,
        blocks_per_flush: int = 16,
        weights: dict[str, float] | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.cache, self.split, self.seed, self.epochs = cache, split, seed, epochs
        self.shuffle, self.pad, self.long_documents, self.weights = shuffle, pad, long_documents, weights or {}
        self.block_sequences, self.blocks_per_flush = block_sequences, blocks_per_flush
        self._seq_len = seq_len if callable(seq_len) else (lambda _done: seq_len)
        fresh = self._fresh_state(epoch=0, counts=DataCounts())
        self._after: dict[str, Any] = state or fresh
        for key in RESUME_MUST_MATCH:
            if self._after[key] != fresh[key]:
                raise TeacherCacheError(
                    f"cannot resume the data: the checkpoint has {key} {self._after[key]}, this run has {fresh[key]}"
                )

    def _fresh_state(self, *, epoch: int, counts: DataCounts) -> dict[str, Any]:
        run = {"manifest": self.cache.manifest.digest, "split": self.split, "seed": self.seed}
        return {**run, "epoch": epoch, "stream": None, "used": 0, "counts": vars(counts).copy()}

    def state(self) -> dict[str, Any]:
        """Return where the next sequence starts; small and JSON-able."""
        return self._after

    @staticmethod
    def counts_of(state: dict[str, Any]) -> DataCounts:
        """Return the counts that a state holds."""
        return DataCounts(**state["counts"])

    def __iter__(self) -> Iterator[PackedSequence]:
        for sequence, after in self.with_states():
            self._after = after
            yield sequence

    def with_states(self, state: dict[str, Any] | None = None) -> Generator[tuple[PackedSequence, dict[str, Any]]]:
        """Iterate over (sequence, the state that continues after it), from `state` or this object's on."""
        state = state or self._after
        while self.epochs is None or state["epoch"] < self.epochs:
            produced = False
            for sequence, after in self._epoch(state):
                produced, state = True, after
                yield sequence, after
            counts = self.counts_of(state)
            if not produced and state["used"] == 0 and state["stream"] is None:
                raise TeacherCacheError(
                    f"split {self.split!r} of {self.cache.url} gave no sequence: "
                    f"{counts.documents} documents, {counts.without_rows} without rows; it has {self.cache.splits}"
                )
            state = self._fresh_state(epoch=state["epoch"] + 1, counts=counts)

    def _epoch(self, state: dict[str, Any]) -> Iterator[tuple[PackedSequence, dict[str, Any]]]:
        """Yield the rest of one epoch, from `state` on."""
        epoch, skip, seed = state["epoch"], state["used"], self.seed * 1_000_003 + state["epoch"]
        stream = self.cache.stream(
            split=self.split, seed=seed, state=state["stream"], shuffle=self.shuffle, repeat=False
        )
        # The counts in the state are those after the last used sequence; reading restarts at the anchor's counts.
        counts = DataCounts(**(state.get("anchor_counts") or state["counts"]))
        anchor = {"stream": state["stream"], "counts": vars(counts).copy()}
        pool: list[_Pooled] = []
        used = block = 0
        exhausted = False
        try:
            while not exhausted:
                seq_len = self._seq_len(counts.tokens_done)
                exhausted = self._read_block(stream, pool, counts, seq_len, epoch)
                block += 1
                flush = exhausted or block % self.blocks_per_flush == 0
                lengths = [len(item.record.input_ids) for item in pool]
                order = (self.seed, epoch, counts.documents)
                groups, carried = pack_block(lengths, seq_len, flush=flush, max_carry=self.block_sequences, seed=order)
                for group in groups:
                    used += 1
                    counts.tokens_trained += sum(lengths[i] for i in group)
                    counts.tokens_done += sum(pool[i].tokens for i in group)
                    if used <= skip:
                        continue
                    records, pad_to = [pool[i].record for i in group], seq_len if self.pad else None
                    sequence = pack_records(records, pad_to=pad_to, tokens_done=counts.tokens_done)
                    after = self._fresh_state(epoch=epoch, counts=counts)
                    after |= {"stream": anchor["stream"], "used": used, "anchor_counts": anchor["counts"]}
                    yield sequence, after
                pool = [pool[i] for i in carried]
                if flush:
                    anchor = {"stream": stream.state(), "counts": vars(counts).copy()}
                    used = skip = 0
        finally:
            stream.close()

    def _read_block(
        self, stream: Iterator[Record], pool: list[_Pooled], counts: DataCounts, seq_len: int, epoch: int
    ) -> bool:
        """Add records to the pool until it holds a block; returns whether the epoch ended."""
        wanted = self.block_sequences * seq_len
        held = sum(len(item.record.input_ids) for item in pool)
        while held < wanted:
            record = next(stream, None)
            if record is None:
                return True
            counts.documents += 1
            counts.tokens_read += len(record.input_ids)
            counts.tokens_pending += len(record.input_ids)
            if not self._sampled(record, epoch):
                continue
            if len(record.input_ids) > seq_len:
                if self.long_documents == "refuse":
                    raise TeacherCacheError(
                        f"document {record.doc_id} (window {record.window}) has {len(record.input_ids)} tokens, "
                        f"more than data.seq_len = {seq_len}; raise seq_len or set data.long_documents"
                    )
                if self.long_documents == "drop":
                    counts.dropped_documents += 1
                    continue
                counts.truncated_documents += 1
                record = cut_record(record, seq_len)
            if not np.any(record.loss_mask):
                counts.without_rows += 1
                continue
            pool.append(_Pooled(record, counts.tokens_pending))
            counts.tokens_pending = 0
            held += len(record.input_ids)
        return False

    def _sampled(self, record: Record, epoch: int) -> bool:
        if not self.weights:
            return True
        weight = self.weights.get(record.source, 0.0) / max(self.weights.values())
        digest = hashlib.sha256(f"{self.seed}/{epoch}/{record.doc_id}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < weight * 2**64
