"""Sampled rows from logits in the worker: threshold and systematic draw while the logits are read once.

What is computed is teachercache/format/sampled.py's definition, for a batch of rows. A float32 cumulative sum over the
vocabulary would move a draw in every hundred rows to a neighbour, so sums are taken in float64:

1. one pass over the row: of each group of 32 logits the maximum, the sum of exp(x - maximum) in float64 and the sum of
   (x - maximum) exp(x - maximum). They give log-partition and entropy. By Triton on a GPU;
2. the n largest logits, ties by id, lie in the n groups with the largest maxima, ties by group: gather these n·32
   candidates, sort n of them, find the threshold. The mass outside them is summed without them, not as 1 - sum;
3. the points u, u+1, ... are looked up in the cumulative sums of the groups, then in the 32 logits of each group that
   was hit.

Tensor-parallel ranks share their candidates and their sums, find the same threshold and the same ranges of points, and
each draws the points that fall into its slice; see pipeline/teachers/vocab_parallel.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pipeline.teachers.topk import GROUP
from teachercache.format.record import TAIL_FLOOR
from teachercache.format.sampled import LEAST_MASS, LOG_ZERO, SLACK
from teachercache.format.spec import SampledRows

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU machine: the sums are then formed by torch
    triton = None


class SampledColumns(NamedTuple):
    """Rows of logits: ids int32 [N, 1+n] and logprobs float32 [N, 1+n], column 0 the target.

    exact int32 [N], tail and entropy float32 [N].
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    exact: torch.Tensor
    tail: torch.Tensor
    entropy: torch.Tensor


class GroupSums(NamedTuple):
    """Of each group of 32 logits: maximum float32 [N, G]; sum of exp(x - maximum) float64, of (x - maximum) times it."""

    peak: torch.Tensor
    mass: torch.Tensor
    slope: torch.Tensor


class Candidates(NamedTuple):
    """The n largest logits by (-x, id): values float32 [N, n] and ids int64 [N, n], and their places among x.

    x float32 [N, g, 32] are the logits of g = min(n, G) groups, groups int64 [N, g].
    """

    values: torch.Tensor
    ids: torch.Tensor
    places: torch.Tensor
    x: torch.Tensor
    groups: torch.Tensor


class Threshold(NamedTuple):
    """Where rows split: exact int64 [N]; the mass outside the exact part, float64 [N]; which entries are drawn, bool [N, n]."""

    exact: torch.Tensor
    mass: torch.Tensor
    drawn: torch.Tensor


