"""The compact layout: about two thirds of the open one's bytes, lossy within a bound that is checked row by row.

Ids lose their order and get it back: a row is stored sorted by id, as differences, after the vocabulary was renumbered
by frequency (so that differences are small); with each id goes the *level* of its log-probability. Sorting by
level restores the row's order. Levels are the points of a fixed grid in log-probability, finest at probability 1:

    grid_j[0] = 0,   grid_j[i+1] = grid_j[i] + min(BASE * exp(grid_j[i] / 2), CAP) / 2**j      log p = -grid_j[level]

so that the error of an entry is about BASE/2 * sqrt(p), and the L1 error of a row BASE/2 * sum(sqrt(p)). A row whose
error would exceed MAX_L1 takes the next finer grid j. Rounding errors are carried from each entry to the next smaller
one, within one level, so that the mass of the K stays what it was. The tail is stored exactly.

Bound: sum |p - p'| over the K entries and the tail <= 0.01 for every row, or encoding raises. The largest error of a file
is in its footer as teachercache.compact.max_l1. Entries whose levels are equal come back ordered by frequency.

In a sampled row all this holds for the exact part. A drawn entry costs an id only, in differences behind theirs; its
weight comes back as tail_logprob - log m, without any rounding.
"""

from __future__ import annotations

import base64
import functools
import zlib
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from teachercache.errors import CorruptFile, InvalidRecord
from teachercache.format.record import MASS_SLACK, Float32Array, Int32Array
from teachercache.format.spec import Rows
from teachercache.parquet.block import ROW_DTYPES, Block
from teachercache.parquet.columns import Codec, list_parts, nested, numbers, ragged

MAX_L1 = 0.01
BASE, CAP = 0.004, 0.25
SCALES = 6  # grids; the finest has steps of BASE / 32
LOWEST = 40.0  # nats; smaller probabilities (4e-18) come back as this
FREQUENT = 8192  # ids that are renumbered at most; the others keep their order behind them
OCCURS = 16  # an id that is rarer in the first block would cost more in the footer than its number saves
RESTORED = 2**22  # entries that are restored at the same time
ORDER_KEY = b"teachercache.compact.frequent_ids"
L1_KEY = b"teachercache.compact.max_l1"


