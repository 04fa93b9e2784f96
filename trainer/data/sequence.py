"""One packed sequence: whole documents, one after the other, and their teacher rows, as torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from teachercache import Record
from teachercache.errors import InvalidRecord
from teachercache.format.spec import Rows
from teachercache.parquet.block import ROW_DTYPES
from trainer.losses import TeacherRows

MASS_ERROR = 0.02
"""float16's rounding of a flat row is a tenth of it."""
NO_LABEL = -100
"""The label of a row whose next token lies outside the record: no cross-entropy there."""


@dataclass(frozen=True)
class Piece:
    """A record, or consecutive tokens of one, and the token that follows its last one, or NO_LABEL."""

    record: Record
    next_token: int = NO_LABEL


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
    exact, entropy           int64, float32 [R] of each row, as TeacherRows has them; None of top-K rows
    sources                  source of each document
    cache                    index of the cache that the documents are of, where several are mixed
    tokens_done              tokens of the run trained on after this sequence, or discarded so far: its progress
    state                    where PackedCache continues after this sequence; None where it was packed otherwise
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
    state: dict[str, Any] | None = None
    exact: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    sources: tuple[str, ...] = ()
    cache: int = 0

    @property
    def num_rows(self) -> int:
        """R: the teacher rows of the sequence."""
        return self.row_index.numel()

    def teacher_rows(self, part: slice = slice(None), valid: torch.Tensor | None = None) -> TeacherRows:
        """Return some of the teacher rows; `valid` [R] is theirs, where not all of them count."""
        rows = TeacherRows(self.topk_ids, self.topk_logprobs, self.tail_logprob, valid, self.exact, self.entropy)
        return rows[part]

    def row_documents(self) -> torch.Tensor:
        """Return int64 [R], the index of the document that each teacher row belongs to."""
        ends = torch.tensor(self.document_lengths, device=self.row_index.device).cumsum(0)
        return torch.searchsorted(ends, self.row_index, right=True)

    @property
    def num_padding(self) -> int:
        """Tokens at the end that belong to no document."""
        return self.document_lengths[-1] if len(self.document_lengths) > len(self.documents) else 0

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> PackedSequence:
        tensors: dict[str, Any] = {n: function(v) for n, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return replace(self, **tensors)

    def to(self, device: torch.device) -> PackedSequence:
        """Return a copy on a device; from pinned memory without waiting for it."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> PackedSequence:
        """Return a copy in pinned memory."""
        return self._map(torch.Tensor.pin_memory)


def no_rows(kind: Rows, length: int) -> PackedSequence:
    """Return a sequence of `length` tokens of padding, without documents and rows: for a rank that has none left."""
    whole, sampled = torch.zeros(length, dtype=torch.int64), kind.kind == "sampled"
    rows, values = whole[:0], torch.zeros(0, kind.entries)
    return PackedSequence(
        input_ids=whole,
        position_ids=torch.arange(length),
        document_lengths=(length,),
        row_index=rows,
        topk_ids=values.int(),
        topk_logprobs=values,
        tail_logprob=values[:, 0],
        labels=rows,
        documents=(),
        tokens_done=0,
        exact=rows if sampled else None,
        entropy=values[:, 0] if sampled else None,
        sources=("",),
    )


def pack_records(
    records: Sequence[Record | Piece], *, pad_to: int | None = None, tokens_done: int = 0
) -> PackedSequence:
    """Lay whole records or pieces one after the other, longest first; only rows that the loss mask allows are kept.

    Raises ValueError when they are longer than pad_to tokens, and InvalidRecord for rows whose probabilities sum to more
    than 1: the reader has checked each value, and a student would be trained towards a mass that no teacher has.
    """
    pieces = [record if isinstance(record, Piece) else Piece(record) for record in records]
    for piece in pieces:
        _check_mass(piece.record)
    pieces.sort(key=lambda piece: -len(piece.record.input_ids))  # stable: ties keep the packer's order
    return _pack([piece.record for piece in pieces], [piece.next_token for piece in pieces], pad_to, tokens_done)


def _check_mass(record: Record) -> None:
    """Raise InvalidRecord where a row's exact entries and tail sum to more than 1: about 0.2 microseconds a row."""
    probabilities = np.exp(record.topk_logprobs)
    if record.exact is not None:
        probabilities[np.arange(probabilities.shape[1]) >= record.exact[:, None]] = 0
    mass = probabilities.sum(axis=1) + np.exp(record.tail_logprob)
    if mass.size and mass.max() > 1 + MASS_ERROR:
        raise InvalidRecord(
            "mass_above_one",
            f"the probabilities of the row at position {int(record.row_pos[mass.argmax()])} sum to {mass.max():.4g}, not to 1",
            doc_id=record.doc_id,
            window=record.window,
        )


def _pack(
    records: Sequence[Record], next_tokens: Sequence[int], pad_to: int | None, tokens_done: int
) -> PackedSequence:
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
    kept = [record.loss_mask.astype(bool) for record in records]
    positions = [record.row_pos[keep] for record, keep in zip(records, kept, strict=True)]
    following = [np.append(r.input_ids[1:], after) for r, after in zip(records, next_tokens, strict=True)]

    def joined(parts: Iterable[Any], dtype: Any) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(list(parts)).astype(dtype))

    def rows(name: str, dtype: Any) -> torch.Tensor:
        return joined((getattr(record, name)[keep] for record, keep in zip(records, kept, strict=True)), dtype)

    sampled = all(record.exact is not None for record in records)
    return PackedSequence(
        input_ids=joined(ids, np.int64),
        position_ids=joined((np.arange(length) for length in lengths), np.int64),
        document_lengths=tuple(lengths),
        # The padding, if any, has a start but no record.
        row_index=joined((p + start for p, start in zip(positions, starts, strict=False)), np.int64),
        topk_ids=rows("topk_ids", np.int32),
        topk_logprobs=rows("topk_logprobs", np.float32),
        tail_logprob=rows("tail_logprob", np.float32),
        labels=joined((after[p] for after, p in zip(following, positions, strict=True)), np.int64),
        documents=tuple((record.doc_id, int(record.window)) for record in records),
        tokens_done=tokens_done,
        exact=rows("exact", np.int64) if sampled else None,
        entropy=rows("entropy", np.float32) if sampled else None,
        sources=tuple(record.source for record in records),
    )


