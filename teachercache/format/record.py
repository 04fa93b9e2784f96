"""Record: one document, or one window of a long document, with the teacher's rows; and its invariants.

Shapes: n tokens, r rows (usually r = n), K = top_k. A row at position p is the teacher's distribution of token p+1
given tokens <= p, at temperature 1, over the full vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from teachercache.errors import InvalidRecord
from teachercache.format.layout import NAME

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

TAIL_FLOOR = math.log(2.0**-23)  # below float32's resolution of 1, a tail mass is indistinguishable from none
MASS_SLACK = 1e-3  # sum of the K probabilities may exceed 1 by this much: float16 rounding and nothing else


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Record:
    """One document or window. Arrays are read-only views where they come from a cache; unread columns are None."""

    doc_id: str  # stable id, from the corpus or the text's hash
    window: int = 0  # index of the window within its document
    start: int = 0  # offset of the window's first token in the document, an added BOS not counted
    split: str = "train"
    source: str = "default"
    input_ids: Int32Array  # [n] exactly the tokens that the teacher saw
    row_pos: Int32Array  # [r] indices into input_ids, strictly increasing
    topk_ids: Int32Array  # [r, K] by descending log-probability
    topk_logprobs: Float32Array  # [r, K] natural log, of the full softmax; stored with float16's precision
    tail_logprob: Float32Array  # [r] log of the mass outside the K, before rounding, floored at log 2**-23
    target_logprob: Float32Array  # [r] log-probability of the token that follows; NaN = outside the request
    loss_mask: BoolArray  # [r] about the predicted token; False after the last token
    content_key: bytes = b""  # 16 bytes; the writer computes it
    meta: Mapping[str, Any] = field(default_factory=dict)  # licence, url and the like: str, int, float, bool or None

    def __repr__(self) -> str:
        n, r = (None if array is None else len(array) for array in (self.input_ids, self.row_pos))
        return (
            f"Record({self.doc_id!r}, window={self.window}, split={self.split!r}, source={self.source!r}, "
            f"tokens={n}, rows={r}, meta={dict(self.meta)})"
        )

    def same_as(self, other: Record) -> bool:
        """Return whether both hold equal values in every field (NaN equals NaN)."""
        for name in self.__slots__:
            ours, theirs = getattr(self, name), getattr(other, name)
            if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
                if ours.shape != theirs.shape or not np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f"):
                    return False
            elif isinstance(ours, Mapping) and isinstance(theirs, Mapping):
                if dict(ours) != dict(theirs):
                    return False
            elif type(ours) is not type(theirs) or ours != theirs:
                return False
        return True


def content_key(spec_digest: str, input_ids: Int32Array, row_pos: Int32Array) -> bytes:
    """Return 16 bytes; the same key means the same rows up to the teacher's noise."""
    digest = hashlib.blake2b(digest_size=16, key=spec_digest.encode()[:64])
    digest.update(len(input_ids).to_bytes(8, "little"))
    digest.update(np.ascontiguousarray(input_ids, dtype="<i4").tobytes())
    digest.update(np.ascontiguousarray(row_pos, dtype="<i4").tobytes())
    return digest.digest()


def tail_from_logprobs(topk_logprobs: npt.NDArray[np.floating[Any]]) -> Float32Array:
    """Return float32 [r], the log of the mass outside the K, of log-probabilities [r, K] before rounding."""
    mass = np.exp(topk_logprobs.astype(np.float64)).sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        tail = np.log1p(-np.minimum(mass, 1.0))
    floored: Float32Array = np.maximum(tail, TAIL_FLOOR).astype(np.float32)
    return floored


