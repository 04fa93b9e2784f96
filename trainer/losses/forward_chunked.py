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
from trainer.losses.row_math import row_loss, student_logits, teacher_log_vector
from trainer.losses.rows import TeacherRows


def chunk_losses(
    raw_logits: Tensor, bias: Tensor | None, rows: TeacherRows, labels: Tensor | None, options: LossOptions
) -> Tensor:
    """Return the loss [n] of each row of raw logits [n, V], differentiable; invalid rows give 0."""
    rows = rows.prepared(accumulator_dtype(raw_logits.dtype))
    has_outside = rows.top_k < raw_logits.shape[1]

    def transformed(raw: Tensor, raw_bias: Tensor | None) -> Tensor:
        z = student_logits(raw, raw_bias, options)
        return z if options.logit_scale == 1.0 else z * options.logit_scale

    def gathered(index: Tensor) -> Tensor:
        return transformed(raw_logits.gather(1, index), None if bias is None else bias[index])

    z_topk = gathered(rows.topk_ids)
    z_label = None
    if options.ce_weight:
        assert labels is not None
        z_label = gathered(rows.where_valid(labels.long(), 0)[:, None])[:, 0]
    z = transformed(raw_logits, bias)
    outside_lse = z.new_full((len(rows),), -math.inf)
    if has_outside:
        # In place where z is a copy, which saves another copy of the chunk for the backward pass.
        ids = rows.topk_ids
        masked = z.scatter(1, ids, -math.inf) if z is raw_logits else z.scatter_(1, ids, -math.inf)
        outside_lse = torch.logsumexp(masked, dim=1)
    log_s = teacher_log_vector(rows, options, has_outside)
    return rows.where_valid(row_loss(z_topk, outside_lse, z_label, log_s, options, has_outside), 0.0)


def forward_chunked_loss(
    logits: Tensor, bias: Tensor | None, rows: TeacherRows, labels: Tensor | None, options: LossOptions, chunk_size: int
) -> Tensor:
    """Return the sum of the losses of raw logits [N, V], a chunk of rows at a time; keeps float32 copies of them."""
    total = logits[:0].sum(dtype=accumulator_dtype(logits.dtype))
    for start in range(0, len(rows), chunk_size):
        part = slice(start, start + chunk_size)
        part_labels = None if labels is None else labels[part]
        total = total + chunk_losses(logits[part], bias, rows[part], part_labels, options).sum()
    return total
