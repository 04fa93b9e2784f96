"""A row's loss and gradient from K+1 numbers.

Every loss of this package sees a row's V logits only through
    y_k = z at the K cached ids,   y_t = logsumexp of z everywhere else,   and z at the label.
So its gradient is (dL/dy_k) at the K ids and (dL/dy_t) * softmax_outside(v) elsewhere: *one scalar per row
times an exponential, plus corrections at K places*. Scaling by softmax over the outside, instead of q_v,
keeps everything finite when the student leaves no mass outside (q_t -> 0 while p_t > 0).

With s the teacher's and r the student's tempered vector over the outcomes, log r = log_softmax(y / T),
D(s, r) the divergence and e_j = dD/dlog r_j:   dL/dy_j = T (e_j - r_j * sum(e)),   L = T^2 D.

`row_loss` lets autograd find the gradient, `row_loss_and_grad` writes it out; a test compares them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.losses.options import LossOptions
from trainer.losses.products import accumulator_dtype
from trainer.losses.rows import TeacherRows


class RowGrad(NamedTuple):
    """Loss [n], and its gradient with respect to the K logits [n, K], to y_t [n], before the label's own term."""

    loss: Tensor
    topk: Tensor
    outside: Tensor


def student_logits(raw: Tensor, bias: Tensor | None, options: LossOptions) -> Tensor:
    """Return raw logits in float32 (float64) with bias and soft-cap; `raw` itself where there is nothing to do."""
    z = raw.to(accumulator_dtype(raw.dtype))
    if bias is not None:
        z = z + bias.to(z.dtype)
    return z if options.softcap is None else options.softcap * torch.tanh(z / options.softcap)


def teacher_log_vector(rows: TeacherRows, options: LossOptions, has_outside: bool) -> Tensor:
    """Return log s of prepared rows, [n, K] or [n, K+1] with the tail: normalised and tempered."""
    logprobs = rows.topk_logprobs
    if options.tail == "none":
        return logprobs
    if options.tail == "bucket" and has_outside:
        logprobs = torch.cat([logprobs, rows.tail_logprob[:, None]], dim=1)
    return torch.log_softmax(logprobs / options.temperature, dim=1)


def log_mixture(log_s: Tensor, log_r: Tensor, beta: float) -> Tensor:
    """Return log(beta * s + (1 - beta) * r), for 0 < beta < 1."""
    return torch.logaddexp(log_s + math.log(beta), log_r + math.log1p(-beta))


def divergence(s: Tensor, log_s: Tensor, r: Tensor, log_r: Tensor, options: LossOptions) -> Tensor:
    """Return D(teacher s, student r), summed over dim 1; where s or r is 0, its logarithm must be finite."""
    name = options.effective_divergence
    if name == "forward":
        return (s * (log_s - log_r)).sum(dim=1)
    if name == "reverse":
        return (r * (log_r - log_s)).sum(dim=1)
    beta = options.jsd_beta
    log_m = log_mixture(log_s, log_r, beta)
    return beta * (s * (log_s - log_m)).sum(dim=1) + (1 - beta) * (r * (log_r - log_m)).sum(dim=1)


def row_loss(
    z_topk: Tensor, outside_lse: Tensor, z_label: Tensor | None, log_s: Tensor, options: LossOptions, has_outside: bool
) -> Tensor:
    """Return the loss [n] of each row, differentiable.

    z_topk [n, K] and z_label [n] are already multiplied by `options.logit_scale`, as is what outside_lse [n] sums.
    """
    t = options.temperature
    y = torch.cat([z_topk, outside_lse[:, None]], dim=1) if has_outside else z_topk
    lse = torch.logsumexp(y, dim=1)
    if options.tail == "bucket":
        log_r = torch.log_softmax(y / t, dim=1)
        kd = divergence(log_s.exp(), log_s, log_r.exp(), log_r, options)
    else:
        kd = (log_s.exp() * (log_s - (z_topk - lse[:, None]))).sum(dim=1)
    return mixed(kd, lse, z_label, options)


def mixed(kd: Tensor, lse: Tensor | None, z_label: Tensor | None, options: LossOptions) -> Tensor:
    """Return the loss [n]: KD times T^2 with its share of cross-entropy and z-loss; lse [n] is over all logits."""
    loss = options.kd_weight * options.temperature**2 * kd
    if options.ce_weight:
        assert lse is not None
        assert z_label is not None
        loss = loss + options.ce_weight * (lse - z_label)
    if options.z_loss:
        assert lse is not None
        loss = loss + options.z_loss * lse**2
    return loss


def row_loss_and_grad(
    z_topk: Tensor, outside_lse: Tensor, z_label: Tensor | None, log_s: Tensor, options: LossOptions, has_outside: bool
) -> RowGrad:
    """Return `row_loss` and its gradient with respect to the logits *before* `options.logit_scale`.

    The label's own term, -ce_weight at its place, is left to the caller, who knows whether it is among the K.
    """
    t, k = options.temperature, z_topk.shape[1]
    y = torch.cat([z_topk, outside_lse[:, None]], dim=1) if has_outside else z_topk
    lse = torch.logsumexp(y, dim=1)
    log_q = y - lse[:, None]
    q = log_q.exp()
    s = log_s.exp()
    if options.tail == "bucket":
        log_r = torch.log_softmax(y / t, dim=1)
        r = log_r.exp()
        kd = divergence(s, log_s, r, log_r, options)
        name = options.effective_divergence
        if name == "forward":
            grad = r - s
        elif name == "reverse":
            grad = r * (log_r - log_s - kd[:, None])
        else:
            gap = log_r - log_mixture(log_s, log_r, options.jsd_beta)
            grad = (1 - options.jsd_beta) * r * (gap - (r * gap).sum(dim=1)[:, None])
    else:
        # logit_scale is 1/T here: T^2 of the loss and 1/T of the scaled logits leave one T.
        kd = (s * (log_s - log_q[:, :k])).sum(dim=1)
        grad = q * s.sum(dim=1, keepdim=True)
        grad[:, :k] -= s
    grad = options.kd_weight * (grad * t)
    if options.ce_weight or options.z_loss:
        on_q = options.ce_weight + 2 * options.z_loss * lse
        grad = grad + on_q[:, None] * q
    outside = grad[:, k] if has_outside else torch.zeros_like(lse)
    return RowGrad(mixed(kd, lse, z_label, options), grad[:, :k], outside)
