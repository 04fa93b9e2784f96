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
        if options.tail != "none":
            total = torch.logsumexp(log_s, dim=1)
            total = torch.logaddexp(total, log_s_tail) if has_tail else total
            log_s, log_s_tail = log_s.sub_(total[:, None]), log_s_tail - total
        s, s_tail = log_s.exp(), log_s_tail.exp() * has_tail
        log_s.masked_fill_(~cached, 0.0)

    # The student's outcomes: log r = z / T - lse on S and log_r_tail off S, where lse normalises them.
    scaled = z if t == 1.0 else z / t
    if has_tail:
        outside = torch.logsumexp(z.masked_fill(cached, -math.inf), dim=1) / t
        lse_r = torch.logaddexp(torch.logsumexp(scaled.masked_fill(~cached, -math.inf), dim=1), outside)
        log_r_tail = outside - lse_r
    else:
        lse_r = torch.logsumexp(scaled, dim=1)
        log_r_tail = torch.zeros_like(lse_r)

    if options.effective_divergence == "forward":  # without a grid of log r
        kd = (s * log_s).sum(dim=1) - (s * scaled).sum(dim=1) + s.sum(dim=1) * lse_r
        kd = kd + s_tail * (log_s_tail - log_r_tail)
    else:
        log_r = (scaled - lse_r[:, None]).masked_fill(~cached, 0.0)
        r, r_tail = log_r.exp() * cached, log_r_tail.exp() * has_tail
        kd = divergence(s, log_s, r, log_r, options)
        kd = kd + divergence(s_tail[:, None], log_s_tail[:, None], r_tail[:, None], log_r_tail[:, None], options)

    lse = z_label = None
    if options.ce_weight or options.z_loss:
        lse = torch.logsumexp(z, dim=1)
    if options.ce_weight:
        assert labels is not None
        z_label = z.gather(1, rows.where_valid(labels.long(), 0)[:, None])[:, 0]
    return rows.where_valid(mixed(kd, lse, z_label, options), 0.0)
