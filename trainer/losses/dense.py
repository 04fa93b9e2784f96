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
    compute = accumulator_dtype(hidden.dtype)

    z = (hidden @ head.t()).to(compute)
    if bias is not None:
        z = z + bias.to(compute)
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)

    ids = torch.where(alive[:, None], topk_ids.long(), torch.arange(k, device=z.device))
    cached_logprobs = torch.where(alive[:, None], topk_logprobs.to(compute), -math.log(k + 1))
    tail_logprob = torch.where(alive, tail_logprob.to(compute), -math.log(k + 1))[:, None]
    cached = torch.zeros(n, vocab, dtype=torch.bool, device=z.device).scatter_(1, ids, True)  # [N, V]: is it in S?
    teacher = torch.zeros_like(z).scatter_(1, ids, cached_logprobs)  # [N, V] log-probabilities, 0 where not cached

    if options.tail == "bucket" and k < vocab:
        # Tempering is invariant to the softmax's normaliser, so the K+1 outcomes need only z on S and its sum off S.
        outside = torch.logsumexp(z.masked_fill(cached, -math.inf), dim=1, keepdim=True)
        student = torch.cat([z.masked_fill(~cached, -math.inf), outside], dim=1) / t  # [N, V + 1]
        target = torch.cat([teacher.masked_fill(~cached, -math.inf), tail_logprob], dim=1) / t
        cached_or_tail = torch.cat([cached, torch.ones_like(cached[:, :1])], dim=1)
    else:
        scaled = t if options.tail == "renormalize" else (t if options.tail == "bucket" else 1.0)
        student, target, cached_or_tail = z / scaled, teacher.masked_fill(~cached, -math.inf) / scaled, cached
    log_r = torch.log_softmax(student, dim=1).masked_fill(~cached_or_tail, 0.0)
    log_s = target if options.tail == "none" else torch.log_softmax(target, dim=1)
    log_s = log_s.masked_fill(~cached_or_tail, 0.0)
    s = log_s.exp() * cached_or_tail
    r = log_r.exp() * cached_or_tail

    name = options.effective_divergence
    if name == "forward":
        kd = (s * (log_s - log_r)).sum(dim=1)
    elif name == "reverse":
        kd = (r * (log_r - log_s)).sum(dim=1)
    else:
        beta = options.jsd_beta
        log_m = torch.logaddexp(log_s + math.log(beta), log_r + math.log1p(-beta))
        kd = (beta * s * (log_s - log_m) + (1 - beta) * r * (log_r - log_m)).sum(dim=1)

    loss = options.kd_weight * t**2 * kd
    lse = torch.logsumexp(z, dim=1)
    if options.ce_weight:
        assert labels is not None
        z_label = z.gather(1, torch.where(alive, labels.long(), 0)[:, None])[:, 0]
        loss = loss + options.ce_weight * (lse - z_label)
    if options.z_loss:
        loss = loss + options.z_loss * lse**2
    return torch.where(alive, loss, 0.0).sum() * loss_scale