def round_logprobs(topk_logprobs: npt.NDArray[np.floating[Any]]) -> Float32Array:
    """Round [r, K] to float16 values held in float32: to the nearest, or downward where the nearest would add mass.

    Near -4.6 the half spacing of float16 is 0.002, so a flat row whose K hold all the mass can round up to
    sum p = 1.002, which the invariant forbids. Such a row (sum beyond 1 + 5e-4) is rounded down instead. Both
    roundings are monotone: the order of a row survives.
    """
    exact = np.asarray(topk_logprobs, dtype=np.float32)
    half = exact.astype(np.float16)
    rounded = half.astype(np.float32)
    heavy = np.flatnonzero(np.exp(rounded).sum(axis=-1) > 1.0 + MASS_SLACK / 2)
    if heavy.size:
        below = np.nextafter(half[heavy], np.float16(-np.inf))
        rounded[heavy] = np.where(rounded[heavy] > exact[heavy], below.astype(np.float32), rounded[heavy])
    return rounded


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can hold a string. JSON lets a lone surrogate through (\\ud800), Parquet and hashes do not."""
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def check_record(record: Record, *, vocab_size: int, top_k: int) -> None:
    """Raise InvalidRecord unless every invariant of the format holds. Cost: about 3 microseconds a row at K = 100."""
    doc_id, window = record.doc_id, record.window

    def require(ok: bool | np.bool_, reason: str, message: str) -> None:
        if not ok:
            raise InvalidRecord(reason, message, doc_id=str(doc_id) or "?", window=window)

    require(
        isinstance(doc_id, str) and 0 < len(doc_id) <= 4096, "doc_id", "doc_id must be a string of 1 to 4096 characters"
    )
    require(is_unicode(doc_id), "doc_id", "doc_id holds half a surrogate pair, which is no Unicode text")
    require(NAME.fullmatch(record.split) is not None, "name", f"split {record.split!r} must match {NAME.pattern}")
    require(NAME.fullmatch(record.source) is not None, "name", f"source {record.source!r} must match {NAME.pattern}")
    require(0 <= window < 2**31 and 0 <= record.start < 2**31, "window", "window and start must lie in [0, 2**31)")

    ids, pos = np.asarray(record.input_ids), np.asarray(record.row_pos)
    topk_ids, logprobs = np.asarray(record.topk_ids), np.asarray(record.topk_logprobs)
    tail, target = np.asarray(record.tail_logprob), np.asarray(record.target_logprob)
    mask = np.asarray(record.loss_mask)
    n, r = len(ids), len(pos)
    require(ids.ndim == 1 and n > 0, "empty", "input_ids must hold at least one token")
    require(pos.ndim == 1 and r > 0, "empty", "row_pos must hold at least one position")
    for name, array, shape, kind in (
        ("input_ids", ids, (n,), "i"),
        ("row_pos", pos, (r,), "i"),
        ("topk_ids", topk_ids, (r, top_k), "i"),
        ("topk_logprobs", logprobs, (r, top_k), "f"),
        ("tail_logprob", tail, (r,), "f"),
        ("target_logprob", target, (r,), "f"),
        ("loss_mask", mask, (r,), "b"),
    ):
        require(array.shape == shape, "shape", f"{name} has shape {array.shape}, expected {shape}")
        require(array.dtype.kind == kind, "dtype", f"{name} has dtype {array.dtype}, expected kind {kind!r}")

    require(ids.min() >= 0 and ids.max() < vocab_size, "id_out_of_range", f"an input id lies outside [0, {vocab_size})")
    require(
        topk_ids.min() >= 0 and topk_ids.max() < vocab_size,
        "id_out_of_range",
        f"a top-K id lies outside [0, {vocab_size}): found {int(topk_ids.min())} to {int(topk_ids.max())}",
    )
    require(pos[0] >= 0 and pos[-1] < n, "row_pos", f"row_pos must lie in [0, {n})")
    require(np.all(pos[1:] > pos[:-1]), "row_pos", "row_pos must increase strictly")

    require(not np.isnan(logprobs).any() and not np.isnan(tail).any(), "nan", "a log-probability is NaN")
    require(np.isfinite(logprobs).all() and np.isfinite(tail).all(), "inf", "a log-probability is infinite")
    require(not np.isinf(target).any(), "inf", "a target log-probability is infinite")
    require(np.all(logprobs[:, 1:] <= logprobs[:, :-1]), "unsorted", "topk_logprobs must descend within each row")
    ordered = np.sort(topk_ids, axis=1)
    require(np.all(ordered[:, 1:] != ordered[:, :-1]), "repeated_id", "an id occurs twice in one row")
    mass = np.exp(logprobs.astype(np.float32)).sum(axis=1)
    require(mass.max() <= 1 + MASS_SLACK, "mass_above_one", f"the K probabilities sum to {mass.max():.6f}, above 1.001")
    require(tail.max() <= MASS_SLACK, "mass_above_one", f"tail_logprob is {tail.max():.6f}, above 0")
    require(
        tail.min() >= TAIL_FLOOR - 1e-4,
        "tail_floor",
        f"tail_logprob {tail.min():.3f} is below its floor {TAIL_FLOOR:.3f}",
    )
    total = mass + np.exp(tail)
    # 2 % lets the float16 rounding of a flat row pass (0.2 %) and finds a tail that belongs to another row.
    require(
        abs(total - 1).max() <= 2e-2, "tail_mass", f"K plus tail sum to {total[abs(total - 1).argmax()]:.4f}, not to 1"
    )
    known = target[~np.isnan(target)]
    require(known.size == 0 or known.max() <= MASS_SLACK, "target", "a target log-probability is above 0")
    after_last = pos[-1] == n - 1
    require(
        not (after_last and mask[-1]), "loss_mask", "loss_mask must be False after the last token: nothing follows it"
    )
    require(len(record.content_key) in (0, 16), "content_key", "content_key must be empty or 16 bytes")
