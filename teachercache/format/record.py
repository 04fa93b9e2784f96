"""Record: one document, or one window of a long document, with the teacher's rows; and its invariants.

Shapes: n tokens, r rows (usually r = n), K = spec.rows.entries. A row at position p is the teacher's distribution of token p+1
given tokens <= p, at temperature 1, over the full vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from teachercache.errors import InvalidRecord
from teachercache.format.layout import NAME
from teachercache.format.spec import CacheSpec, SampledRows

Int32Array = npt.NDArray[np.int32]
Uint16Array = npt.NDArray[np.uint16]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

TAIL_FLOOR = math.log(2.0**-23)  # below float32's resolution of 1, a tail mass is indistinguishable from none
MASS_SLACK = 1e-3  # sum of the K probabilities may exceed 1 by this much: float16 rounding and nothing else
WEIGHTS_SLACK = 1.5e-2  # weights of a sampled row sum to 1 but for rounding: float16's (0.4 %), or the compact codec's
WEIGHT_ERROR = 1e-2  # nats between the stored log tau and tail_logprob - log m: half of float16's spacing at -24
ENTROPY_SLACK = 0.2  # nats by which rounding moves the bounds that the entries put on the entropy


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
    topk_ids: Int32Array  # [r, K] by descending log-probability; behind `exact` of a sampled row: drawn, ascending
    topk_logprobs: Float32Array  # [r, K] natural log, of the full softmax; stored with float16's precision
    tail_logprob: Float32Array  # [r] log of the mass outside the K (or `exact`), before rounding, floored at log 2**-23
    target_logprob: Float32Array  # [r] of the token that follows, with float16's precision; NaN = outside the request
    loss_mask: BoolArray  # [r] about the predicted token; False after the last token
    entropy: Float32Array | None = None  # [r] the teacher's -sum p log p in nats; NaN where the engine cannot say
    exact: Uint16Array | None = None  # [r] entries of a sampled row that are not drawn; None in a top-K cache
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


def row_key(spec_digest: str, content_key: bytes) -> int:
    """Return the 64-bit key of a record's random numbers."""
    digest = hashlib.blake2b(content_key, digest_size=8, key=spec_digest.encode()[:64])
    return int.from_bytes(digest.digest(), "little")


def key_uniforms(key: int, row_pos: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float64]:
    """Return u float64 [r] in [0, 1): splitmix64's output at counter row_pos + 1 from `key`, its upper 53 bits."""
    counter = np.asarray(row_pos).astype(np.uint64) + np.uint64(1)
    z = np.uint64(key) + counter * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits: npt.NDArray[np.uint64] = (z ^ (z >> np.uint64(31))) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def row_uniforms(
    spec_digest: str, content_key: bytes, row_pos: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.float64]:
    """Return the u of each sampled row: float64 [r], a keyed hash, so that any attempt and engine draws the same."""
    return key_uniforms(row_key(spec_digest, content_key), row_pos)


def tail_from_logprobs(topk_logprobs: npt.NDArray[np.floating[Any]]) -> Float32Array:
    """Return float32 [r], the log of the mass outside the K, of log-probabilities [r, K] before rounding."""
    mass = np.exp(topk_logprobs.astype(np.float64)).sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        tail = np.log1p(-np.minimum(mass, 1.0))
    floored: Float32Array = np.maximum(tail, TAIL_FLOOR).astype(np.float32)
    return floored


def as_float16(values: npt.NDArray[np.floating[Any]]) -> Float32Array:
    """Return float32 values rounded to the nearest float16 value; NaN stays NaN."""
    return values.astype(np.float16).astype(np.float32)


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


