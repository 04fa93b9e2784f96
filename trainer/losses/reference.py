"""The float64 twin: every accepted loss, one row at a time, written to be read.

Nothing here is fast, chunked or clever. Tests compare every other file of this package with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.losses.options import LossOptions
from trainer.losses.rows import TeacherRows


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    return (log_a.exp() * (log_a - log_b)).sum()


def _divergence(log_teacher: Tensor, log_student: Tensor, options: LossOptions) -> Tensor:
    name = options.effective_divergence
    if name == "forward":
        return _kl(log_teacher, log_student)
    if name == "reverse":
        return _kl(log_student, log_teacher)
    beta = options.jsd_beta
    log_mixture = (beta * log_teacher.exp() + (1 - beta) * log_student.exp()).log()
    return beta * _kl(log_teacher, log_mixture) + (1 - beta) * _kl(log_student, log_mixture)


def _sampled_kd(z: Tensor, ids: Tensor, logprobs: Tensor, tail_logprob: Tensor, exact: int, entropy: Tensor) -> Tensor:
    kept, drawn = logprobs[:exact].exp(), tail_logprob.exp().expand(len(ids) - exact)
    if len(drawn):  # they share the mass outside the exact entries evenly; all exact: nothing is outside
        kept, drawn = kept / kept.sum() * (1 - tail_logprob.exp()), drawn / len(drawn)
    else:
        kept = kept / kept.sum()
    return -entropy - (torch.cat([kept, drawn]) * torch.log_softmax(z, dim=0)[ids]).sum()


def _row_kd(z: Tensor, ids: Tensor, logprobs: Tensor, tail_logprob: Tensor, options: LossOptions) -> Tensor:
    t = options.temperature
    if options.tail == "none":
        log_q = torch.log_softmax(z, dim=0)[ids]
        return (logprobs.exp() * (logprobs - log_q)).sum()
    if options.tail == "renormalize":
        log_q = torch.log_softmax(z / t, dim=0)[ids]
        return t**2 * _kl(torch.log_softmax(logprobs / t, dim=0), log_q)
    outside = torch.ones_like(z, dtype=torch.bool)
    outside[ids] = False
    student, teacher = z[ids], logprobs
    if outside.any():  # with K = V there is no "anything else"
        student = torch.cat([student, torch.logsumexp(z[outside], dim=0, keepdim=True)])
        teacher = torch.cat([teacher, tail_logprob.reshape(1)])
    # softmax of a log-probability vector normalises it; dividing by T first tempers it.
    return t**2 * _divergence(torch.log_softmax(teacher / t, 0), torch.log_softmax(student / t, 0), options)


def reference_loss(
    hidden: Tensor,
    head_weight: Tensor,
    rows: TeacherRows,
    options: LossOptions,
    *,
    labels: Tensor | None = None,
    num_valid: float | None = None,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return what `kl_loss` means, a differentiable float64 scalar in nats; head rows from vocab_size on are cut."""
    options = options.for_rows(sampled=rows.exact is not None)
    logits = hidden.double() @ head_weight.double()[:vocab_size].T
    if bias is not None:
        logits = logits + bias.double()[:vocab_size]
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    total = logits.sum() * 0.0
    count = 0
    for i in range(len(rows)):
        if rows.valid is not None and not rows.valid[i]:
            continue
        count += 1
        z = logits[i]
        row_of_teacher = rows.topk_ids[i].long(), rows.topk_logprobs[i].double(), rows.tail_logprob[i].double()
        if options.tail == "sampled":
            assert rows.exact is not None
            entropy = torch.zeros_like(total) if rows.entropy is None else rows.entropy[i].double()
            kd = _sampled_kd(z, *row_of_teacher, int(rows.exact[i]), entropy)
        else:
            kd = _row_kd(z, *row_of_teacher, options)
        row = options.kd_weight * kd
        if options.ce_weight:
            assert labels is not None
            row = row - options.ce_weight * torch.log_softmax(z, dim=0)[labels[i]]
        if options.z_loss:
            row = row + options.z_loss * torch.logsumexp(z, dim=0) ** 2
        total = total + row
    denominator = count if num_valid is None else num_valid
    return total / denominator if denominator else total
