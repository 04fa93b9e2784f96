"""Block: many records as flat arrays and offsets. Codecs encode it, decoders return it, the stream cuts it up.

A Python object per (token, k) is what made earlier caches slow; here a record is a handful of slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from teachercache.format.record import MASS_SLACK, BoolArray, Float32Array, Int32Array, Record, Uint16Array

Int64Array = npt.NDArray[np.int64]


# Columns with one entry a token or a row, and how an array of them is held.
ROW_DTYPES: Mapping[str, Any] = {
    "row_pos": np.int32, "topk_ids": np.int32, "topk_logprobs": np.float32, "tail_logprob": np.float32,
    "target_logprob": np.float32, "loss_mask": np.bool_, "entropy": np.float32, "exact": np.uint16,
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
    entropy: Float32Array  # [R]; NaN where the engine could not say
    exact: Uint16Array | None  # [R]; None in a top-K cache
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
            **{name: _joined(records, name, kind) for name, kind in ROW_DTYPES.items()},
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

    def wrong(self, vocab_size: int) -> tuple[int, str, str] | None:
        """Return (record, reason, message) of the first value that must not reach a batch; None where all is well.

        Ids of tokens and of the top K outside the vocabulary, positions outside their document or out of order,
        log-probabilities that are NaN, infinite or above 0. Columns that were not read are left out. Cost: about 0.05
        microseconds a row at K = 100; `check_record` knows all invariants, and costs 3.
        """
        for name, values, owners in (
            ("input id", self.input_ids, self.token_offsets), ("top-K id", self.topk_ids, self.row_offsets),
        ):  # fmt: skip
            if values is not None and values.size and values.view(np.uint32).max() >= vocab_size:
                i = _first(values.view(np.uint32) >= vocab_size)
                return _owner(owners, i), "id_out_of_range", f"a {name} lies outside [0, {vocab_size})"
        for name, lps in (("topk_logprobs", self.topk_logprobs), ("tail_logprob", self.tail_logprob)):
            if lps is None or not lps.size:
                continue
            low, high = lps.min(), lps.max()  # NaN where any is
            if not (np.isfinite(low) and high <= MASS_SLACK):
                i = _first(~(np.isfinite(lps) & (lps <= MASS_SLACK)))
                return _owner(self.row_offsets, i), "nan", f"{name} holds {lps[i].min()}, which is no log-probability"
        if self.exact is not None and self.exact.size:
            most = 2**16 if self.topk_ids is None else self.topk_ids.shape[1]
            if not 1 <= self.exact.min() <= self.exact.max() <= most:
                i = _first((self.exact < 1) | (self.exact > most))
                return _owner(self.row_offsets, i), "exact", f"exact is {self.exact[i]}, expected 1 to {most}"
        if self.entropy is not None and np.isinf(self.entropy).any():
            return _owner(self.row_offsets, _first(np.isinf(self.entropy))), "inf", "an entropy is infinite"
        return self._wrong_position()

    def _wrong_position(self) -> tuple[int, str, str] | None:
        pos = self.row_pos
        if pos is None or not pos.size or self.row_offsets is None:
            return None
        rises = pos[1:] > pos[:-1]
        starts = self.row_offsets[1:-1]
        rises[starts[(starts > 0) & (starts < len(pos))] - 1] = True  # another document begins
        if not rises.all():
            i = _first(~rises) + 1
            return _owner(self.row_offsets, i), "row_pos", "row_pos must increase strictly"
        if self.token_offsets is not None:
            last = np.repeat(np.diff(self.token_offsets), np.diff(self.row_offsets))
            if pos.min() < 0 or (pos >= last).any():
                i = _first((pos < 0) | (pos >= last))
                return _owner(self.row_offsets, i), "row_pos", f"row_pos must lie in [0, {last[i]})"
        return None

    def records(self) -> Iterator[Record]:
        """Yield every record; see `record`."""
        return map(self.record, range(self.size))


def _first(found: npt.NDArray[np.bool_]) -> int:
    """Return the first row with a true entry, of [N] or [N, K]."""
    return int(np.argmax(found.reshape(len(found), -1).any(axis=1)))


def _owner(offsets: Int64Array, i: int) -> int:
    return int(np.searchsorted(offsets, i, side="right")) - 1


def _joined(records: Sequence[Record], name: str, kind: Any) -> Any:
    """Return one column of all records; None where the cache has none, NaN for an entropy that is not known."""
    columns = [getattr(r, name) for r in records]
    if name == "exact" and columns[0] is None:
        return None
    if name == "entropy":
        columns = [
            np.full(len(r.row_pos), np.nan, kind) if c is None else c for r, c in zip(records, columns, strict=True)
        ]
    return np.concatenate(columns, dtype=kind)


def _offsets(lengths: Sequence[int]) -> Int64Array:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
