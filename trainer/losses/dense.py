"""Dense method: the cached rows scattered to a full [N, V] grid, as if the teacher's distribution were known.

The most memory and the plainest code: elementwise formulas over the vocabulary, no chunk, no gather.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.losses.options import LossOptions
from trainer.losses.row_math import divergence, mixed, student_logits
from trainer.losses.rows import TeacherRows

IMPOSSIBLE = -1e30
"""The logarithm of an outcome that is none: its exponential is 0, and 0 times it is no NaN."""


def dense_losses(
    raw_logits: Tensor, bias: Tensor | None, rows: TeacherRows, labels: Tensor | None, options: LossOptions
) -> Tensor:
    """Return the loss [N] of each row of raw logits [N, V], differentiable; invalid rows give 0.

    Memory: about six [N, V] grids, four of them float32, until the backward pass.
    """
    t = options.temperature
    has_tail = options.tail == "bucket" and rows.top_k < raw_logits.shape[1]
    z = student_logits(raw_logits, bias, options)

    with torch.no_grad():
        rows = rows.prepared(z.dtype)
        ids, log_s_tail = rows.topk_ids, rows.tail_logprob / t
        cached = torch.zeros_like(z, dtype=torch.bool).scatter_(1, ids, True)  # [N, V]
        log_s = torch.full_like(z, -math.inf).scatter_(1, ids, rows.topk_logprobs / t)  # [N, V]
        if options.tail not in ("none", "sampled"):
            total = torch.logsumexp(log_s, dim=1)
            total = torch.logaddexp(total, log_s_tail) if has_tail else total
            log_s, log_s_tail = log_s.sub_(total[:, None]), log_s_tail - total
        s, s_tail = log_s.exp(), log_s_tail.exp() * has_tail
        log_s.masked_fill_(~cached, IMPOSSIBLE)
        log_s_tail = log_s_tail if has_tail else torch.full_like(log_s_tail, IMPOSSIBLE)

    # The student's outcomes are the cached ids and, with a tail, the logsumexp of what is outside them.
    scaled = z if t == 1.0 else z / t
    if has_tail:
        outside = torch.logsumexp(z.masked_fill(cached, -math.inf), dim=1) / t
        on_cached = scaled.masked_fill(~cached, IMPOSSIBLE)
        lse_r = torch.logaddexp(torch.logsumexp(on_cached, dim=1), outside)
    else:
        on_cached, outside = scaled, torch.full_like(log_s_tail, IMPOSSIBLE)
        lse_r = torch.logsumexp(scaled, dim=1)

    if options.effective_divergence == "forward":  # without a grid of log r
        kd = (s * log_s).sum(dim=1) - (s * scaled).sum(dim=1) + s.sum(dim=1) * lse_r
        kd = kd + (s_tail * (log_s_tail - (outside - lse_r)) if has_tail else 0.0)
    else:
        log_s = torch.cat([log_s, log_s_tail[:, None]], dim=1)
        kd = divergence(log_s, torch.cat([on_cached, outside[:, None]], dim=1), options)

    lse = z_label = None
    if options.ce_weight or options.z_loss:
        lse = torch.logsumexp(z, dim=1)
    if options.ce_weight:
        assert labels is not None
        z_label = z.gather(1, rows.where_valid(labels.long(), 0)[:, None])[:, 0]
    return rows.where_valid(mixed(kd, lse, z_label, options), 0.0)
