"""Rows from logits in the worker: top-K, log-partition and target while the logits are read once.

`torch.topk` of 100 out of 128,256 float32 logits takes 1.4 µs a row on an H200, where one pass over the row is 0.13 µs,
and vLLM then reads the row three times more (maximum, sum of exponentials, rank of the target). Here:

1. one Triton pass over the row: the maximum of each group of 32 logits, and the log-partition (online, float32);
2. `torch.topk` over the 4,008 group maxima: every one of the K largest logits lies in one of the K groups with the
   largest maxima (a group outside them has K elements at least as large before it);
3. gather those K·32 candidates, `torch.topk` over them.

Exact up to the order among equal logits. The plain twin is `reference_row_top_k`; a test holds them together.
"""

from __future__ import annotations

from typing import Any

import torch

GROUP = 32

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU machine: the groups are then formed by torch
    triton = None


def reference_row_top_k(logits: torch.Tensor, k: int, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids int32 [N, 1+k], logprobs float32 [N, 1+k]) of logits [N, V]; column 0 is target, int [N]."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top = torch.topk(logprobs, k, dim=-1)
    first = target.long()[:, None]
    ids = torch.cat([first, top.indices], dim=1).to(torch.int32)
    return ids, torch.cat([logprobs.gather(1, first), top.values], dim=1)


def row_top_k(logits: torch.Tensor, k: int, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same as reference_row_top_k. Memory beyond the logits: N·(V/32 + 33·k)·4 bytes."""
    values, ids, lse = select(logits, k)
    first = target.long()[:, None]
    values = torch.cat([logits.gather(1, first).float(), values], dim=1) - lse[:, None]
    return torch.cat([first, ids], dim=1).to(torch.int32), values


def select(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the k largest of logits [N, V] (float32 [N, k], descending), their ids (int64 [N, k]), log-partition [N]."""
    vocab = logits.shape[1]
    if k * GROUP * 2 > vocab:
        top = torch.topk(logits.float(), k, dim=-1)
        return top.values, top.indices, torch.logsumexp(logits.float(), dim=-1)
    by_triton = logits.is_cuda and triton is not None
    maxima, lse = (_group_maxima_triton if by_triton else _group_maxima_torch)(logits)
    groups = torch.topk(maxima, k, dim=-1, sorted=False).indices
    candidates = (_gather_triton if by_triton else _gather_torch)(logits, groups)
    top = torch.topk(candidates, k, dim=-1)
    ids = groups.gather(1, top.indices // GROUP) * GROUP + top.indices % GROUP
    return top.values, ids, lse


def _group_maxima_torch(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    n, vocab = logits.shape
    full = torch.nn.functional.pad(logits.float(), (0, -vocab % GROUP), value=float("-inf"))
    return full.view(n, -1, GROUP).amax(dim=-1), torch.logsumexp(logits.float(), dim=-1)


def _gather_torch(logits: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    n, vocab = logits.shape
    index = (groups[:, :, None] * GROUP + torch.arange(GROUP, device=logits.device)).view(n, -1)
    taken = logits.gather(1, index.clamp(max=vocab - 1)).float()
    return taken.masked_fill(index >= vocab, float("-inf"))


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _group_maxima_kernel(  # type: ignore[no-untyped-def]
        logits_ptr, stride, maxima_ptr, lse_ptr, vocab, n_groups, GROUP: tl.constexpr, GROUPS: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        base = logits_ptr + row * stride
        offsets = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        # one running maximum and sum per lane of groups: no reduction across the block until the end
        running = tl.full([GROUPS], float("-inf"), tl.float32)
        total = tl.zeros([GROUPS], tl.float32)
        for start in range(0, vocab, GROUPS * GROUP):
            place = start + offsets
            x = tl.load(base + place, mask=place < vocab, other=float("-inf")).to(tl.float32)
            top = tl.max(x, axis=1)
            group = start // GROUP + tl.arange(0, GROUPS)
            tl.store(maxima_ptr + row * n_groups + group, top, mask=group < n_groups)
            new = tl.maximum(running, top)
            safe = tl.where(new == float("-inf"), 0.0, new)
            total = total * tl.exp(running - safe) + tl.sum(tl.exp(x - safe[:, None]), axis=1)
            running = new
        peak = tl.max(running, axis=0)
        scaled = tl.where(running == float("-inf"), 0.0, total * tl.exp(running - peak))
        tl.store(lse_ptr + row, peak + tl.log(tl.sum(scaled, axis=0)))

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


def _group_maxima_triton(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    n, vocab = logits.shape
    n_groups = -(-vocab // GROUP)
    maxima = torch.empty((n, n_groups), dtype=torch.float32, device=logits.device)
    lse = torch.empty(n, dtype=torch.float32, device=logits.device)
    kernel: Any = _group_maxima_kernel
    kernel[(n,)](logits, logits.stride(0), maxima, lse, vocab, n_groups, GROUP=GROUP, GROUPS=128, num_warps=8)
    return maxima, lse


def _gather_triton(logits: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    n, k = groups.shape
    out = torch.empty((n, k * GROUP), dtype=torch.float32, device=logits.device)
    kernel: Any = _gather_kernel
    kernel[(n,)](
        logits, logits.stride(0), groups, out, logits.shape[1], k, GROUP=GROUP, K=triton.next_power_of_2(k), num_warps=4
    )
    return out
