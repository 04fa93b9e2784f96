"""Top-K of a vocabulary that is split over the ranks of a tensor-parallel teacher, without gathering the logits.

vLLM gathers [N, V] float32 logits on every rank before it takes a top-K: 0.5 MB a token of traffic for 808 bytes of
answer, and then every rank passes over all V. Here each rank takes the top-K, log-partition and entropy of its slice
(shard_top_k), one all-gather moves 2·K + 3 numbers a row, and every rank merges (merge_shards). Exact: the K largest
of V are among the K largest of each slice, and log-partitions add up. Work per rank is that of V / ranks logits, but
for the merge. The plain twins are topk.reference_row_top_k and
sampled_rows.reference_sampled_rows over the whole row; a test holds them together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipeline.teachers.sampled_rows import (
    SampledColumns,
    draw,
    group_sums,
    largest,
    rows_of,
    tail_sums,
    threshold,
    top_candidates,
    totals,
)  # fmt: skip
from pipeline.teachers.topk import TopColumns, merge_entropy, select
from teachercache.format.spec import SampledRows

AllGather = Callable[[torch.Tensor], torch.Tensor]  # [N, C] of each rank → [ranks, N, C]


def splits_evenly(width: int, ranks: int, vocab: int, k: int) -> bool:
    """Return whether slices of `width` logits cover `vocab` in order, each with at least k real ones."""
    return (ranks - 1) * width + k <= vocab <= ranks * width


def shard_top_k(logits: torch.Tensor, k: int, target: torch.Tensor, start: int, below: int) -> torch.Tensor:
    """Return one rank's share of logits [N, v], which are of the ids start … start+v−1: float32 [N, 2k+3].

    Columns: k values of the first `below` logits, k ids (int32 bits in float32 cells, so that one collective carries both),
    log-partition, entropy, and the target's logit, −inf where another rank has it.
    """
    found = select(logits, k, below)
    bits = (found.ids + start).to(torch.int32).view(torch.float32)
    own = _own(logits, target, start)
    return torch.cat([found.values, bits, found.lse[:, None], found.entropy[:, None], own], dim=1)


def _own(logits: torch.Tensor, target: torch.Tensor, start: int) -> torch.Tensor:
    """Return the target's logit float32 [N, 1], −inf where another rank has it."""
    place = target.long() - start
    inside = (place >= 0) & (place < logits.shape[1])
    own = logits.gather(1, place.clamp(0, logits.shape[1] - 1)[:, None]).float()
    return own.masked_fill(~inside[:, None], float("-inf"))


def merge_shards(shards: torch.Tensor, k: int, target: torch.Tensor) -> TopColumns:
    """Return the rows of shard_top_k's [ranks, N, 2k+3], the same on every rank."""
    rows = shards.transpose(0, 1)
    n = rows.shape[0]
    values = rows[:, :, :k].reshape(n, -1)
    ids = rows[:, :, k : 2 * k].reshape(n, -1).view(torch.int32)
    lse, entropy = merge_entropy(shards[:, :, 2 * k], shards[:, :, 2 * k + 1])
    top = torch.topk(values, k, dim=1)
    first = rows[:, :, 2 * k + 2].amax(dim=1, keepdim=True)
    return TopColumns(
        torch.cat([target.to(torch.int32)[:, None], ids.gather(1, top.indices)], dim=1),
        torch.cat([first, top.values], dim=1) - lse[:, None],
        entropy,
    )


