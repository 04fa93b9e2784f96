"""Dense method: the cached rows scattered to a full [N, V] grid, as if the teacher's distribution were known.

The most memory and the plainest code: elementwise formulas over the vocabulary, no chunk, no gather.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.losses.options import LossOptions
from trainer.losses.products import accumulator_dtype


def dense_loss(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    tail_logprob: Tensor,
    labels: Tensor | None,
    alive: Tensor,
    loss_scale: Tensor,
    options: LossOptions,
) -> Tensor:
    """Sum of the rows' losses times loss_scale; head [V, d] and bias [V] are cut to the real vocabulary."""
    n, k = topk_ids.shape
    vocab = head.shape[0]
    t = options.temperature
    has_tail = options.tail == "bucket" and k < vocab
    compute = accumulator_dtype(hidden.dtype)

    z = (hidden @ head.t()).to(compute)
    if bias is not None:
        z = z + bias.to(compute)
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)

    with torch.no_grad():
        ids = torch.where(alive[:, None], topk_ids.long(), torch.arange(k, device=z.device))
        cached_logprobs = torch.where(alive[:, None], topk_logprobs.to(compute), -math.log(k + 1)) / t
        log_s_tail = torch.where(alive, tail_logprob.to(compute), -math.log(k + 1)) / t
        cached = torch.zeros(n, vocab, dtype=torch.bool, device=z.device).scatter_(1, ids, True)  # [N, V]
        log_s = torch.full_like(z, -math.inf).scatter_(1, ids, cached_logprobs)  # [N, V]
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

    name = options.effective_divergence
    if name == "forward":
        kd = (s * log_s).sum(dim=1) - (s * scaled).sum(dim=1) + s.sum(dim=1) * lse_r
        kd = kd + s_tail * (log_s_tail - log_r_tail)
    else:
        log_r = (scaled - lse_r[:, None]).masked_fill(~cached, 0.0)
        r, r_tail = log_r.exp() * cached, log_r_tail.exp() * has_tail
        if name == "reverse":
            kd = (r * (log_r - log_s)).sum(dim=1) + r_tail * (log_r_tail - log_s_tail)
        else:
            beta = options.jsd_beta
            kd = torch.zeros_like(lse_r)
            for teacher, student, log_teacher, log_student in (
                (s, r, log_s, log_r),
                (s_tail[:, None], r_tail[:, None], log_s_tail[:, None], log_r_tail[:, None]),
            ):
                log_m = torch.logaddexp(log_teacher + math.log(beta), log_student + math.log1p(-beta))
                kd = kd + beta * (teacher * (log_teacher - log_m)).sum(dim=1)
                kd = kd + (1 - beta) * (student * (log_student - log_m)).sum(dim=1)

    loss = options.kd_weight * t**2 * kd
    if options.ce_weight or options.z_loss:
        lse = torch.logsumexp(z, dim=1)
        if options.ce_weight:
            assert labels is not None
            z_label = z.gather(1, torch.where(alive, labels.long(), 0)[:, None])[:, 0]
            loss = loss + options.ce_weight * (lse - z_label)
        if options.z_loss:
            loss = loss + options.z_loss * lse**2
    return torch.where(alive, loss, 0.0).sum() * loss_scale
