"""Forward-chunked method: sparse teacher, the student's logits whole, float32 work a chunk of rows at a time.

The plain autograd path. It keeps [N, V] logits and their float32 copies for the backward pass, which is what
the fused method is there to avoid; it is differentiable twice and serves as the fused method's checker.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.losses.options import LossOptions
from trainer.losses.products import accumulator_dtype
from trainer.losses.row_math import row_loss, teacher_log_vector


def chunk_losses(
    raw_logits: Tensor,
    bias: Tensor | None,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    tail_logprob: Tensor,
    labels: Tensor | None,
    alive: Tensor,
    options: LossOptions,
) -> Tensor:
    """Loss [n] of each row of raw logits [n, V], differentiable; rows that are not alive [n] give 0."""
    n, vocab = raw_logits.shape
    k = topk_ids.shape[1]
    has_outside = k < vocab
    compute = accumulator_dtype(raw_logits.dtype)
    ids = torch.where(alive[:, None], topk_ids.long(), torch.arange(k, device=raw_logits.device))
    logprobs = torch.where(alive[:, None], topk_logprobs.to(compute), -math.log(k + 1))
    tail = torch.where(alive, tail_logprob.to(compute), -math.log(k + 1))

    def transformed(raw: Tensor, raw_bias: Tensor | None) -> Tensor:
        z = raw.to(compute)
        if raw_bias is not None:
            z = z + raw_bias.to(compute)
        if options.softcap is not None:
            z = options.softcap * torch.tanh(z / options.softcap)
        return z if options.logit_scale == 1.0 else z * options.logit_scale

    def gathered(index: Tensor) -> Tensor:
        return transformed(raw_logits.gather(1, index), None if bias is None else bias[index])

    z_topk = gathered(ids)
    z_label = None
    if options.ce_weight:
        assert labels is not None
        z_label = gathered(torch.where(alive, labels.long(), 0)[:, None])[:, 0]
    z = transformed(raw_logits, bias)
    outside_lse = z.new_full((n,), -math.inf)
    if has_outside:
        # In place where z is a copy of our own, which saves another copy of the chunk for the backward pass.
        masked = z.scatter(1, ids, -math.inf) if z is raw_logits else z.scatter_(1, ids, -math.inf)
        outside_lse = torch.logsumexp(masked, dim=1)
    log_s = teacher_log_vector(logprobs, tail, options, has_outside)
    loss = row_loss(z_topk, outside_lse, z_label, log_s, options, has_outside)
    return torch.where(alive, loss, 0.0)


def forward_chunked_loss(
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
    chunk_size: int,
) -> Tensor:
    """Sum of the rows' losses times loss_scale; head [V, d] and bias [V] are cut to the real vocabulary."""
    logits = hidden @ head.t()
    total = loss_scale.new_zeros(()) + logits[:0].sum()
    for start in range(0, hidden.shape[0], chunk_size):
        part = slice(start, start + chunk_size)
        total = (
            total
            + chunk_losses(
                logits[part],
                bias,
                topk_ids[part],
                topk_logprobs[part],
                tail_logprob[part],
                None if labels is None else labels[part],
                alive[part],
                options,
            ).sum()
        )
    return total * loss_scale
