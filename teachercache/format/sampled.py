"""Sampled rows: an unbiased estimate of a whole distribution from n entries. Pure numpy, float64: the reference.

Sort p descending, ties by id, and let P(k) be the mass outside the first k. The first k ids are kept with their own
probability, k the first from k_min on with p_(k+1) <= P(k) / (n - k). Each other id is drawn with probability p / tau,
tau = P(k) / (n - k), and then counts tau. The draws are systematic: the points u, u+1, ... of the cumulative p / tau
over the ids in ascending order. No step is above 1, so the n - k ids are distinct, and exactly n - k are drawn.

E p^ = p, since P[drawn] * tau = p. The weights sum to 1. Var p^_v = p_v (tau - p_v) for a drawn id, and their sum,
P(k)^2 / (n - k) - sum of p^2 over the tail, is the least that n entries allow.

The engines draw by pipeline/teachers/sampled_rows.py, which a test holds to this module.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from teachercache.format.record import TAIL_FLOOR, Float32Array, Int32Array

Float64Array = npt.NDArray[np.float64]

LEAST_MASS = 2.0**-23  # of a tail worth drawing from: float32's resolution of 1
LOG_ZERO = -128.0  # stored for an entry whose probability is 0, or below it: exact in float16, exp is 0 in float32
SLACK = 1e-12  # of the comparison that ends the exact part, so that rounding does not decide a tie


class SampledRow(NamedTuple):
    """Rows for S values of u: the exact part is the same for all.

    ids int32 [S, n]; logprobs float32 [n], natural logs of the weights; exact of the n are not drawn; tail is the log of
    the mass outside these, floored at log 2**-23.
    """

    ids: Int32Array
    logprobs: Float32Array
    exact: int
    tail: np.float32


def sample_row(
    ids: npt.NDArray[np.integer[Any]], probs: npt.NDArray[np.floating[Any]], n: int, exact: int, u: float | Float64Array
) -> SampledRow:
    """Return n weighted ids of a distribution: ids int [s], distinct, and their probabilities [s], which sum to 1.

    u: uniform in [0, 1), one number or many. exact: k_min. ValueError unless 1 <= exact < n <= s.
    The ids not given have probability 0: a sparse p^ is thinned by the same call. Cost: a sort of s.
    """
    if not 1 <= exact < n <= len(ids):
        raise ValueError(f"expected 1 <= exact < n <= {len(ids)} ids, found exact {exact}, n {n}")
    points = np.atleast_1d(np.asarray(u, dtype=np.float64))
    p = np.asarray(probs, dtype=np.float64)
    order = np.lexsort((ids, -p))
    k, mass = exact_part(p[order[:n]], float(p[order[n:]].sum()), n, exact)
    first, rest = order[:k], order[k:]
    kept = np.broadcast_to(np.asarray(ids)[first], (len(points), k))
    with np.errstate(divide="ignore"):
        logprobs = np.maximum(np.log(p[first]), LOG_ZERO)
    if k < n:
        rest = rest[np.argsort(np.asarray(ids)[rest])]
        drawn = np.asarray(ids)[rest][systematic(p[rest], n - k, points)]
        kept = np.concatenate([kept, drawn], axis=1)
        logprobs = np.concatenate([logprobs, np.full(n - k, np.log(mass) - np.log(n - k))])
    tail = np.float32(max(np.log(mass), TAIL_FLOOR)) if mass > 0 else np.float32(TAIL_FLOOR)
    return SampledRow(kept.astype(np.int32), logprobs.astype(np.float32), k, tail)


def row_weights(
    logprobs: npt.NDArray[np.floating[Any]], tail: npt.NDArray[np.floating[Any]], exact: npt.NDArray[np.integer[Any]]
) -> Float64Array:
    """Return the weights [r, n] of stored sampled rows; each row sums to 1.

    A drawn entry's comes from the tail, which float16 did not round; the exact ones are scaled to what is left.
    """
    n, count = logprobs.shape[1], exact.astype(np.int64)
    is_exact = np.arange(n) < count[:, None]
    drawn_mass = np.where(count < n, np.exp(tail.astype(np.float64)), 0.0)
    weights = np.where(is_exact, np.exp(logprobs.astype(np.float64)), 0.0)
    weights *= ((1 - drawn_mass) / weights.sum(axis=1))[:, None]
    weights += np.where(is_exact, 0.0, (drawn_mass / np.maximum(n - count, 1))[:, None])
    return weights


def exact_part(top: Float64Array, rest: float, n: int, exact: int) -> tuple[int, float]:
    """Return how many entries are exact, and the mass outside them.

    top: the n largest probabilities, descending; rest: the mass outside these n.
    """
    mass = np.append(np.cumsum(top[::-1])[::-1] + rest, rest)  # mass[k] = P(k), summed from the small end
    k = next(k for k in range(exact, n) if k == n - 1 or top[k] * (n - k) <= mass[k] * (1 + SLACK))
    return (n, float(mass[n])) if mass[k] < LEAST_MASS else (k, float(mass[k]))


def systematic(weights: Float64Array, count: int, u: Float64Array) -> npt.NDArray[np.intp]:
    """Return indices [S, count] into weights, ascending, of the points u, u+1, ... of the cumulative weights [t].

    The weights are scaled to sum to `count`; none may then exceed 1. Weights of 0 are never drawn.
    """
    cumulative = np.cumsum(weights)
    points = (u[:, None] + np.arange(count)) * (cumulative[-1] / count)
    found = np.searchsorted(cumulative, points, side="right")
    last = int(np.flatnonzero(weights)[-1])  # the largest u may round up to the end
    drawn: npt.NDArray[np.intp] = np.minimum(found, last)
    return drawn