def uniforms(key: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return u float64 [N], as teachercache.format.record.key_uniforms does, of int64 keys (their bits) and positions."""

    def shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
        return (z >> bits) & ((1 << (64 - bits)) - 1)  # int64 shifts keep the sign; the bits of a uint64 do not

    z = key + (position.long() + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return shifted(z ^ shifted(z, 31), 11).double() * 2.0**-53


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def reference_sampled_rows(
    logits: torch.Tensor, rows: SampledRows, target: torch.Tensor, u: torch.Tensor
) -> SampledColumns:
    """Return sampled rows of logits [N, V] by sorting them whole, in float64; target int [N], u float64 [N]."""
    x, n = logits.double(), rows.entries
    p = torch.softmax(x, dim=-1)
    order = torch.sort(x + 0.0, dim=-1, descending=True, stable=True).indices
    top = p.gather(1, order)
    split = threshold(top[:, :n], top[:, n:].sum(dim=1), rows)
    weights = p.scatter(1, order[:, :n], torch.where(split.drawn, top[:, :n], 0.0))
    cumulative = weights.cumsum(dim=1)
    found = torch.searchsorted(cumulative, _points(u, cumulative, split), right=True)
    found = torch.minimum(found, _last_positive(weights))
    following = p.gather(1, target.long()[:, None]).log()
    entropy = torch.special.entr(p).sum(dim=1)
    return rows_of(order[:, :n], found, split, top[:, :n].log(), target, following, entropy)


def sampled_rows(logits: torch.Tensor, rows: SampledRows, target: torch.Tensor, u: torch.Tensor) -> SampledColumns:
    """Return the same as reference_sampled_rows. Memory beyond the logits: about N·(V/32)·64 bytes + N·n·1000."""
    sums = group_sums(logits)
    lse, entropy = totals(sums)
    own = top_candidates(logits, sums.peak, rows.entries)
    logprobs = own.values.double() - lse[:, None]
    outside = tail_sums(sums, lse, own, torch.ones_like(own.ids, dtype=torch.bool)).sum(dim=1)
    split = threshold(logprobs.exp(), outside, rows)
    tails = tail_sums(sums, lse, own, ~split.drawn)
    cumulative = tails.cumsum(dim=1)
    points = _points(u, cumulative, split)
    drawn = draw(logits, lse, tails, cumulative, points, own.ids.masked_fill(split.drawn, -1))
    following = logits.gather(1, target.long()[:, None]).double() - lse[:, None]
    return rows_of(own.ids, drawn, split, logprobs, target, following, entropy)


def _points(u: torch.Tensor, cumulative: torch.Tensor, split: Threshold) -> torch.Tensor:
    """Return (u + j) tau for j = 0 ... n-1, float64 [N, n]; those beyond the m that are drawn mean nothing."""
    n = split.drawn.shape[1]
    tau = cumulative[:, -1] / (n - split.exact).clamp(min=1)
    return (u[:, None] + torch.arange(n, device=u.device)) * tau[:, None]


def totals(sums: GroupSums) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-partition and the entropy, float64 [N]."""
    peak = sums.peak.amax(dim=1).double()
    below = torch.where(sums.mass == 0, 0.0, sums.peak.double() - peak[:, None])  # NaN stays NaN
    scale = torch.where(sums.mass == 0, 0.0, below.exp())
    total = (sums.mass * scale).sum(dim=1)
    mean = (scale * (sums.slope + below * sums.mass)).sum(dim=1) / total  # of x - peak
    return peak + total.log(), total.log() - mean


def top_candidates(logits: torch.Tensor, peaks: torch.Tensor, n: int) -> Candidates:
    """Return the n largest of logits [N, V], n <= V, of the maxima of their groups [N, G]."""
    places = torch.arange(peaks.shape[1], device=peaks.device).expand_as(peaks)
    groups = places.gather(1, largest(peaks, min(n, peaks.shape[1]), places))
    index = groups[:, :, None] * GROUP + torch.arange(GROUP, device=logits.device)
    flat = index.view(len(index), -1)
    x = logits.gather(1, flat.clamp(max=logits.shape[1] - 1)).float()
    x = x.masked_fill(flat >= logits.shape[1], float("-inf"))
    best = largest(x, n, flat)
    return Candidates(x.gather(1, best), flat.gather(1, best), best, x.view_as(index), groups)


def largest(values: torch.Tensor, n: int, ids: torch.Tensor) -> torch.Tensor:
    """Return places int64 [N, n] of the n largest values float32 [N, C], ties by the smaller id below 2**31: exactly."""
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0: one zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # as integers, in the order of the floats
    return torch.topk((ordered << 32) | (0x7FFFFFFF - ids), n, dim=1).indices


def tail_sums(sums: GroupSums, lse: torch.Tensor, own: Candidates, kept: torch.Tensor) -> torch.Tensor:
    """Return each group's probability without the kept candidates, bool [N, n]: float64 [N, G].

    The groups of candidates are summed anew: the sum of a group less a kept entry would lose what is small.
    """
    masses = torch.where(sums.mass == 0, 0.0, sums.mass * (sums.peak.double() - lse[:, None]).exp())
    n, width = len(lse), own.groups.shape[1] * GROUP
    out = torch.zeros(n, width, dtype=torch.bool, device=lse.device).scatter(1, own.places, kept)
    p = (own.x.double() - lse[:, None, None]).exp().masked_fill(out.view_as(own.x), 0.0)
    return masses.scatter(1, own.groups, p.sum(dim=2))


def threshold(top: torch.Tensor, rest: torch.Tensor, rows: SampledRows) -> Threshold:
    """Return where rows split, of their n largest probabilities [N, n], descending, and the mass outside these [N]."""
    n = rows.entries
    outside = top.flip(1).cumsum(dim=1).flip(1) + rest[:, None]  # column k: P(k)
    k = torch.arange(n, device=top.device)
    ends = (top * (n - k) <= outside * (1 + SLACK)) & (k >= rows.exact) | (k == n - 1)
    exact = ends.long().argmax(dim=1)
    mass = outside.gather(1, exact[:, None])[:, 0]
    whole = mass < LEAST_MASS
    exact, mass = torch.where(whole, n, exact), torch.where(whole, rest, mass)
    return Threshold(exact, mass, k >= exact[:, None])


def draw(
    logits: torch.Tensor,
    lse: torch.Tensor,
    tails: torch.Tensor,
    cumulative: torch.Tensor,
    points: torch.Tensor,
    kept: torch.Tensor,
) -> torch.Tensor:
    """Return the ids int64 [N, n] at points float64 [N, n] of the cumulative tail; kept ids [N, n] (or -1) are left out.

    tails and cumulative float64 [N, G] are the groups' masses without the kept ids, and their sums.
    """
    hit = torch.minimum(torch.searchsorted(cumulative, points, right=True), _last_positive(tails))
    before = cumulative.gather(1, hit) - tails.gather(1, hit)
    lanes = torch.arange(GROUP, device=logits.device)
    ids = hit[:, :, None] * GROUP + lanes
    flat = ids.view(len(ids), -1)
    x = logits.gather(1, flat.clamp(max=logits.shape[1] - 1)).double().view_as(ids)
    p = (x - lse[:, None, None]).exp().masked_fill(ids >= logits.shape[1], 0.0)
    bits = torch.where(kept[:, None, :] // GROUP == hit[:, :, None], 1 << kept[:, None, :] % GROUP, 0).sum(dim=2)
    p = p.masked_fill((bits[:, :, None] >> lanes & 1).bool(), 0.0)  # bit i: the group's lane i is kept
    inside = p.cumsum(dim=2)
    lane = (inside <= (points - before)[:, :, None]).sum(dim=2)
    lane = torch.minimum(lane, _last_positive(p.view(-1, GROUP)).view_as(lane))
    return ids.gather(2, lane[:, :, None])[:, :, 0]


def _last_positive(weights: torch.Tensor) -> torch.Tensor:
    """Return the last place with a weight above 0, int64 [N, 1] of [N, C]; 0 where there is none."""
    place = torch.arange(weights.shape[1], device=weights.device)
    return torch.where(weights > 0, place, 0).amax(dim=1, keepdim=True)


def rows_of(
    top: torch.Tensor,
    drawn: torch.Tensor,
    split: Threshold,
    logprobs: torch.Tensor,
    target: torch.Tensor,
    following: torch.Tensor,
    entropy: torch.Tensor,
) -> SampledColumns:
    """Return the columns of rows: the exact ones of `top` ids [N, n], then drawn[:, 0], drawn[:, 1], ... of each row."""
    n = top.shape[1]
    place = torch.arange(n, device=top.device) - split.exact[:, None]
    ids = torch.where(split.drawn, drawn.gather(1, place.clamp(min=0)), top)
    weight = split.mass.log() - (n - split.exact).clamp(min=1).double().log()
    values = torch.where(split.drawn, weight[:, None], logprobs.clamp(min=LOG_ZERO))
    return SampledColumns(
        torch.cat([target.long()[:, None], ids], dim=1).to(torch.int32),
        torch.cat([following, values], dim=1).float(),
        split.exact.to(torch.int32),
        split.mass.log().clamp(min=TAIL_FLOOR).float(),
        entropy.float(),
    )


def group_sums(logits: torch.Tensor) -> GroupSums:
    """Return the sums of each group of logits [N, V], by Triton on a GPU; V need not be a multiple of 32."""
    return _sums_triton(logits) if logits.is_cuda and triton is not None else _sums_torch(logits)


def _sums_torch(logits: torch.Tensor) -> GroupSums:
    n, vocab = logits.shape
    x = torch.nn.functional.pad(logits.float(), (0, -vocab % GROUP), value=float("-inf")).view(n, -1, GROUP)
    peak = x.amax(dim=2)
    below = torch.where(torch.isneginf(x), float("-inf"), x.double() - peak.double()[:, :, None])
    mass = below.exp()
    return GroupSums(peak, mass.sum(dim=2), torch.where(mass > 0, below * mass, mass * 0.0).sum(dim=2))


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _sums_kernel(  # type: ignore[no-untyped-def]
        logits_ptr, stride, peak_ptr, mass_ptr, slope_ptr, vocab, n_groups, GROUP: tl.constexpr, GROUPS: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        start = tl.program_id(1) * GROUPS
        group = start + tl.arange(0, GROUPS)
        place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(logits_ptr + row * stride + place, mask=place < vocab, other=float("-inf")).to(tl.float32)
        peak = tl.max(x, axis=1)
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        below = x.to(tl.float64) - safe.to(tl.float64)[:, None]
        mass = tl.exp(below)
        slope = tl.where(x == float("-inf"), mass * 0.0, below * mass)
        inside = group < n_groups
        at = row * n_groups + group
        tl.store(peak_ptr + at, peak, mask=inside)
        tl.store(mass_ptr + at, tl.sum(mass, axis=1), mask=inside)
        tl.store(slope_ptr + at, tl.sum(slope, axis=1), mask=inside)


def _sums_triton(logits: torch.Tensor) -> GroupSums:
    n, vocab = logits.shape
    n_groups = -(-vocab // GROUP)
    peak = torch.empty((n, n_groups), dtype=torch.float32, device=logits.device)
    mass, slope = (torch.empty((n, n_groups), dtype=torch.float64, device=logits.device) for _ in range(2))
    kernel: Any = _sums_kernel
    groups = 64
    kernel[(n, -(-n_groups // groups))](
        logits, logits.stride(0), peak, mass, slope, vocab, n_groups, GROUP=GROUP, GROUPS=groups, num_warps=4
    )
    return GroupSums(peak, mass, slope)