def check_record(record: Record, spec: CacheSpec) -> None:
    """Raise InvalidRecord unless every invariant of the format holds. Cost: about 3 microseconds a row at K = 100."""
    doc_id, window = record.doc_id, record.window
    vocab_size, top_k = spec.tokenizer.vocab_size, spec.rows.entries

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
        f"an id of a row lies outside [0, {vocab_size}): found {int(topk_ids.min())} to {int(topk_ids.max())}",
    )
    require(pos[0] >= 0 and pos[-1] < n, "row_pos", f"row_pos must lie in [0, {n})")
    require(np.all(pos[1:] > pos[:-1]), "row_pos", "row_pos must increase strictly")

    require(not np.isnan(logprobs).any() and not np.isnan(tail).any(), "nan", "a log-probability is NaN")
    require(np.isfinite(logprobs).all() and np.isfinite(tail).all(), "inf", "a log-probability is infinite")
    require(not np.isinf(target).any(), "inf", "a target log-probability is infinite")
    ordered = np.sort(topk_ids, axis=1)
    require(np.all(ordered[:, 1:] != ordered[:, :-1]), "repeated_id", "an id occurs twice in one row")
    require(tail.max() <= MASS_SLACK, "mass_above_one", f"tail_logprob is {tail.max():.6f}, above 0")
    require(
        tail.min() >= TAIL_FLOOR - 1e-4,
        "tail_floor",
        f"tail_logprob {tail.min():.3f} is below its floor {TAIL_FLOOR:.3f}",
    )
    p, rest = np.exp(logprobs.astype(np.float32)), np.exp(tail)
    if isinstance(spec.rows, SampledRows):
        drawn = _check_sampled(record, spec.rows, p, rest, require)
    else:
        drawn = np.zeros(logprobs.shape, dtype=np.bool_)
        require(record.exact is None, "exact", "a record of a top-K cache has no column `exact`")
        require(np.all(logprobs[:, 1:] <= logprobs[:, :-1]), "unsorted", "topk_logprobs must descend within each row")
        mass = p.sum(axis=1)
        require(
            mass.max() <= 1 + MASS_SLACK, "mass_above_one", f"the K probabilities sum to {mass.max():.6f}, above 1.001"
        )
        # 2 % lets the float16 rounding of a flat row pass (0.2 %) and finds a tail that belongs to another row.
        off = abs(mass + rest - 1)
        require(off.max() <= 2e-2, "tail_mass", f"K plus tail sum to {(mass + rest)[off.argmax()]:.4f}, not to 1")
    if record.entropy is not None:
        _check_entropy(np.asarray(record.entropy), spec, np.where(drawn, 0, p * logprobs).sum(axis=1), tail, require)
    known = target[~np.isnan(target)]
    require(known.size == 0 or known.max() <= MASS_SLACK, "target", "a target log-probability is above 0")
    after_last = pos[-1] == n - 1
    require(
        not (after_last and mask[-1]), "loss_mask", "loss_mask must be False after the last token: nothing follows it"
    )
    require(len(record.content_key) in (0, 16), "content_key", "content_key must be empty or 16 bytes")


Require = Callable[[bool | np.bool_, str, str], None]


def _check_sampled(
    record: Record, rows: SampledRows, p: Float32Array, rest: Float32Array, require: Require
) -> BoolArray:
    """Check what a sampled row has beyond a top-K row; p [r, n] are the weights. Return which entries are drawn [r, n]."""
    topk_ids, logprobs, n = np.asarray(record.topk_ids), np.asarray(record.topk_logprobs), rows.entries
    require(record.exact is not None, "exact", "a record of a sampled cache needs the column `exact`")
    require(record.entropy is not None, "entropy", "a record of a sampled cache needs the column `entropy`")
    exact = np.asarray(record.exact)
    require(exact.shape == (len(p),), "shape", f"exact has shape {exact.shape}, expected {(len(p),)}")
    require(np.issubdtype(exact.dtype, np.integer), "dtype", f"exact has dtype {exact.dtype}, expected an integer")
    least = f"exact must lie in [{rows.exact}, {n}], found {exact.min()} to {exact.max()}"
    require(exact.min() >= rows.exact and exact.max() <= n, "exact", least)
    drawn: BoolArray = np.arange(n) >= exact[:, None]
    pair = drawn[:, 1:] & drawn[:, :-1]  # both drawn; ~drawn[:, 1:]: both exact
    descends = drawn[:, 1:] | (logprobs[:, 1:] <= logprobs[:, :-1])
    require(np.all(descends), "unsorted", "topk_logprobs must descend within the exact part of each row")
    ascends = ~pair | (topk_ids[:, 1:] > topk_ids[:, :-1])
    require(np.all(ascends), "unsorted", "the drawn ids of a row must ascend")
    equal = ~pair | (logprobs[:, 1:] == logprobs[:, :-1])
    require(np.all(equal), "weights", "the drawn entries of a row must have one weight")
    sampled = exact < n
    if sampled.any():
        expected = np.log(rest[sampled]) - np.log(n - exact[sampled])
        error = abs(logprobs[sampled, -1] - expected).max()
        require(error <= WEIGHT_ERROR, "weights", f"a drawn weight is {error:.4f} nats off tail_logprob - log m")
    total = p.sum(axis=1)
    off = abs(total - 1).max()
    require(off <= WEIGHTS_SLACK, "weights", f"the weights of a row sum to 1 ± {off:.4f}, not to 1")
    return drawn


def _check_entropy(
    entropy: Float32Array, spec: CacheSpec, partial: Float32Array, tail: Float32Array, require: Require
) -> None:
    """Check entropy [r] against what the entries leave possible; partial [r] is their Σ p log p."""
    require(entropy.shape == tail.shape, "shape", f"entropy has shape {entropy.shape}, expected {tail.shape}")
    require(np.issubdtype(entropy.dtype, np.floating), "dtype", f"entropy has dtype {entropy.dtype}, expected kind 'f'")
    require(not np.isinf(entropy).any(), "inf", "an entropy is infinite")
    known = ~np.isnan(entropy)
    require(spec.rows.kind == "top_k" or bool(known.all()), "nan", "an entropy is NaN")
    rest = np.exp(tail)
    low = -partial - rest * tail  # the tail is one outcome; at most it is spread over twice the vocabulary
    high = low + rest * math.log(2 * spec.tokenizer.vocab_size)
    inside = (entropy >= low - ENTROPY_SLACK) & (entropy <= high + ENTROPY_SLACK)
    require(np.all(inside | ~known), "entropy", "an entropy cannot be that of its row")
