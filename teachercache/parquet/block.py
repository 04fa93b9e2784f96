"""Block: many records as flat arrays and offsets. Codecs encode it, decoders return it, the stream cuts it up.

A Python object per (token, k) is what made earlier caches slow; here a record is a handful of slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from teachercache.format.record import BoolArray, Float32Array, Int32Array, Record

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """B records with T tokens and R rows in all. A column that was not read is None; offsets then are too."""

    split: str
    source: str
    doc_id: Sequence[str] | None  # [B]
    window: Int32Array | None  # [B]
    start: Int32Array | None  # [B]
    content_key: Sequence[bytes] | None  # [B]
    token_offsets: Int64Array | None  # [B+1]
    input_ids: Int32Array | None  # [T]
    row_offsets: Int64Array | None  # [B+1]
    row_pos: Int32Array | None  # [R]
    topk_ids: Int32Array | None  # [R, K]
    topk_logprobs: Float32Array | None  # [R, K]
    tail_logprob: Float32Array | None  # [R]
    target_logprob: Float32Array | None  # [R]
    loss_mask: BoolArray | None  # [R]
    meta: Mapping[str, Sequence[Any]]  # name -> [B]
    size: int  # B

    def __len__(self) -> int:
        return self.size

    @classmethod
    def from_records(cls, records: Sequence[Record]) -> Block:
        """Join records of one (split, source); copies the arrays once."""
        first = records[0]
        if any((r.split, r.source) != (first.split, first.source) for r in records):
            raise ValueError("a block holds records of one split and one source")
        names = sorted({name for r in records for name in r.meta})
        return cls(
            split=first.split,
            source=first.source,
            doc_id=[r.doc_id for r in records],
            window=np.array([r.window for r in records], dtype=np.int32),
            start=np.array([r.start for r in records], dtype=np.int32),
            content_key=[r.content_key for r in records],
            token_offsets=_offsets([len(r.input_ids) for r in records]),
            input_ids=np.concatenate([r.input_ids for r in records], dtype=np.int32),
            row_offsets=_offsets([len(r.row_pos) for r in records]),
            row_pos=np.concatenate([r.row_pos for r in records], dtype=np.int32),
            topk_ids=np.concatenate([r.topk_ids for r in records], dtype=np.int32),
            topk_logprobs=np.concatenate([r.topk_logprobs for r in records], dtype=np.float32),
            tail_logprob=np.concatenate([r.tail_logprob for r in records], dtype=np.float32),
            target_logprob=np.concatenate([r.target_logprob for r in records], dtype=np.float32),
            loss_mask=np.concatenate([r.loss_mask for r in records], dtype=np.bool_),
            meta={name: [r.meta.get(name) for r in records] for name in names},
            size=len(records),
        )

    def record(self, i: int) -> Record:
        """Return record i as views into the block; columns that were not read are None."""
        tokens = slice(None) if self.token_offsets is None else slice(self.token_offsets[i], self.token_offsets[i + 1])
        rows = slice(None) if self.row_offsets is None else slice(self.row_offsets[i], self.row_offsets[i + 1])

        def cut(array: Any, where: slice) -> Any:
            return None if array is None else array[where]

        def item(array: Any) -> Any:
            return None if array is None else array[i]

        def number(array: Int32Array | None) -> Any:
            return None if array is None else int(array[i])

        return Record(
            doc_id=item(self.doc_id),
            window=number(self.window),
            start=number(self.start),
            split=self.split,
            source=self.source,
            input_ids=cut(self.input_ids, tokens),
            row_pos=cut(self.row_pos, rows),
            topk_ids=cut(self.topk_ids, rows),
            topk_logprobs=cut(self.topk_logprobs, rows),
            tail_logprob=cut(self.tail_logprob, rows),
            target_logprob=cut(self.target_logprob, rows),
            loss_mask=cut(self.loss_mask, rows),
            content_key=item(self.content_key),
            meta={name: values[i] for name, values in self.meta.items() if values[i] is not None},
        )


def _offsets(lengths: Sequence[int]) -> Int64Array:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