class CompactCodec(Codec):
    """Encode and decode the compact layout. One object encodes one file: its first block decides the renumbering."""

    topk_columns = ("topk_id_delta", "topk_level")
    value_types: ClassVar = {"topk_id_delta": pa.int32(), "topk_level": pa.int32()}
    row_types: ClassVar = {"topk_scale": pa.uint8()}

    def __init__(self, rows: Rows, vocab_size: int) -> None:
        super().__init__(rows)
        self.vocab_size = vocab_size
        self.max_l1 = 0.0
        self._frequent: Int32Array | None = None
        self._number: Int32Array | None = None  # id -> number
        self._decoded: tuple[bytes, Int32Array] | None = None

    def encode_topk(self, block: Block) -> dict[str, pa.Array]:
        """Return differences of ids, levels and the grid of each row; InvalidRecord where a row cannot be kept within MAX_L1."""
        if self._number is None:
            self._frequent = frequent_ids(block.topk_ids, self.vocab_size)
            self._number = np.argsort(numbering(self._frequent, self.vocab_size)).astype(np.int32)
        drawn = self._drawn(block.exact, len(block.topk_ids))
        level, scale, error = quantise(np.where(drawn, np.float32(-np.inf), block.topk_logprobs))
        level[drawn] = 0
        worst = float(error.max())
        if worst > MAX_L1:
            raise InvalidRecord(
                "compact_bound", f"a row cannot be kept within an L1 error of {MAX_L1}: {worst:.4f}; use the open codec"
            )
        self.max_l1 = max(self.max_l1, worst)
        number = self._number[block.topk_ids]
        order = np.argsort(np.where(drawn, number + np.int64(self.vocab_size), number), axis=1)
        number, level = np.take_along_axis(number, order, 1), np.take_along_axis(level, order, 1)
        delta = np.diff(number, axis=1, prepend=np.int32(0))
        if block.exact is not None:  # the drawn ids start from 0 again
            delta = np.where(np.arange(self.top_k) == block.exact[:, None], number, delta)
        return {
            "topk_id_delta": nested(delta, block.row_offsets),
            "topk_level": nested(level, block.row_offsets),
            "topk_scale": ragged(pa.array(scale), block.row_offsets),
        }

    def decode_topk(self, table: pa.Table) -> tuple[Any, Any]:
        """Return ids and log-probabilities [R, K] by descending log-probability; both or neither."""
        delta, level = (self.flat_topk(table, name, np.int32) for name in self.topk_columns)
        if delta is None or level is None:
            return None, None
        scale = numbers(list_parts(table, "topk_scale")[1], np.uint8)
        if self.rows.kind == "top_k":
            return self._restore(delta, level, scale, self._order_of(table))
        exact, tail = (numbers(list_parts(table, name)[1], ROW_DTYPES[name]) for name in ("exact", "tail_logprob"))
        if exact.size and not 1 <= exact.min() <= exact.max() <= self.top_k:
            raise ValueError("a stored count of exact entries lies outside its range")
        ids, logprobs = self._restore(delta, level, scale, self._order_of(table), exact)
        weight = tail - np.log(np.maximum(self.top_k - exact.astype(np.float32), 1))
        return ids, np.where(self._drawn(exact, len(ids)), weight[:, None].astype(np.float32), logprobs)

    def physical_columns(self, names: set[str]) -> list[str]:
        """Return the stored columns that the given Record fields need."""
        stored = set(super().physical_columns(names)) - {"topk_ids", "topk_logprobs"}
        if names & {"topk_ids", "topk_logprobs"}:  # each needs the other: the order comes from the levels
            stored |= {"topk_id_delta", "topk_level", "topk_scale"}
            stored |= {"exact", "tail_logprob"} if self.rows.kind == "sampled" else set()
        return sorted(stored)

    def opening_metadata(self) -> dict[str, str]:
        """Return the renumbering, as the footer keeps it; known after the first block."""
        assert self._frequent is not None
        packed = zlib.compress(self._frequent.astype("<i4").tobytes(), 9)
        return {ORDER_KEY.decode(): base64.b64encode(packed).decode()}

    def closing_metadata(self) -> dict[str, str]:
        """Return the largest L1 error of the file, as the footer keeps it."""
        return {L1_KEY.decode(): f"{self.max_l1:.6f}"}

    def _drawn(self, exact: Any, rows: int) -> npt.NDArray[np.bool_]:
        """Return [R, K]: which entries were drawn; none in a top-K row."""
        if exact is None:
            return np.zeros((rows, self.top_k), dtype=np.bool_)
        drawn: npt.NDArray[np.bool_] = np.arange(self.top_k) >= exact[:, None]
        return drawn

    def _restore(
        self, delta: Int32Array, level: Int32Array, scale: npt.NDArray[np.uint8], order: Int32Array, exact: Any = None
    ) -> tuple[Int32Array, Float32Array]:
        """Return ids and log-probabilities [R, K] by descending log-probability, of differences and levels [R, K].

        Behind `exact` [R] entries of a sampled row come drawn ones: their ids ascend, their log-probabilities mean nothing.
        Works on RESTORED entries at a time, so that a large row group needs little more than what it returns.
        """
        if scale.size and scale.max() >= SCALES:
            raise ValueError(f"a stored grid lies outside its range: {scale.max()} of {SCALES}")
        ids, logprobs = np.empty_like(delta), np.empty(delta.shape, dtype=np.float32)
        step = max(1, RESTORED // self.top_k)
        for i in range(0, len(delta), step):
            part = slice(i, i + step)
            ids[part], logprobs[part] = self._restore_part(
                delta[part], level[part], scale[part], order, None if exact is None else exact[part]
            )
        return ids, logprobs

    def _restore_part(
        self, delta: Int32Array, level: Int32Array, scale: npt.NDArray[np.uint8], order: Int32Array, exact: Any
    ) -> tuple[Int32Array, Float32Array]:
        """Restore some rows. Level and number are packed into one integer, so that a single sort does the work."""
        number = np.cumsum(delta, axis=1, dtype=np.int32)
        drawn = self._drawn(exact, len(delta))
        if exact is not None:
            number -= np.where(drawn, np.take_along_axis(number, exact[:, None].astype(np.int64) - 1, axis=1), 0)
        for values, limit in ((delta, len(order)), (number, len(order)), (level, len(_grids()[0]))):
            # Unsigned, so that below 0 is beyond the limit too. Steps within it cannot overflow without being seen.
            if values.size and values.view(np.uint32).max() >= limit:
                raise ValueError("a stored id or level lies outside its range")
        bits = max(1, int(len(order) - 1).bit_length())
        wide = np.int32 if bits + len(_grids()[0]).bit_length() < 31 else np.int64
        key: npt.NDArray[Any] = level.astype(wide)
        key <<= bits
        key |= number
        if exact is not None:  # behind all levels, by id
            key[drawn] = order[number[drawn]].astype(np.int64) | (len(_grids()[0]) << bits)
        key.sort(axis=1)
        number = (key & ((1 << bits) - 1)).astype(np.int32)
        ids = np.where(drawn, number, order[number]) if drawn.any() else order[number]
        level = np.minimum(key >> bits, len(_grids()[0]) - 1)
        coarse = -_grids()[1][0]
        logprobs = coarse[level]
        for j in np.unique(scale[scale > 0]):
            rows = scale == j
            logprobs[rows] = -_grids()[1][j][level[rows]]
        return ids, logprobs

    def _order_of(self, table: pa.Table) -> Int32Array:
        """Return number -> id of the file that a table came from."""
        stored = (table.schema.metadata or {}).get(ORDER_KEY)
        if stored is None:
            if self._frequent is None:
                raise CorruptFile(f"a compact file lacks {ORDER_KEY.decode()} in its footer.")
            return numbering(self._frequent, self.vocab_size)
        if self._decoded is None or self._decoded[0] != stored:
            try:
                data = zlib.decompressobj().decompress(base64.b64decode(stored, validate=True), 4 * FREQUENT + 1)
            except zlib.error as error:
                raise ValueError(f"the renumbering in the footer is damaged: {error}") from error
            if len(data) % 4 or len(data) > 4 * FREQUENT:
                raise ValueError("the renumbering in the footer has a wrong length")
            self._decoded = (stored, numbering(np.frombuffer(data, "<i4").astype(np.int32), self.vocab_size))
        return self._decoded[1]


def frequent_ids(topk_ids: Int32Array, vocab_size: int) -> Int32Array:
    """Return the most frequent ids of a block, most frequent first; at most FREQUENT, each there OCCURS times."""
    counts = np.bincount(topk_ids.reshape(-1), minlength=vocab_size)
    order = np.argsort(-counts, kind="stable")[:FREQUENT]
    return order[counts[order] >= OCCURS].astype(np.int32)


def numbering(frequent: Int32Array, vocab_size: int) -> Int32Array:
    """Return number -> id: the frequent ids first, then all others in their order."""
    if frequent.size and (
        frequent.min() < 0 or frequent.max() >= vocab_size or len(np.unique(frequent)) != len(frequent)
    ):
        raise ValueError("the renumbering in the footer is not one of this vocabulary")
    rest = np.ones(vocab_size, dtype=bool)
    rest[frequent] = False
    return np.concatenate([frequent, np.flatnonzero(rest).astype(np.int32)])


@functools.cache
def _grids() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float32]]:
    """Return the points of the finest grid, for its length, and all grids [SCALES, levels], padded by their last point."""
    grids = []
    for j in range(SCALES):
        points = [0.0]
        while points[-1] < LOWEST:
            points.append(points[-1] + min(BASE * float(np.exp(points[-1] / 2)), CAP) / 2**j)
        grids.append(np.array(points))
    longest = max(len(g) for g in grids)
    table = np.stack([np.pad(g, (0, longest - len(g)), mode="edge") for g in grids]).astype(np.float32)
    return grids[-1], table


