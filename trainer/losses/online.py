"""Online method: a live teacher's logits instead of cached rows. The yardstick for what the cache loses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from teachercache.format.sampled import LEAST_MASS, LOG_ZERO, SLACK
from trainer.losses.fused import default_chunk_size
from trainer.losses.kl import kl_loss
from trainer.losses.options import OPTION_NAMES, LossOptions
from trainer.losses.products import accumulator_dtype
from trainer.losses.row_math import divergence, student_logits
from trainer.losses.rows import TeacherRows


def online_kl_loss(
    hidden: Tensor,
    head_weight: Tensor,
    teacher_logits: Tensor,
    *,
    options: LossOptions | None = None,
    top_k: int = 100,
    valid: Tensor | None = None,
    num_valid: int | float | Tensor | None = None,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
    chunk_size: int | None = None,
    **call: Any,
) -> Tensor:
    """Return the distillation loss against live teacher logits.

    hidden          [N, d]; head_weight [V, d], as in `kl_loss`
    teacher_logits  [N, Vt] float; entries beyond vocab_size are ignored, and Vt >= vocab_size
    options         a LossOptions, or its fields as keywords. tail=None, the default: divergence over the full
                    vocabulary, both sides at `temperature`, times temperature^2. Else: the teacher's own `top_k`
                    entries with that tail, through `kl_loss`, which then takes method, labels, recompute, validate
    valid           [N] bool or None
    returns         scalar float32 (float64 for float64 inputs), in nats, the valid rows' sum / num_valid

    The full-vocabulary form recomputes each chunk's logits in the backward pass: four products, chunk * V * 4 bytes
    of float32 a few times over. Its loss is never below the bucket's: compare methods by held-out values of this one.
    Raises ValueError for disagreeing shapes and for what the tail does not go with.
    """
    overrides = {name: call.pop(name) for name in OPTION_NAMES if name in call}
    options = replace(options or LossOptions(tail=None), **overrides)
    vocab = head_weight.shape[0] if vocab_size is None else vocab_size
    if teacher_logits.dim() != 2 or teacher_logits.shape[0] != hidden.shape[0] or teacher_logits.shape[1] < vocab:
        raise ValueError(
            f"teacher_logits must be [{hidden.shape[0]}, at least {vocab}], found {tuple(teacher_logits.shape)}"
        )
    if teacher_logits.requires_grad:
        raise ValueError("teacher_logits are constants: compute them under torch.no_grad() or detach them")
    teacher_logits = teacher_logits[:, :vocab]
    if options.tail is not None:
        call |= {"num_valid": num_valid, "vocab_size": vocab_size, "bias": bias, "chunk_size": chunk_size}
        rows = TeacherRows.from_logits(teacher_logits, top_k, valid)
        return kl_loss(hidden, head_weight, rows, options=options, **call)
    if call:
        raise ValueError(f"{', '.join(sorted(call))} need tail= with the online loss, found tail=None")
    if chunk_size is None:
        chunk_size = default_chunk_size(len(hidden), hidden.shape[1], vocab, torch.float32, hidden.device)
    total = hidden[:0].sum(dtype=accumulator_dtype(hidden.dtype))
    head, head_bias = head_weight[:vocab], None if bias is None else bias[:vocab]
    for start in range(0, len(hidden), chunk_size):
        part = slice(start, start + chunk_size)
        args = (hidden[part], head, head_bias, teacher_logits[part], None if valid is None else valid[part], options)
        total = total + checkpoint(_chunk_sum, *args, use_reentrant=False)
    if num_valid is None:
        num_valid = len(hidden) if valid is None else valid.sum()
    if isinstance(num_valid, Tensor):
        return torch.where(num_valid > 0, total / num_valid.clamp_min(1), total * 0.0).reshape(())
    return total / num_valid if num_valid else total * 0.0


@torch.no_grad()
def sampled_rows(
    logits: Tensor, entries: int, exact: int, u: Tensor, valid: Tensor | None = None, chunk_size: int = 1024
) -> TeacherRows:
    """Return sampled rows of teacher logits [N, V], as a cache with `rows: {kind: sampled}` holds them.

    exact: the least number of exact entries. u [N] float64 in [0, 1) decides what is drawn.
    The twin of teachercache/format/sampled.py, which says how and why. Computes in float64, chunk_size rows at a time:
    about 40 bytes a logit. Raises ValueError unless 1 <= exact < entries <= V.
    """
    vocab = logits.shape[1]
    if not 1 <= exact < entries <= vocab:
        raise ValueError(f"expected 1 <= exact < entries <= {vocab} logits, found exact {exact}, entries {entries}")
    if chunk_size < len(logits):
        parts = [slice(start, start + chunk_size) for start in range(0, len(logits), chunk_size)]
        found = [sampled_rows(logits[part], entries, exact, u[part]) for part in parts]
        columns = (torch.cat(column) for column in zip(*(_columns(rows) for rows in found), strict=True))
        ids, logprobs, tail, counts, entropy = columns
        return TeacherRows(ids, logprobs, tail, valid, counts, entropy)
    logprobs = logits.double().log_softmax(dim=1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(dim=1)
    # Ties by id, but for those that topk itself decides at the last entry.
    top_ids = probs.topk(entries, dim=1).indices.sort(dim=1).values
    top, order = probs.gather(1, top_ids).sort(dim=1, descending=True, stable=True)
    top_ids = top_ids.gather(1, order)
    outside = probs.scatter(1, top_ids, 0.0).sum(dim=1, keepdim=True)
    after = torch.cat([top, outside], dim=1).flip(1).cumsum(dim=1).flip(1)  # [N, entries + 1]: P(k)
    k = torch.arange(exact, entries, device=logits.device)
    ends = top[:, exact:] * (entries - k) <= after[:, exact:entries] * (1 + SLACK)
    ends[:, -1] = True
    count = exact + ends.byte().argmax(dim=1)
    mass = after.gather(1, count[:, None])
    count = torch.where(mass[:, 0] < LEAST_MASS, entries, count)
    mass = after.gather(1, count[:, None])[:, 0]
    # The tail's cumulative weights over ascending ids; the points u, u + 1, ... hit distinct ones.
    place = torch.arange(entries, device=logits.device).expand_as(top_ids)
    tail = probs.scatter(1, top_ids, torch.where(place < count[:, None], 0.0, top))
    cumulative = tail.cumsum(dim=1)
    draws = (entries - count).clamp_min(1)
    step = cumulative[:, -1] / draws
    points = (u[:, None].to(probs) + (place - count[:, None]).clamp_min(0)) * step[:, None]
    last = torch.where(tail > 0, torch.arange(vocab, device=logits.device), 0).amax(dim=1, keepdim=True)
    drawn = torch.minimum(torch.searchsorted(cumulative, points, right=True), last)
    is_drawn = place >= count[:, None]
    ids = torch.where(is_drawn, drawn, top_ids)
    tail_logprob = mass.log().clamp_min(math.log(LEAST_MASS))
    weight = mass.log() - draws.log()
    kept = torch.where(is_drawn, weight[:, None], top.log().clamp_min(LOG_ZERO))
    dtype = accumulator_dtype(logits.dtype)
    return TeacherRows(ids, kept.to(dtype), tail_logprob.to(dtype), valid, count, entropy.to(dtype))


def _columns(rows: TeacherRows) -> tuple[Tensor, ...]:
    assert rows.exact is not None
    assert rows.entropy is not None
    return rows.topk_ids, rows.topk_logprobs, rows.tail_logprob, rows.exact, rows.entropy


def _chunk_sum(
    hidden: Tensor, head: Tensor, bias: Tensor | None, teacher: Tensor, alive: Tensor | None, options: LossOptions
) -> Tensor:
    """Return the sum of the rows' divergences over the full vocabulary; teacher [n, V] are logits."""
    if alive is not None:
        hidden, teacher = (x.masked_fill(~alive[:, None], 0.0) for x in (hidden, teacher))
    z = student_logits(hidden @ head.t(), bias, options)
    log_s = torch.log_softmax(teacher.to(z.dtype) / options.temperature, dim=1)
    rows = divergence(log_s, z / options.temperature, options)
    if alive is not None:
        rows = torch.where(alive, rows, 0.0)
    return options.temperature**2 * rows.sum()
