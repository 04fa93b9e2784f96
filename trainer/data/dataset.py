"""From a stream of cached records to packed sequences of torch tensors, resumable exactly.

A packed sequence is flat: one row of tokens in which documents follow one another, each with positions from 0 and
attention to itself alone. Longest documents come first, so that attention can treat the long ones one at a time and
the short ones together (trainer/model/attention.py).

State = epoch, the stream's state where the current block of records began, and how many sequences of it were used.
Resuming re-reads that block, packs it again and skips: packing depends on the records and the seed alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from teachercache import Cache, Record
from teachercache.errors import TeacherCacheError, UsageError
from teachercache.read.stream import RecordStream
from trainer.data.mean import MeanCache, MeanStream
from trainer.data.packing import pack_block
from trainer.data.sequence import PackedSequence, Piece, cut_record, min_context, pack_records, split_record
from trainer.data.shared_order import SharedOrder, State

RESUME_MUST_MATCH = ("manifest", "split", "seed")
PACKED_BY = {"doc_id", "window", "input_ids", "row_pos", "loss_mask", "entropy"}
"""What packing looks at: all that is read of records that others take."""
OF_ROWS = ("topk_ids", "topk_logprobs", "tail_logprob", "exact")


@dataclass
class DataCounts:
    """What happened to the data so far; kept in checkpoints, printed at the end."""

    sequences: int = 0
    documents: int = 0
    tokens_read: int = 0
    tokens_trained: int = 0
    tokens_done: int = 0
    """Trained on, or discarded on the way there: what progress is measured by."""
    tokens_pending: int = 0
    """Discarded since the last record that was kept; counted as done with the next one."""
    split_documents: int = 0
    truncated_documents: int = 0
    dropped_documents: int = 0
    rows_cut: int = 0
    """Rows of truncated and dropped documents that were not used."""
    without_rows: int = 0
    not_in_all: int = 0
    """Documents that not every cache of a mean has, or has with the same tokens and rows."""
    rows_left_out: int = 0
    """Rows that data.rows kept out of the loss; their tokens stay as context."""


class _Pooled(NamedTuple):
    """A record or piece and the corpus tokens it accounts for: new ones, those cut off, those discarded just before.

    place   where the record lies in its stream, if its teacher's rows were not read
    """

    piece: Piece
    tokens: int
    place: Any

    def __len__(self) -> int:
        return len(self.piece.record.input_ids)


class PackedCache(SharedOrder):
    """Packed sequences of one split of a cache, as a torch IterableDataset that resumes exactly.

        dataset = PackedCache(cache, split="train", seq_len=4096, epochs=1, seed=0)
        for sequence in dataset: ...
        dataset.state()            # JSON-able; PackedCache(..., state=that) continues with the next sequence

    cache      an open cache (its manifest is pinned for the life of this object)
    epochs     passes over the split; None is endless
    seq_len    tokens in a sequence; may be a function of the counts so far, and of nothing else (a length curriculum)
    pad        fill each sequence to seq_len: equal shapes for a GPU
    long_documents   a record longer than seq_len: "split" cuts it into pieces whose rows have an eighth of seq_len as
               context, "truncate" keeps its head, "drop" leaves it out, "refuse" raises
    block_sequences  sequences' worth of records that are packed together: more packs tighter and holds more in memory
    blocks_per_flush blocks until the packer empties itself: a resumed run re-reads at most this much
    weights    source -> weight: records of a source are kept with probability weight / largest weight, decided by a
               hash of seed, epoch and document, so the choice does not depend on the order of reading
    entropy_above, entropy_below   nats: rows of another teacher entropy have no loss; their tokens stay as context
    rank, world_size  of N processes rank r takes every N-th sequence of one global order, and reads the teacher's rows
               of those alone, by whole row groups; its states are those after a whole round of N, so a run may continue
               with another N
    In a DataLoader (batch_size=None) the workers share the sequences the same way, and they arrive in the order that
    they have without workers. `sequence.state` continues after a sequence, whatever read it.
    Raises TeacherCacheError when a record is longer than seq_len and long_documents="refuse", when a split has no row
    to train on, and when `state` is of another run. Raises UsageError for rows of a MeanCache chosen by entropy.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        split: str = "train",
        seq_len: int | Callable[[DataCounts], int] = 2048,
        seed: int = 0,
        epochs: int | None = 1,
        shuffle: bool = True,
        pad: bool = False,
        long_documents: str = "split",
        block_sequences: int = 16,
        blocks_per_flush: int = 16,
        weights: dict[str, float] | None = None,
        entropy_above: float | None = None,
        entropy_below: float | None = None,
        rank: int = 0,
        world_size: int = 1,
        state: State | None = None,
    ) -> None:
        if isinstance(cache, MeanCache) and not (entropy_above is None and entropy_below is None):
            raise UsageError(
                "rows of a mean of caches cannot be chosen by the entropy of the mean, which no cache knows"
            )
        self.cache, self.split, self.seed, self.epochs = cache, split, seed, epochs
        self.shuffle, self.pad, self.long_documents, self.weights = shuffle, pad, long_documents, weights or {}
        self.entropy_above, self.entropy_below = entropy_above, entropy_below
        self.block_sequences, self.blocks_per_flush = block_sequences, blocks_per_flush
        self._seq_len = seq_len
        fresh = self._fresh_state(epoch=0, counts=DataCounts())
        super().__init__(rank=rank, world_size=world_size, state=fresh if state is None else self.checked(state))

    def checked(self, state: State) -> State:
        """Return a state that is of this run; TeacherCacheError for a damaged one and for another run's."""
        fresh = self._fresh_state(epoch=0, counts=DataCounts())
        for key in RESUME_MUST_MATCH:
            if _checked(state)[key] != fresh[key]:
                raise TeacherCacheError(
                    f"cannot resume the data: the checkpoint has {key} {state[key]}, this run has {fresh[key]}"
                )
        return state

    def load_state(self, state: State) -> None:
        """Continue with the sequence after `state`; TeacherCacheError as of `checked`."""
        self._after = self.checked(state)

    @property
    def total_tokens(self) -> int:
        """Return the tokens of one epoch, by the manifest."""
        return sum(entry.tokens for entry in self.cache.files(split=self.split))

    def _length_at(self, counts: DataCounts) -> int:
        return self._seq_len(counts) if callable(self._seq_len) else self._seq_len

    def _fresh_state(self, *, epoch: int, counts: DataCounts) -> State:
        run = {"manifest": self.cache.manifest.digest, "split": self.split, "seed": self.seed}
        return {**run, "epoch": epoch, "stream": None, "used": 0, "counts": vars(counts).copy()}

    @staticmethod
    def counts_of(state: State) -> DataCounts:
        """Return the counts that a state holds."""
        return DataCounts(**state["counts"])

    def all_sequences(
        self, state: State, mine: Callable[[int], bool] | None
    ) -> Iterator[tuple[PackedSequence | None, State]]:
        """Yield every sequence of the order, those of others as None, each with the state after it."""
        number = 0
        while self.epochs is None or state["epoch"] < self.epochs:
            for sequence, after in self._epoch(state, number, mine):
                state, number = after, number + 1
                yield sequence, after
            counts = self.counts_of(state)
            state = self._fresh_state(epoch=state["epoch"] + 1, counts=counts)

    def _epoch(
        self, state: State, number: int, mine: Callable[[int], bool] | None
    ) -> Iterator[tuple[PackedSequence | None, State]]:
        """Yield the rest of one epoch, from `state` on; `number` sequences came before. Tensors are built of ours alone."""
        epoch, skip, seed = state["epoch"], state["used"], self.seed * 1_000_003 + state["epoch"]
        columns = None if mine is None else PACKED_BY
        stream = self.cache.stream(
            split=self.split, seed=seed, state=state["stream"], shuffle=self.shuffle, repeat=False, columns=columns
        )
        # The counts in the state are those after the last used sequence; reading restarts at the anchor's counts.
        counts = DataCounts(**(state.get("anchor_counts") or state["counts"]))
        anchor = {"stream": state["stream"], "counts": vars(counts).copy()}
        pool: list[_Pooled] = []
        used = block = 0
        before, exhausted = replace(counts), False
        try:
            while not exhausted:
                seq_len = self._length_at(counts)
                exhausted = self._read_block(stream, pool, counts, seq_len, epoch)
                block += 1
                flush = exhausted or block % self.blocks_per_flush == 0
                lengths = [len(item) for item in pool]
                order = (self.seed, epoch, counts.documents)
                groups, carried = pack_block(lengths, seq_len, flush=flush, max_carry=self.block_sequences, seed=order)
                for group in groups:
                    used += 1
                    counts.sequences += 1
                    counts.tokens_trained += sum(lengths[i] for i in group)
                    counts.tokens_done += sum(pool[i].tokens for i in group)
                    if used <= skip:
                        continue
                    sequence = None
                    if mine is None or mine(number):
                        ours, pad_to = [pool[i] for i in group], seq_len if self.pad else None
                        pieces = [item.piece for item in ours] if mine is None else _with_rows(stream, ours)
                        sequence = pack_records(pieces, pad_to=pad_to, tokens_done=counts.tokens_done)
                    number += 1
                    after = self._fresh_state(epoch=epoch, counts=counts)
                    after |= {"stream": anchor["stream"], "used": used, "anchor_counts": anchor["counts"]}
                    yield sequence, after
                pool = [pool[i] for i in carried]
                if flush:
                    anchor = {"stream": stream.state(), "counts": vars(counts).copy()}
                    used = skip = 0
            if state["stream"] is None and counts.sequences == before.sequences:
                raise TeacherCacheError(self._nothing(before, counts))
        finally:
            stream.close()

    def _nothing(self, before: DataCounts, counts: DataCounts) -> str:
        """Return why an epoch had no row to train on."""
        found = {name: value - getattr(before, name) for name, value in vars(counts).items()}
        reasons = {
            "not in all caches with the same tokens and rows": found["not_in_all"],
            "longer than data.seq_len": found["dropped_documents"],
            "without a row to learn": found["without_rows"],
        }
        if self.weights:
            reasons["left out by data.weights"] = found["documents"] - sum(reasons.values())
        said = ", ".join(f"{value:,} {reason}" for reason, value in reasons.items() if value > 0)
        rows = f"; data.rows left {found['rows_left_out']:,} rows out" * bool(found["rows_left_out"])
        return (
            f"split {self.split!r} of {self.cache.url} has nothing to train on: "
            f"of {found['documents']:,} documents {said or 'none'}{rows}"
        )

    def _read_block(
        self, stream: RecordStream | MeanStream, pool: list[_Pooled], counts: DataCounts, seq_len: int, epoch: int
    ) -> bool:
        """Add records to the pool until it holds a block; returns whether the epoch ended."""
        wanted = self.block_sequences * seq_len
        held = sum(len(item) for item in pool)
        while held < wanted:
            record = next(stream, None)
            if record is None:
                return True
            place = None
            if record.topk_ids is None:  # until `_with_rows`: which of the record's rows a piece has
                record, place = replace(record, topk_ids=np.arange(len(record.row_pos), dtype=np.int32)), stream.place
            counts.documents += 1
            counts.tokens_read += len(record.input_ids)
            sampled = self._sampled(record, epoch)
            record = self._choose_rows(record, counts) if sampled else record
            kept = self._pieces(record, seq_len, counts) if sampled else []
            covered = 0
            for piece, stop in kept:
                counts.tokens_pending += stop - covered
                covered = stop
                if np.any(piece.record.loss_mask):
                    pool.append(_Pooled(piece, counts.tokens_pending, place))
                    counts.tokens_pending = 0
                    held += len(pool[-1])
            if isinstance(stream, MeanStream) and not stream.in_all:
                counts.not_in_all += 1
            elif kept and not np.any(record.loss_mask):
                counts.without_rows += 1
            counts.tokens_pending += len(record.input_ids) - covered
        return False

    def _pieces(self, record: Record, seq_len: int, counts: DataCounts) -> list[tuple[Piece, int]]:
        """Return what is trained on of a record: pieces, each with the end of the tokens that are done with it."""
        tokens = len(record.input_ids)
        if tokens <= seq_len:
            return [(Piece(record), tokens)]
        if self.long_documents == "refuse":
            raise TeacherCacheError(
                f"document {record.doc_id} (window {record.window}) has {tokens:,} tokens, more than data.seq_len = "
                f"{seq_len:,}; raise seq_len or set data.long_documents"
            )
        if self.long_documents == "split":
            counts.split_documents += 1
            pieces = split_record(record, seq_len)
            ends = np.cumsum([len(p.record.input_ids) for p in pieces]) - np.arange(len(pieces)) * min_context(seq_len)
            return list(zip(pieces, ends.tolist(), strict=True))
        rows = int(np.count_nonzero(record.loss_mask))
        if self.long_documents == "drop":
            counts.dropped_documents += 1
            counts.rows_cut += rows
            return []
        counts.truncated_documents += 1
        piece = cut_record(record, 0, seq_len)
        counts.rows_cut += rows - int(np.count_nonzero(piece.record.loss_mask))
        return [(piece, tokens)]

    def _choose_rows(self, record: Record, counts: DataCounts) -> Record:
        """Return the record without loss in rows that the entropy leaves out. TeacherCacheError where it is unknown."""
        above, below, entropy = self.entropy_above, self.entropy_below, record.entropy
        if above is None and below is None:
            return record
        if entropy is None or np.isnan(entropy).any():
            raise TeacherCacheError(
                f"data.rows chooses by the teacher's entropy, but rows of document {record.doc_id} have none: this cache "
                "was made by an engine that does not give it; drop data.rows"
            )
        chosen = np.ones(len(entropy), dtype=bool)
        if above is not None:
            chosen &= entropy > above
        if below is not None:
            chosen &= entropy < below
        counts.rows_left_out += int(np.count_nonzero(record.loss_mask & ~chosen))
        return replace(record, loss_mask=record.loss_mask & chosen)

    def _sampled(self, record: Record, epoch: int) -> bool:
        if not self.weights:
            return True
        weight = self.weights.get(record.source, 0.0) / max(self.weights.values())
        digest = hashlib.sha256(f"{self.seed}/{epoch}/{record.doc_id}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < weight * 2**64


def _with_rows(stream: RecordStream | MeanStream, pooled: list[_Pooled]) -> list[Piece]:
    """Return pieces with the teacher's rows, which the stream did not read with their records."""
    found = stream.fetch([item.place for item in pooled if item.place is not None], OF_ROWS)
    pieces = []
    for (piece, _, _), whole in zip(pooled, found, strict=True):
        columns = {name: getattr(whole, name) for name in OF_ROWS}
        chosen = piece.record.topk_ids
        rows: dict[str, Any] = {name: None if c is None else c[chosen] for name, c in columns.items()}
        pieces.append(replace(piece, record=replace(piece.record, **rows)))
    return pieces


def _checked(state: State) -> State:
    """Return a state whose fields have the right types; TeacherCacheError for one that is damaged."""
    try:
        numbers = [state["epoch"], state["used"]]
        for counts in (state["counts"], state.get("anchor_counts") or {}):
            numbers += vars(DataCounts(**counts)).values()
        whole = all(type(number) is int and number >= 0 for number in numbers)
        named = all(key in state for key in RESUME_MUST_MATCH)
        placed = state["stream"] is None or isinstance(state["stream"], dict)
    except (KeyError, TypeError, AttributeError):
        whole = named = placed = False
    if not (whole and named and placed):
        raise TeacherCacheError("cannot resume the data: its state is damaged; resume from an older checkpoint")
    return state
