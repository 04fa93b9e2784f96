"""Rows from logits in the worker: top-K, log-partition and target while the logits are read once.

`torch.topk` of 100 out of 128,256 float32 logits takes 1.4 µs a row on an H200, where one pass over the row is 0.13 µs,
and vLLM then reads the row three times more (maximum, sum of exponentials, rank of the target). Here:

1. one Triton pass over the row: the maximum of each group of 32 logits, the log-partition and the entropy (online,
   float32);
2. `torch.topk` over the 4,008 group maxima: every one of the K largest logits lies in one of the K groups with the
   largest maxima (a group outside them has K elements at least as large before it);
3. gather those K·32 candidates, `torch.topk` over them.

Exact up to the order among equal logits. The plain twin is `reference_row_top_k`; a test holds them together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

GROUP = 32

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU machine: the groups are then formed by torch
    triton = None


class TopColumns(NamedTuple):
    """Rows of logits: ids int32 [N, 1+k] and logprobs float32 [N, 1+k], column 0 the target; entropy float32 [N]."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    entropy: torch.Tensor


class Selected(NamedTuple):
    """The k largest logits, float32 [N, k], descending; their ids int64 [N, k]; log-partition and entropy [N] of all."""

    values: torch.Tensor
    ids: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor


def reference_row_top_k(logits: torch.Tensor, k: int, target: torch.Tensor, vocab: int | None = None) -> TopColumns:
    """Return the rows of logits [N, V], in float64; target int [N]. Only ids below `vocab` are taken, all mass counts."""
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    top = torch.topk(logprobs[:, :vocab], k, dim=-1)
    first = target.long()[:, None]
    ids = torch.cat([first, top.indices], dim=1).to(torch.int32)
    entropy = torch.special.entr(logprobs.exp()).sum(dim=-1)
    return TopColumns(ids, torch.cat([logprobs.gather(1, first), top.values], dim=1).float(), entropy.float())


def row_top_k(logits: torch.Tensor, k: int, target: torch.Tensor, vocab: int | None = None) -> TopColumns:
    """Return the same as reference_row_top_k. Memory beyond the logits: N·(V/32 + 33·k)·4 bytes."""
    found = select(logits, k, vocab)
    first = target.long()[:, None]
    values = torch.cat([logits.gather(1, first).float(), found.values], dim=1) - found.lse[:, None]
    return TopColumns(torch.cat([first, found.ids], dim=1).to(torch.int32), values, found.entropy)