def cut_record(record: Record, start: int, stop: int, *, rows_from: int | None = None) -> Piece:
    """Return tokens [start, stop) of a record with the rows at positions [rows_from (default start), stop)."""
    keep = (record.row_pos >= (start if rows_from is None else rows_from)) & (record.row_pos < stop)
    rows: dict[str, Any] = {
        name: getattr(record, name)[keep] for name in ROW_DTYPES if getattr(record, name) is not None
    }
    rows["row_pos"] = rows["row_pos"] - start
    ids = record.input_ids
    return Piece(replace(record, input_ids=ids[start:stop], **rows), int(ids[stop]) if stop < len(ids) else NO_LABEL)


def split_record(record: Record, length: int) -> list[Piece]:
    """Return a record longer than `length` as pieces of at most that, which together hold each of its rows once.

    A piece after the first begins `min_context(length)` tokens before its first row: the teacher saw the whole
    document, and a student that saw nothing of it could not agree.
    """
    tokens, context = len(record.input_ids), min_context(length)
    pieces = [cut_record(record, 0, length)]
    done = length
    while done < tokens:
        start = done - context
        pieces.append(cut_record(record, start, min(start + length, tokens), rows_from=done))
        done = start + length
    return pieces


def min_context(length: int) -> int:
    """Return how many tokens a later piece of a split document repeats before its first row: an eighth of its length."""
    return length // 8
