"""Block: many records as flat arrays and offsets. Codecs encode it, decoders return it, the stream cuts it up.

A Python object per (token, k) is what made earlier caches slow; here a record is a handful of slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from teachercache.format.record import BoolArray, Float32Array, Int32Array, Record

Int64Array = npt.NDArray[np.int64]


# Columns with one entry a token or a row, and how an array of them is held.
ROW_DTYPES: Mapping[str, Any] = {
    "row_pos": np.int32, "topk_ids": np.int32, "topk_logprobs": np.float32, "tail_logprob": np.float32,
    "target_logprob": np.float32, "loss_mask": np.bool_,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """B records with T tokens and R rows in all. A column that was not read is None, and so are its offsets."""

    split: str
    source: str
    doc_id: Sequence[str]  # [B]
    window: Int32Array  # [B]
    start: Int32Array  # [B]
    content_key: Sequence[bytes]  # [B]
    token_offsets: Int64Array  # [B+1]
    input_ids: Int32Array  # [T]
    row_offsets: Int64Array  # [B+1]
    row_pos: Int32Array  # [R]
    topk_ids: Int32Array  # [R, K]
    topk_logprobs: Float32Array  # [R, K]
    tail_logprob: Float32Array  # [R]
    target_logprob: Float32Array  # [R]
    loss_mask: BoolArray  # [R]
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
            meta={name: [r.meta.get(name) for r in records] for name in names},
            size=len(records),
            **{
                name: np.concatenate([getattr(r, name) for r in records], dtype=kind)
                for name, kind in ROW_DTYPES.items()
            },
        )

    def record(self, i: int) -> Record:
        """Return record i as views into the block; columns that were not read are None."""

        def item(column: Any) -> Any:
            return None if column is None else column[i]

        def cut(column: Any, offsets: Int64Array) -> Any:
            return None if column is None else column[offsets[i] : offsets[i + 1]]

        return Record(
            doc_id=item(self.doc_id),
            window=None if self.window is None else int(self.window[i]),
            start=None if self.start is None else int(self.start[i]),
            split=self.split,
            source=self.source,
            content_key=item(self.content_key),
            input_ids=cut(self.input_ids, self.token_offsets),
            meta={name: values[i] for name, values in self.meta.items() if values[i] is not None},
            **{name: cut(getattr(self, name), self.row_offsets) for name in ROW_DTYPES},
        )

    def records(self) -> Iterator[Record]:
        """Yield every record; see `record`."""
        return map(self.record, range(self.size))


def _offsets(lengths: Sequence[int]) -> Int64Array:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
