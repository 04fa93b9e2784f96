"""From a stream of cached records to packed batches of torch tensors, resumable exactly.

A packed sequence is flat: one row of tokens in which documents follow one another, each with positions from 0 and
attention to itself alone. Longest documents come first, so that attention can treat the long ones one at a time and
the short ones together (trainer/model/attention.py).

    PackedCache   -> PackedSequence, PackedSequence, ...     one at a time, with `state()` after each
    Prefetcher       the same, prepared (and pinned) on a thread of its own

State = epoch, the stream's state where the current block of records began, and how many sequences of it were used.
Resuming re-reads that block, packs it again and skips: packing depends on the records and the seed alone.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset

from teachercache.errors import TeacherCacheError
from trainer.data.packing import pack_block
from trainer.patience import patiently

NO_LABEL = -100
"""The label of a row whose next token lies outside the record: no cross-entropy there."""


@dataclass(frozen=True)
class PackedSequence:
    """Whole documents packed into one flat row of T tokens, with R teacher rows.

    input_ids, position_ids  int64 [T]
    document_lengths         lengths of the documents, in order; padding, if any, is one more entry at the end
    row_index                int64 [R]  position in the sequence that each teacher row belongs to
    topk_ids, topk_logprobs  int32, float32 [R, K]
    tail_logprob             float32 [R]
    labels                   int64 [R]  the real next token, or NO_LABEL
    documents                (doc_id, window) of each document, for error messages
    tokens_done              tokens of the run trained on after this sequence, or discarded so far: its progress
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    document_lengths: tuple[int, ...]
    row_index: torch.Tensor
    topk_ids: torch.Tensor
    topk_logprobs: torch.Tensor
    tail_logprob: torch.Tensor
    labels: torch.Tensor
    documents: tuple[tuple[str, int], ...]
    tokens_done: int

    @property
    def num_rows(self) -> int:
        return self.row_index.numel()

    @property
    def num_padding(self) -> int:
        """Tokens at the end that belong to no document."""
        return self.document_lengths[-1] if len(self.document_lengths) > len(self.documents) else 0

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> PackedSequence:
        tensors: dict[str, Any] = {n: function(v) for n, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return replace(self, **tensors)

    def to(self, device: torch.device) -> PackedSequence:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> PackedSequence:
        return self._map(torch.Tensor.pin_memory)


def pack_records(records: list[Any], *, pad_to: int | None = None, tokens_done: int = 0) -> PackedSequence:
    """Lay whole records one after the other, longest first; only rows that the loss mask allows are kept."""
    records = sorted(records, key=lambda record: -len(record.input_ids))  # stable: ties keep the packer's order
    lengths = [len(record.input_ids) for record in records]
    total = sum(lengths)
    padding = (pad_to - total) if pad_to is not None else 0
    if padding < 0:
        raise ValueError(f"{total} tokens do not fit a sequence of {pad_to}")
    ids = [record.input_ids for record in records]
    if padding:
        lengths.append(padding)
        ids.append(np.zeros(padding, dtype=np.int32))
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    row_index, topk_ids, topk_logprobs, tail_logprob, labels = [], [], [], [], []
    for record, start in zip(records, starts, strict=False):
        keep = np.asarray(record.loss_mask, dtype=bool)
        position = np.asarray(record.row_pos)[keep]
        following = np.append(record.input_ids[1:], NO_LABEL)
        row_index.append(position + start)
        topk_ids.append(record.topk_ids[keep])
        topk_logprobs.append(record.topk_logprobs[keep])
        tail_logprob.append(record.tail_logprob[keep])
        labels.append(following[position])
    return PackedSequence(
        input_ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
        position_ids=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
        document_lengths=tuple(lengths),
        row_index=torch.from_numpy(np.concatenate(row_index).astype(np.int64)),
        topk_ids=torch.from_numpy(np.concatenate(topk_ids).astype(np.int32)),
        topk_logprobs=torch.from_numpy(np.concatenate(topk_logprobs).astype(np.float32)),
        tail_logprob=torch.from_numpy(np.concatenate(tail_logprob).astype(np.float32)),
        labels=torch.from_numpy(np.concatenate(labels).astype(np.int64)),
        documents=tuple((record.doc_id, int(record.window)) for record in records),
        tokens_done=tokens_done,
    )


def cut_record(record: Any, length: int) -> Any:
    """The first `length` tokens of a record, with the rows that lie inside."""
    keep = np.asarray(record.row_pos) < length
    return replace(
        record,
        input_ids=record.input_ids[:length],
        **{
            name: getattr(record, name)[keep]
            for name in ("row_pos", "topk_ids", "topk_logprobs", "tail_logprob", "loss_mask")
        },
        target_logprob=None if record.target_logprob is None else record.target_logprob[keep],
    )


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
    """A record that waits for its sequence, and the tokens of the corpus it stands for: what was cut from it, and
    what was discarded before it, is done when it is."""

    record: Any
    tokens: int


class PackedCache(IterableDataset[PackedSequence]):
    """Packed sequences of one split of a cache, as a torch IterableDataset that resumes exactly.

        dataset = PackedCache(cache, split="train", seq_len=4096, epochs=1, seed=0)
        for sequence in dataset: ...
        dataset.state()            # JSON-able; PackedCache(..., state=that) continues with the next sequence

    cache      an open teachercache.Cache (its manifest is pinned for the life of this object)
    epochs     passes over the split; None is endless
    seq_len    tokens in a sequence; may be a function of the tokens done so far (a length curriculum)
    pad        fill each sequence to seq_len: equal shapes for a GPU
    weights    source -> weight: records of a source are kept with probability weight / largest weight, decided by a
               hash of seed, epoch and document, so the choice does not depend on the order of reading
    Raises TeacherCacheError when a record is longer than seq_len and long_documents="refuse".
    """

    def __init__(
        self,
        cache: Any,
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
        rank: int = 0,
        world_size: int = 1,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.cache, self.split, self.seed, self.epochs, self.shuffle, self.pad = (
            cache,
            split,
            seed,
            epochs,
            shuffle,
            pad,
        )
        self._seq_len = seq_len if callable(seq_len) else (lambda _done: seq_len)
        self.long_documents, self.weights = long_documents, weights or {}
        self.block_sequences, self.blocks_per_flush = block_sequences, blocks_per_flush
        self.rank, self.world_size = rank, world_size
        self._state = self._checked(state) if state else self._fresh_state(epoch=0, counts=DataCounts())
        self._after: dict[str, Any] = self._state

    def _fresh_state(self, *, epoch: int, counts: DataCounts) -> dict[str, Any]:
        return {
            "manifest": self.cache.manifest.digest,
            "split": self.split,
            "seed": self.seed,
            "world_size": self.world_size,
            "epoch": epoch,
            "stream": None,
            "used": 0,
            "counts": vars(counts).copy(),
        }

    def _checked(self, state: dict[str, Any]) -> dict[str, Any]:
        mine = self._fresh_state(epoch=0, counts=DataCounts())
        for key in ("manifest", "split", "seed", "world_size"):
            if state[key] != mine[key]:
                raise TeacherCacheError(
                    f"cannot resume the data: the checkpoint has {key} {state[key]}, this run has {mine[key]}"
                )
        return state

    def state(self) -> dict[str, Any]:
        """Where the next sequence starts; small and JSON-able."""
        return self._after

    @staticmethod
    def counts_of(state: dict[str, Any]) -> DataCounts:
        return DataCounts(**state["counts"])

    def __iter__(self) -> Iterator[PackedSequence]:
        for sequence, after in self.with_states():
            self._after = after
            yield sequence

    def with_states(self, state: dict[str, Any] | None = None) -> Iterator[tuple[PackedSequence, dict[str, Any]]]:
        """Each sequence with the state that continues after it (what a prefetcher hands along)."""
        state = state or self._after
        while self.epochs is None or state["epoch"] < self.epochs:
            produced = False
            for sequence, after in self._epoch(state):
                produced, state = True, after
                yield sequence, after
            counts = DataCounts(**state["counts"])
            if not produced and state["used"] == 0 and state["stream"] is None:
                raise TeacherCacheError(
                    f"split {self.split!r} of {self.cache.url} gave no sequence: "
                    f"{counts.documents} documents, {counts.without_rows} without rows; it has {self.cache.splits}"
                )
            state = self._fresh_state(epoch=state["epoch"] + 1, counts=counts)

    def _epoch(self, state: dict[str, Any]) -> Iterator[tuple[PackedSequence, dict[str, Any]]]:
        """The rest of one epoch, from `state` on."""
        epoch, skip = state["epoch"], state["used"]
        stream = self.cache.stream(
            split=self.split,
            seed=self.seed * 1_000_003 + epoch,
            rank=self.rank,
            world_size=self.world_size,
            state=state["stream"],
            shuffle=self.shuffle,
            repeat=False,
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
                groups, carried = pack_block(
                    [len(item.record.input_ids) for item in pool],
                    seq_len,
                    flush=flush,
                    max_carry=self.block_sequences,
                    seed=(self.seed, epoch, counts.documents),
                )
                for group in groups:
                    used += 1
                    counts.tokens_trained += sum(len(pool[i].record.input_ids) for i in group)
                    counts.tokens_done += sum(pool[i].tokens for i in group)
                    if used <= skip:
                        continue
                    sequence = pack_records(
                        [pool[i].record for i in group],
                        pad_to=seq_len if self.pad else None,
                        tokens_done=counts.tokens_done,
                    )
                    after = self._fresh_state(epoch=epoch, counts=counts)
                    after |= {"stream": anchor["stream"], "used": used, "anchor_counts": anchor["counts"]}
                    yield sequence, after
                pool = [pool[i] for i in carried]
                if flush:
                    anchor = {"stream": stream.state(), "counts": vars(counts).copy()}
                    used = skip = 0
        finally:
            stream.close()

    def _read_block(self, stream: Any, pool: list[_Pooled], counts: DataCounts, seq_len: int, epoch: int) -> bool:
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

    def _sampled(self, record: Any, epoch: int) -> bool:
        if not self.weights:
            return True
        weight = self.weights.get(record.source, 0.0) / max(self.weights.values())
        digest = hashlib.sha256(f"{self.seed}/{epoch}/{record.doc_id}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < weight * 2**64


class Interrupted(Exception):
    """The wait for a sequence was given up because `Prefetcher.interrupted` said so; nothing was consumed."""


class Prefetcher:
    """Runs PackedCache on a thread of its own and hands over (sequence, state) pairs in order.

    depth  how many sequences wait ready; 0 runs without a thread
    pin    pin their memory, so that copies to the GPU overlap with compute
    patience_s  while the store is away, start again from the last state for so long
    Errors of the thread are raised where the sequence was asked for.
    """

    def __init__(self, dataset: PackedCache, *, depth: int = 4, pin: bool = False, patience_s: float = 600.0) -> None:
        self._dataset, self._pin, self._patience_s = dataset, pin, patience_s
        self._state = dataset.state()
        self._pairs: Iterator[tuple[PackedSequence, dict[str, Any]]] | None = None
        self._stop = threading.Event()
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=max(depth, 1))
        self._thread: threading.Thread | None = None
        self._end: BaseException | None = None
        self.interrupted: Callable[[], bool] = lambda: False
        """Asked while a sequence is waited for: true ends the wait with Interrupted (with a thread, depth > 0)."""
        if depth:
            self._thread = threading.Thread(target=self._fill, name="packed-cache", daemon=True)
            self._thread.start()

    def _prepare(self) -> tuple[PackedSequence, dict[str, Any]] | None:
        pair = patiently(self._read, patience_s=self._patience_s, what="reading the cache")
        if pair is None:
            return None
        sequence, self._state = pair
        return (sequence.pin_memory() if self._pin else sequence), self._state

    def _read(self) -> tuple[PackedSequence, dict[str, Any]] | None:
        if self._pairs is None:
            self._pairs = self._dataset.with_states(self._state)
        try:
            return next(self._pairs, None)
        except Exception:
            self._pairs = None  # a generator that raised is spent: the next attempt starts from the last state
            raise

    def _fill(self) -> None:
        while not self._stop.is_set():
            try:
                item: Any = self._prepare()
            except BaseException as error:  # handed to the consumer, who raises it
                item = error
            while not self._stop.is_set():
                try:
                    self._queue.put(item, timeout=0.2)
                    break
                except queue.Full:
                    continue
            if item is None or isinstance(item, BaseException):
                return

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> tuple[PackedSequence, dict[str, Any]]:
        if self._end is None:
            item = self._wait() if self._thread else self._prepare()
            if item is not None and not isinstance(item, BaseException):
                return item
            self._end = item or StopIteration()  # the thread is gone: asked again, it would never answer
        raise self._end

    def _wait(self) -> Any:
        while True:
            try:
                return self._queue.get(timeout=0.2)
            except queue.Empty:
                if self.interrupted():
                    raise Interrupted from None

    def close(self) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join(timeout=10)
        if self._pairs is not None:
            self._pairs.close()  # type: ignore[attr-defined]