def merge_entropy(lse: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-partition and entropy [N] of a vocabulary in parts, of those of each part [parts, N]."""
    whole = torch.logsumexp(lse, dim=0)
    mean = torch.where(torch.isneginf(lse), 0.0, (lse - whole).exp() * (lse - entropy))  # of the logits, a part's share
    return whole, whole - mean.sum(dim=0)


def select(logits: torch.Tensor, k: int, vocab: int | None = None) -> Selected:
    """Return the k largest of the first `vocab` (default: all) of logits [N, V], and the sums over all V."""
    if vocab is not None and vocab < logits.shape[1]:
        inside, padding = select(logits[:, :vocab], k), logits[:, vocab:].float()
        rest = torch.logsumexp(padding, dim=1)
        spread = torch.special.entr((padding - rest[:, None]).exp()).sum(dim=1)
        lse, entropy = merge_entropy(torch.stack([inside.lse, rest]), torch.stack([inside.entropy, spread]))
        return Selected(inside.values, inside.ids, lse, entropy)
    vocab = logits.shape[1]
    by_triton = logits.is_cuda and triton is not None
    if k * GROUP * 2 > vocab:
        top = torch.topk(logits.float(), k, dim=-1)
        _, lse, entropy = _group_maxima_torch(logits)
        return Selected(top.values, top.indices, lse, entropy)
    maxima, lse, entropy = (_group_maxima_triton if by_triton else _group_maxima_torch)(logits)
    groups = torch.topk(maxima, k, dim=-1, sorted=False).indices
    candidates = (_gather_triton if by_triton else _gather_torch)(logits, groups)
    top = torch.topk(candidates, k, dim=-1)
    ids = groups.gather(1, top.indices // GROUP) * GROUP + top.indices % GROUP
    return Selected(top.values, ids, lse, entropy)


def _group_maxima_torch(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, vocab = logits.shape
    full = torch.nn.functional.pad(logits.float(), (0, -vocab % GROUP), value=float("-inf"))
    lse = torch.logsumexp(logits.float(), dim=-1)
    entropy = torch.special.entr((logits.float() - lse[:, None]).exp()).sum(dim=-1)
    return full.view(n, -1, GROUP).amax(dim=-1), lse, entropy


def _gather_torch(logits: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    n, vocab = logits.shape
    index = (groups[:, :, None] * GROUP + torch.arange(GROUP, device=logits.device)).view(n, -1)
    taken = logits.gather(1, index.clamp(max=vocab - 1)).float()
    return taken.masked_fill(index >= vocab, float("-inf"))


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _group_maxima_kernel(  # type: ignore[no-untyped-def]
        logits_ptr, stride, maxima_ptr, lse_ptr, entropy_ptr, vocab, n_groups, GROUP: tl.constexpr, GROUPS: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        base = logits_ptr + row * stride
        offsets = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        # one running maximum and sum per lane of groups: no reduction across the block until the end
        running = tl.full([GROUPS], float("-inf"), tl.float32)
        total = tl.zeros([GROUPS], tl.float32)
        slope = tl.zeros([GROUPS], tl.float32)  # the sum of (x - running) exp(x - running)
        for start in range(0, vocab, GROUPS * GROUP):
            place = start + offsets
            x = tl.load(base + place, mask=place < vocab, other=float("-inf")).to(tl.float32)
            top = tl.max(x, axis=1)
            group = start // GROUP + tl.arange(0, GROUPS)
            tl.store(maxima_ptr + row * n_groups + group, top, mask=group < n_groups)
            new = tl.maximum(running, top)
            safe = tl.where(new == float("-inf"), 0.0, new)
            below = x - safe[:, None]
            e = tl.exp(below)
            moved = tl.where(running == float("-inf"), 0.0, running - safe)
            scale = tl.exp(moved)
            slope = scale * (slope + moved * total) + tl.sum(tl.where(x == float("-inf"), 0.0, below * e), axis=1)
            total = total * scale + tl.sum(e, axis=1)
            running = new
        peak = tl.max(running, axis=0)
        moved = tl.where(running == float("-inf"), 0.0, running - peak)
        scale = tl.where(running == float("-inf"), 0.0, tl.exp(moved))
        whole = tl.sum(total * scale, axis=0)
        tl.store(lse_ptr + row, peak + tl.log(whole))
        tl.store(entropy_ptr + row, tl.log(whole) - tl.sum(scale * (slope + moved * total), axis=0) / whole)

    @triton.jit  # type: ignore[untyped-decorator]
    def _gather_kernel(  # type: ignore[no-untyped-def]
        logits_ptr, stride, groups_ptr, out_ptr, vocab, k, GROUP: tl.constexpr, K: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        slot = tl.arange(0, K)
        group = tl.load(groups_ptr + row * k + slot, mask=slot < k, other=0)
        lane = tl.arange(0, GROUP)
        place = group[:, None] * GROUP + lane[None, :]
        wanted = (slot < k)[:, None] & (place < vocab)
        x = tl.load(logits_ptr + row * stride + place, mask=wanted, other=float("-inf")).to(tl.float32)
        tl.store(out_ptr + row * k * GROUP + slot[:, None] * GROUP + lane[None, :], x, mask=(slot < k)[:, None])


def _group_maxima_triton(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, vocab = logits.shape
    n_groups = -(-vocab // GROUP)
    maxima = torch.empty((n, n_groups), dtype=torch.float32, device=logits.device)
    lse, entropy = (torch.empty(n, dtype=torch.float32, device=logits.device) for _ in range(2))
    kernel: Any = _group_maxima_kernel
    kernel[(n,)](logits, logits.stride(0), maxima, lse, entropy, vocab, n_groups, GROUP=GROUP, GROUPS=128, num_warps=8)
    return maxima, lse, entropy


def _gather_triton(logits: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    n, k = groups.shape
    out = torch.empty((n, k * GROUP), dtype=torch.float32, device=logits.device)
    kernel: Any = _gather_kernel
    kernel[(n,)](
        logits, logits.stride(0), groups, out, logits.shape[1], k, GROUP=GROUP, K=triton.next_power_of_2(k), num_warps=4
    )
    return out
