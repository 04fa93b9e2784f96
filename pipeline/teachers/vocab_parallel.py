"""Top-K of a vocabulary that is split over the ranks of a tensor-parallel teacher, without gathering the logits.

vLLM gathers [N, V] float32 logits on every rank before it takes a top-K: 0.5 MB a token of traffic for 808 bytes of
answer, and then every rank passes over all V. Here each rank takes the top-K and the log-partition of its slice
(shard_top_k), one all-gather moves 2·K + 2 numbers a row, and every rank merges (merge_shards). Exact: the K largest
of V are among the K largest of each slice, and log-partitions add up. Work per rank is that of V / ranks logits, but
for the merge. The plain twin is topk.reference_row_top_k over the whole row; a test holds them together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipeline.teachers.topk import select

AllGather = Callable[[torch.Tensor], torch.Tensor]  # [N, C] of each rank → [ranks, N, C]


def splits_evenly(width: int, ranks: int, vocab: int, k: int) -> bool:
    """Return whether slices of `width` logits cover `vocab` in order, each with at least k real ones."""
    return (ranks - 1) * width + k <= vocab <= ranks * width


def shard_top_k(logits: torch.Tensor, k: int, target: torch.Tensor, start: int) -> torch.Tensor:
    """Return one rank's share of logits [N, v], which are of the ids start … start+v−1: float32 [N, 2k+2].

    Columns: k values, k ids (int32 bits in float32 cells, so that one collective carries both), log-partition, and the
    target's logit, −inf where another rank has it.
    """
    values, ids, lse = select(logits, k)
    place = target.long() - start
    inside = (place >= 0) & (place < logits.shape[1])
    own = logits.gather(1, place.clamp(0, logits.shape[1] - 1)[:, None]).float()
    own = own.masked_fill(~inside[:, None], float("-inf"))
    bits = (ids + start).to(torch.int32).view(torch.float32)
    return torch.cat([values, bits, lse[:, None], own], dim=1)


def merge_shards(shards: torch.Tensor, k: int, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids int32 [N, 1+k], logprobs float32 [N, 1+k]), column 0 the target, of shard_top_k's [ranks, N, 2k+2]."""
    rows = shards.transpose(0, 1)
    n = rows.shape[0]
    values = rows[:, :, :k].reshape(n, -1)
    ids = rows[:, :, k : 2 * k].reshape(n, -1).view(torch.int32)
    lse = torch.logsumexp(rows[:, :, 2 * k], dim=1, keepdim=True)
    top = torch.topk(values, k, dim=1)
    first = rows[:, :, 2 * k + 1].amax(dim=1, keepdim=True)
    return (
        torch.cat([target.to(torch.int32)[:, None], ids.gather(1, top.indices)], dim=1),
        torch.cat([first, top.values], dim=1) - lse,
    )


def sharded_row_top_k(
    logits: torch.Tensor, k: int, target: torch.Tensor, *, rank: int, ranks: int, vocab: int, all_gather: AllGather
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what reference_row_top_k gives for the whole row, from this rank's slice; the same on every rank.

    logits [N, v], v the same on every rank, columns beyond `vocab` padding. None, on every rank alike and before
    anything is sent, where the slices do not cover the vocabulary as `splits_evenly` wants it.
    """
    width = logits.shape[1]
    if not splits_evenly(width, ranks, vocab, k):
        return None
    start = rank * width
    real = min(width, vocab - start)
    return merge_shards(all_gather(shard_top_k(logits[:, :real], k, target, start)), k, target)
