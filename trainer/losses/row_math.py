"""A row's loss and gradient from K+1 numbers.

Every loss of this package sees a row's V logits only through
    y_k = z at the K cached ids,   y_t = logsumexp of z everywhere else,   and z at the label.
So its gradient is (dL/dy_k) at the K ids and (dL/dy_t) * softmax_outside(v) elsewhere: *one scalar per row
times an exponential, plus corrections at K places*. Scaling by softmax over the outside, instead of q_v,
keeps everything finite when the student leaves no mass outside (q_t -> 0 while p_t > 0).

With s the teacher's and r the student's tempered vector over the outcomes, log r = log_softmax(y / T),
D(s, r) the divergence and e_j = dD/dlog r_j:   dL/dy_j = T (e_j - r_j * sum(e)),   L = T^2 D.

For reverse KL and JSD e_j = r_j g_j, so the gradient is r_j (g_j - mean of g under r). Where one outcome has nearly all
of the student's mass, as "anything else" has for an untrained student, its g is that mean to rounding. So every g is
measured from that outcome's: its own gradient becomes -r_j * sum over the others of r_i (g_i - g_j), which cancels
nothing.

`row_loss` lets autograd find the rest of the gradient, `row_loss_and_grad` writes it out; a test compares them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

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
    if options.tail in ("none", "sampled"):
        return logprobs
    if options.tail == "bucket" and has_outside:
        logprobs = torch.cat([logprobs, rows.tail_logprob[:, None]], dim=1)
    return torch.log_softmax(logprobs / options.temperature, dim=1)


def log_mixture(log_s: Tensor, log_r: Tensor, beta: float) -> Tensor:
    """Return log(beta * s + (1 - beta) * r), for 0 < beta < 1."""
    return torch.logaddexp(log_s + math.log(beta), log_r + math.log1p(-beta))


def _gaps(log_s: Tensor, log_r: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Return g = log r - log s (of JSD log r - log m), less its value at the likeliest outcome, and that value [n, 1]."""
    gap = log_r - log_s
    if options.effective_divergence == "jsd":  # log r - log m of numbers that may be small, not from large ones
        gap = -log_mixture(-gap, torch.zeros_like(gap), options.jsd_beta)
    anchor = gap.gather(1, log_r.argmax(dim=1, keepdim=True))
    return gap - anchor, anchor


def divergence_and_grad(log_s: Tensor, log_y: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Return D(teacher s, student softmax(log_y)) [n], and its gradient with respect to log_y [n, outcomes].

    No logarithm may be infinite: an outcome that is impossible has -1e30.
    """
    log_r = torch.log_softmax(log_y, dim=1)
    s, r = log_s.exp(), log_r.exp()
    name, beta = options.effective_divergence, options.jsd_beta
    if name == "forward":
        return (s * (log_s - log_r)).sum(dim=1), r - s
    gap, anchor = _gaps(log_s, log_r, options)
    mean = (r * gap).sum(dim=1, keepdim=True)
    student, grad = (mean + anchor)[:, 0], r * (gap - mean)
    if name == "reverse":
        return student, grad
    teacher = (s * (log_s - log_mixture(log_s, log_r, beta))).sum(dim=1)
    return beta * teacher + (1 - beta) * student, (1 - beta) * grad


class _Divergence(torch.autograd.Function):
    """`divergence_and_grad` for autograd, which would form the gradient by terms that cancel; differentiable twice."""

    @staticmethod
    def forward(ctx: Any, log_y: Tensor, log_s: Tensor, options: LossOptions) -> Tensor:
        ctx.save_for_backward(log_y, log_s)
        ctx.options = options
        return divergence_and_grad(log_s, log_y, options)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        log_y, log_s = ctx.saved_tensors
        return grads[0][:, None] * divergence_and_grad(log_s, log_y, ctx.options)[1], None, None


def divergence(log_s: Tensor, log_y: Tensor, options: LossOptions) -> Tensor:
    """Return D(teacher s, student softmax(log_y)) [n], differentiable in log_y. No logarithm may be infinite."""
    if options.effective_divergence == "forward":
        log_r = torch.log_softmax(log_y, dim=1)
        return (log_s.exp() * (log_s - log_r)).sum(dim=1)
    value: Tensor = _Divergence.apply(log_y, log_s, options)  # type: ignore[no-untyped-call]
    return value


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
        kd = divergence(log_s, y / t, options)
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
    if options.tail == "bucket":
        kd, grad = divergence_and_grad(log_s, y / t, options)
    else:
        # logit_scale is 1/T here: T^2 of the loss and 1/T of the scaled logits leave one T.
        s = log_s.exp()
        kd = (s * (log_s - log_q[:, :k])).sum(dim=1)
        grad = q * s.sum(dim=1, keepdim=True)
        grad[:, :k] -= s
    grad = options.kd_weight * (grad * t)
    if options.ce_weight or options.z_loss:
        on_q = options.ce_weight + 2 * options.z_loss * lse
        grad = grad + on_q[:, None] * q
    outside = grad[:, k] if has_outside else torch.zeros_like(lse)
    return RowGrad(mixed(kd, lse, z_label, options), grad[:, :k], outside)