def grid(j: int) -> npt.NDArray[np.float64]:
    """Return the points of grid j, as -log p, ascending."""
    table: npt.NDArray[np.float64] = _grids()[1][j].astype(np.float64)
    return table[: int(np.argmax(table)) + 1]


def quantise(topk_logprobs: Float32Array) -> tuple[Int32Array, npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
    """Return levels [R, K], the grid of each row [R] and its L1 error [R], of log-probabilities [R, K].

    A row that was read from a compact file keeps its levels: a second rounding would add another MAX_L1. What the first
    one moved is not known any more, so the bound takes the place of its error.
    """
    level = np.zeros(topk_logprobs.shape, dtype=np.int32)
    scale = np.zeros(len(topk_logprobs), dtype=np.uint8)
    error = np.full(len(topk_logprobs), np.inf)
    for j in range(SCALES):
        rows = np.flatnonzero(np.isinf(error))
        rows = rows[_on_grid(grid(j), topk_logprobs[rows, :4])]  # most rows of a teacher end here
        rows = rows[_on_grid(grid(j), topk_logprobs[rows])]
        level[rows], scale[rows], error[rows] = _nearest(grid(j), topk_logprobs[rows]), j, MAX_L1
    rows = np.flatnonzero(np.isinf(error))
    for j in range(SCALES):
        level[rows], error[rows] = _quantise_on(grid(j), topk_logprobs[rows])
        scale[rows] = j
        rows = rows[error[rows] > MAX_L1]
        if not rows.size:
            break
    return level, scale, error


def _nearest(grid: npt.NDArray[np.float64], logprobs: Float32Array) -> Int32Array:
    return np.searchsorted((grid[1:] + grid[:-1]) / 2, -logprobs.astype(np.float64)).astype(np.int32)


def _on_grid(grid: npt.NDArray[np.float64], logprobs: Float32Array) -> npt.NDArray[np.bool_]:
    """Return [R]: rows whose every entry is a point, or a point that the open codec rounded to float16."""
    point = (-grid).astype(np.float32)[_nearest(grid, logprobs)]
    on_grid: npt.NDArray[np.bool_] = np.all((logprobs == point) | (logprobs == point.astype(np.float16)), axis=1)
    return on_grid


def _quantise_on(grid: npt.NDArray[np.float64], logprobs: Float32Array) -> tuple[Int32Array, npt.NDArray[np.float64]]:
    """Return the nearest points, each moved by at most one level so that the errors of a row cancel."""
    middle = (grid[1:] + grid[:-1]) / 2
    probability = np.exp(logprobs.astype(np.float64))
    point = np.exp(-grid)
    level = _nearest(grid, logprobs)
    carry = np.zeros(len(level))
    for k in range(level.shape[1]):
        wanted = np.maximum(probability[:, k] + carry, 1e-30)
        moved = np.searchsorted(middle, -np.log(wanted))
        level[:, k] = np.clip(moved, level[:, k] - 1, level[:, k] + 1)
        carry = probability[:, k] + carry - point[level[:, k]]
    # The error of a nearly certain token has no smaller entry to go to.
    heavy = np.flatnonzero(point[level].sum(1) > 1 + MASS_SLACK / 2)
    level[heavy, 0] += 1
    return level, np.abs(point[level] - probability).sum(1)
