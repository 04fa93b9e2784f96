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


class RowGrad(NamedTuple):
    """Loss [n], and its gradient with respect to the K logits [n, K], to y_t [n], before the label's own term."""

    loss: Tensor
    topk: Tensor
    outside: Tensor


def teacher_log_vector(topk_logprobs: Tensor, tail_logprob: Tensor, options: LossOptions, has_outside: bool) -> Tensor:
    """log s, [n, K] or [n, K+1] with the tail: normalised and tempered, in float32 (or float64)."""
    if options.tail == "none":
        return topk_logprobs
    if options.tail == "bucket" and has_outside:
        topk_logprobs = torch.cat([topk_logprobs, tail_logprob[:, None]], dim=1)
    return torch.log_softmax(topk_logprobs / options.temperature, dim=1)


def row_loss(
    z_topk: Tensor, outside_lse: Tensor, z_label: Tensor | None, log_s: Tensor, options: LossOptions, has_outside: bool
) -> Tensor:
    """Loss [n] of each row, differentiable.

    z_topk [n, K] and z_label [n] are already multiplied by `options.logit_scale`, as is what outside_lse [n] sums.
    """
    t = options.temperature
    y = torch.cat([z_topk, outside_lse[:, None]], dim=1) if has_outside else z_topk
    lse = torch.logsumexp(y, dim=1)
    if options.tail == "bucket":
        log_r = torch.log_softmax(y / t, dim=1)
        s, r = log_s.exp(), log_r.exp()
        name = options.effective_divergence
        if name == "forward":
            kd = (s * (log_s - log_r)).sum(dim=1)
        elif name == "reverse":
            kd = (r * (log_r - log_s)).sum(dim=1)
        else:
            beta = options.jsd_beta
            log_m = torch.logaddexp(log_s + math.log(beta), log_r + math.log1p(-beta))
            kd = (beta * s * (log_s - log_m) + (1 - beta) * r * (log_r - log_m)).sum(dim=1)
    else:
        kd = (log_s.exp() * (log_s - (z_topk - lse[:, None]))).sum(dim=1)
    loss = options.kd_weight * t**2 * kd
    if options.ce_weight:
        assert z_label is not None
        loss = loss + options.ce_weight * (lse - z_label)
    if options.z_loss:
        loss = loss + options.z_loss * lse**2
    return loss


def row_loss_and_grad(
    z_topk: Tensor, outside_lse: Tensor, z_label: Tensor | None, log_s: Tensor, options: LossOptions, has_outside: bool
) -> RowGrad:
    """`row_loss` and its gradient with respect to the logits *before* `options.logit_scale`.

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
        name = options.effective_divergence
        if name == "forward":
            kd = (s * (log_s - log_r)).sum(dim=1)
            grad = r - s
        elif name == "reverse":
            gap = log_r - log_s
            kd = (r * gap).sum(dim=1)
            grad = r * (gap - kd[:, None])
        else:
            beta = options.jsd_beta
            log_m = torch.logaddexp(log_s + math.log(beta), log_r + math.log1p(-beta))
            gap = log_r - log_m
            student_part = (r * gap).sum(dim=1)
            kd = beta * (s * (log_s - log_m)).sum(dim=1) + (1 - beta) * student_part
            grad = (1 - beta) * r * (gap - student_part[:, None])
        grad = grad * t
    else:
        # logit_scale is 1/T here: T^2 of the loss and 1/T of the scaled logits leave one T.
        kd = (s * (log_s - log_q[:, :k])).sum(dim=1)
        grad = q * s.sum(dim=1, keepdim=True)
        grad[:, :k] -= s
        grad = grad * t
    loss = options.kd_weight * t**2 * kd
    grad = options.kd_weight * grad
    on_q = torch.zeros_like(lse)
    if options.ce_weight:
        assert z_label is not None
        loss = loss + options.ce_weight * (lse - z_label)
        on_q = on_q + options.ce_weight
    if options.z_loss:
        loss = loss + options.z_loss * lse**2
        on_q = on_q + 2 * options.z_loss * lse
    if options.ce_weight or options.z_loss:
        grad = grad + on_q[:, None] * q
    outside = grad[:, k] if has_outside else torch.zeros_like(lse)
    return RowGrad(loss, grad[:, :k], outside)
