"""Online method: a live teacher's logits instead of cached rows. The yardstick for what the cache loses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.losses.chunking import default_chunk_size
from trainer.losses.kl import kl_loss
from trainer.losses.options import LossOptions
from trainer.losses.products import accumulator_dtype
from trainer.losses.rows import TeacherRows


def online_kl_loss(
    hidden: Tensor,
    head_weight: Tensor,
    teacher_logits: Tensor,
    *,
    tail: str | None = None,
    topk: int = 100,
    divergence: str = "forward",
    jsd_beta: float = 0.5,
    temperature: float = 1.0,
    valid: Tensor | None = None,
    num_valid: int | float | Tensor | None = None,
    vocab_size: int | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    chunk_size: int | None = None,
    **cached_options: Any,
) -> Tensor:
    """Distillation loss against live teacher logits.

    hidden          [N, d]; head_weight [V, d], as in `kl_loss`
    teacher_logits  [N, Vt] float; entries beyond vocab_size are ignored, and Vt >= vocab_size
    valid           [N] bool or None
    tail            None: divergence over the full vocabulary, both sides at `temperature`, times temperature^2.
                    Else: the teacher's own top `topk` with that tail, through `kl_loss`, which then takes
                    `cached_options` (method, labels, ce_weight, z_loss, recompute, validate)
    returns         scalar float32 (float64 for float64 inputs), in nats, the valid rows' sum / num_valid

    The full-vocabulary form recomputes each chunk's logits in the backward pass: four products, chunk * V * 4 bytes
    of float32 a few times over. Its loss is never below the bucket's: compare methods by held-out values of this one.
    """
    vocab = head_weight.shape[0] if vocab_size is None else vocab_size
    if teacher_logits.dim() != 2 or teacher_logits.shape[0] != hidden.shape[0] or teacher_logits.shape[1] < vocab:
        raise ValueError(
            f"teacher_logits must be [{hidden.shape[0]}, at least {vocab}], found {tuple(teacher_logits.shape)}"
        )
    if teacher_logits.requires_grad:
        raise ValueError("teacher_logits are constants: compute them under torch.no_grad() or detach them")
    teacher_logits = teacher_logits[:, :vocab]
    if tail is not None:
        return kl_loss(
            hidden,
            head_weight,
            TeacherRows.from_logits(teacher_logits, topk, valid),
            tail=tail,
            divergence=divergence,
            jsd_beta=jsd_beta,
            temperature=temperature,
            num_valid=num_valid,
            vocab_size=vocab_size,
            softcap=softcap,
            bias=bias,
            chunk_size=chunk_size,
            **cached_options,
        )
    if cached_options:
        raise ValueError(f"{', '.join(sorted(cached_options))} need tail= with the online loss, found tail=None")
    options = LossOptions("bucket", divergence, jsd_beta, temperature, softcap=softcap)
    n = hidden.shape[0]
    if chunk_size is None:
        chunk_size = default_chunk_size(n, hidden.shape[1], vocab, torch.float32, hidden.device)
    total = hidden.new_zeros((), dtype=accumulator_dtype(hidden.dtype)) + hidden[:0].sum()
    for start in range(0, n, chunk_size):
        part = slice(start, start + chunk_size)
        alive = None if valid is None else valid[part]
        args = (hidden[part], head_weight[:vocab], None if bias is None else bias[:vocab])
        total = total + checkpoint(_chunk_sum, *args, teacher_logits[part], alive, options, use_reentrant=False)
    if num_valid is None:
        num_valid = n if valid is None else valid.sum()
    if isinstance(num_valid, Tensor):
        return torch.where(num_valid > 0, total / num_valid.clamp_min(1), total * 0.0).reshape(())
    return total / num_valid if num_valid else total * 0.0


def _chunk_sum(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    teacher_logits: Tensor,
    alive: Tensor | None,
    options: LossOptions,
) -> Tensor:
    """Sum of the rows' divergences over the full vocabulary."""
    compute = accumulator_dtype(hidden.dtype)
    if alive is not None:
        hidden = hidden.masked_fill(~alive[:, None], 0.0)
        teacher_logits = teacher_logits.masked_fill(~alive[:, None], 0.0)
    z = (hidden @ head.t()).to(compute)
    if bias is not None:
        z = z + bias.to(compute)
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    t = options.temperature
    log_r = torch.log_softmax(z / t, dim=1)
    log_s = torch.log_softmax(teacher_logits.to(compute) / t, dim=1)
    name = options.effective_divergence
    if name == "forward":
        rows = _kl(log_s, log_r)
    elif name == "reverse":
        rows = _kl(log_r, log_s)
    else:
        beta = options.jsd_beta
        log_m = torch.logaddexp(log_s + math.log(beta), log_r + math.log1p(-beta))
        rows = beta * _kl(log_s, log_m) + (1 - beta) * _kl(log_r, log_m)
    if alive is not None:
        rows = torch.where(alive, rows, 0.0)
    return t**2 * rows.sum()


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    return (log_a.exp() * (log_a - log_b)).sum(dim=1)
