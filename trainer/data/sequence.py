"""One packed sequence: whole documents, one after the other, and their teacher rows, as torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from teachercache import Record

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
        """R: the teacher rows of the sequence."""
        return self.row_index.numel()

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


def pack_records(records: Sequence[Record], *, pad_to: int | None = None, tokens_done: int = 0) -> PackedSequence:
    """Lay whole records one after the other, longest first; only rows that the loss mask allows are kept.

    Raises ValueError when they are longer than pad_to tokens.
    """
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
    kept = [record.loss_mask.astype(bool) for record in records]
    positions = [record.row_pos[keep] for record, keep in zip(records, kept, strict=True)]
    following = [np.append(record.input_ids[1:], NO_LABEL) for record in records]

    def joined(parts: Iterable[Any], dtype: Any) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(list(parts)).astype(dtype))

    def rows(name: str, dtype: Any) -> torch.Tensor:
        return joined((getattr(record, name)[keep] for record, keep in zip(records, kept, strict=True)), dtype)

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
    )


def cut_record(record: Record, length: int) -> Record:
    """Return the first `length` tokens of a record, with the rows that lie inside."""
    keep = record.row_pos < length
    per_row = ("row_pos", "topk_ids", "topk_logprobs", "tail_logprob", "target_logprob", "loss_mask")
    rows: dict[str, Any] = {name: getattr(record, name)[keep] for name in per_row}
    return replace(record, input_ids=record.input_ids[:length], **rows)
