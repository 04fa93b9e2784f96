"""The row kernel in torch: a chunk of logits becomes its own gradient, in place. Twin of row_triton.py."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from trainer.losses.options import LossOptions
from trainer.losses.products import accumulator_dtype
from trainer.losses.row_math import row_loss_and_grad, teacher_log_vector
from trainer.losses.rows import TeacherRows


def loss_and_grad_in_place(
    logits: Tensor,
    bias: Tensor | None,
    rows: TeacherRows,
    labels: Tensor | None,
    row_scale: Tensor,
    options: LossOptions,
    write_grad: bool,
) -> Tensor:
    """Return each row's loss and overwrite `logits` by row_scale * dloss/dlogits.

    logits        [n, V] product of hidden and head, before bias and soft-cap; overwritten
    rows          n rows; row_scale is read instead of their `valid`
    labels        [n] or None
    row_scale     [n] float32; 0 marks an invalid row, whose loss and gradient are 0
    returns       [n] loss, not scaled, in float32 (float64 for float64 logits)

    With write_grad=False the content of `logits` is unspecified afterwards.
    """
    compute = accumulator_dtype(logits.dtype)
    rows = replace(rows, valid=row_scale != 0).prepared(compute)
    ids, has_outside = rows.topk_ids, rows.top_k < logits.shape[1]

    z = logits.to(compute)  # the same storage when the dtype agrees: the work below is in place
    if bias is not None:
        z.add_(bias)
    capped = None
    if options.softcap is not None:
        z.div_(options.softcap).tanh_()
        capped = z.clone() if write_grad else None
        z.mul_(options.softcap)
    if options.logit_scale != 1.0:
        z.mul_(options.logit_scale)

    z_topk = z.gather(1, ids)
    label_index = z_label = None
    if options.ce_weight:
        assert labels is not None
        label_index = rows.where_valid(labels.long(), 0)[:, None]
        z_label = z.gather(1, label_index)[:, 0]

    # Sum the exponentials outside the K themselves: 1 - sum(q over K) would cancel.
    z.scatter_(1, ids, -math.inf)
    top = z.amax(dim=1, keepdim=True).clamp_min(torch.finfo(compute).min)
    z.sub_(top).exp_()
    total = z.sum(dim=1)
    outside_lse = top[:, 0] + total.log()

    log_s = teacher_log_vector(rows, options, has_outside)
    row = row_loss_and_grad(z_topk, outside_lse, z_label, log_s, options, has_outside)
    loss = rows.where_valid(row.loss, 0.0)
    if not write_grad:
        return loss

    scale = row_scale.to(compute)
    z.mul_((scale * row.outside / total.clamp_min(torch.finfo(compute).tiny))[:, None])
    z.scatter_(1, ids, scale[:, None] * row.topk)
    if label_index is not None:
        z.scatter_add_(1, label_index, -options.ce_weight * scale[:, None])
    if capped is not None:
        z.mul_(capped.square_().neg_().add_(1.0))
    if z.dtype != logits.dtype:
        logits.copy_(z)
    return loss