def sharded_row_top_k(
    logits: torch.Tensor,
    k: int,
    target: torch.Tensor,
    *,
    rank: int,
    ranks: int,
    vocab: int,
    all_gather: AllGather,
    tokens: int | None = None,
) -> TopColumns | None:
    """Return what reference_row_top_k gives for the whole row, from this rank's slice; the same on every rank.

    logits [N, v], v the same on every rank, columns beyond `vocab` no logits at all; ids at or beyond `tokens` (default:
    vocab) are not taken, but their mass counts. None, on every rank alike and before
    anything is sent, where the slices do not cover the vocabulary as `splits_evenly` wants it.
    """
    width = logits.shape[1]
    tokens = min(vocab, tokens or vocab)
    if not splits_evenly(width, ranks, vocab, k) or not splits_evenly(width, ranks, tokens, k):
        return None
    start = rank * width
    real, below = min(width, vocab - start), min(width, tokens - start)
    return merge_shards(all_gather(shard_top_k(logits[:, :real], k, target, start, below)), k, target)


def sharded_sampled_rows(
    logits: torch.Tensor,
    rows: SampledRows,
    target: torch.Tensor,
    u: torch.Tensor,
    *,
    rank: int,
    ranks: int,
    vocab: int,
    all_gather: AllGather,
) -> SampledColumns | None:
    """Return what reference_sampled_rows gives for the first `vocab` logits of the whole row; the same on every rank.

    Three all-gathers of at most 2n + 4 float64 a row: candidates and sums; the mass outside the n largest; the ids that
    each rank drew. Every rank finds the threshold and the ranks' ranges of points from the same numbers. None as above.
    """
    n, width = rows.entries, logits.shape[1]
    if not splits_evenly(width, ranks, vocab, n):
        return None
    start = rank * width
    logits = logits[:, : min(width, vocab - start)]
    sums = group_sums(logits)
    local_lse, local_entropy = totals(sums)
    own = top_candidates(logits, sums.peak, n)
    share = [own.values, own.ids + start, local_lse[:, None], local_entropy[:, None], _own(logits, target, start)]
    shares = all_gather(torch.cat([column.double() for column in share], dim=1))
    lse, entropy = merge_entropy(shares[:, :, 2 * n], shares[:, :, 2 * n + 1])
    following = shares[:, :, 2 * n + 2].amax(dim=0)[:, None] - lse[:, None]
    values, ids = (shares[:, :, part].transpose(0, 1).reshape(len(lse), -1) for part in (slice(0, n), slice(n, 2 * n)))
    best = largest(values.float(), n, ids.long())
    values, ids = values.gather(1, best), ids.gather(1, best).long()
    owner = ids // width
    top = (values - lse[:, None]).exp()

    def local_tails(kept: torch.Tensor) -> torch.Tensor:
        """Return this rank's group masses without the entries of the whole row's top that are kept, bool [N, n]."""
        mine = torch.where(kept & (owner == rank), ids - start, -1)
        return tail_sums(sums, lse, own, (own.ids[:, :, None] == mine[:, None, :]).any(dim=2))

    outside = all_gather(local_tails(torch.ones_like(ids, dtype=torch.bool)).sum(dim=1)[:, None])[:, :, 0]
    split = threshold(top, outside.sum(dim=0), rows)
    loose = torch.where(split.drawn, top, 0.0)
    mass = torch.stack([outside[r] + torch.where(owner == r, loose, 0.0).sum(dim=1) for r in range(ranks)])
    ends = mass.cumsum(dim=0)
    points = (u[:, None] + torch.arange(n, device=u.device)) * (ends[-1] / (n - split.exact).clamp(min=1))[:, None]
    last = torch.where(mass > 0, torch.arange(ranks, device=u.device)[:, None], 0).amax(dim=0)[:, None]
    where = torch.minimum((points[None] >= ends[:, :, None]).sum(dim=0), last)
    tails = local_tails(~split.drawn)
    kept = torch.where(~split.drawn & (owner == rank), ids - start, -1)
    found = draw(logits, lse, tails, tails.cumsum(dim=1), points - (ends[rank] - mass[rank])[:, None], kept) + start
    drawn = all_gather(found.masked_fill(where != rank, -1)).amax(dim=0)
    return rows_of(ids, drawn, split, values - lse[:, None], target, following, entropy)
