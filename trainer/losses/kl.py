"""The public loss functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainer.losses.dense import dense_losses
from trainer.losses.forward_chunked import forward_chunked_loss
from trainer.losses.fused import default_chunk_size, fused_loss
from trainer.losses.options import METHODS, TAILS, LossOptions
from trainer.losses.products import accumulator_dtype
from trainer.losses.rows import TeacherRows

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def kl_loss(
    hidden: Tensor,
    head_weight: Tensor,
    rows: TeacherRows,
    *,
    options: LossOptions | None = None,
    method: str = "fused",
    labels: Tensor | None = None,
    num_valid: int | float | Tensor | None = None,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
    chunk_size: int | None = None,
    recompute: bool = False,
    validate: bool = True,
    **overrides: Any,
) -> Tensor:
    """Return the distillation loss of a student's last hidden states against cached teacher rows.

    hidden       [N, d]  bf16, fp16, fp32 or fp64; the student's last hidden states
    head_weight  [V, d]  same dtype; its gradient is summed in float32 over the whole call
    rows         TeacherRows of N rows
    returns      scalar float32 (float64 for float64 inputs), in nats: the valid rows' sum / num_valid of
                 (1 - ce_weight) * KD + ce_weight * CE(labels) + z_loss * logsumexp(z)^2

    options      a LossOptions; its fields may also be given, or changed, as keywords:
      tail         "bucket": KL over the K cached outcomes and "anything else". "none": the sum over the K
                   with p as it is (can go negative). "renormalize": the K with p / sum(p). "sampled", of sampled
                   rows (rows.exact): -H(p) - sum p^ log q, an unbiased estimate of the KL over the full vocabulary
                   and of its gradient; can be negative in a row; without rows.entropy H is left out. "auto", the
                   default: "sampled" for sampled rows, else "bucket"
      divergence   "forward" KL(teacher || student); "reverse" KL(student || teacher); "jsd", with
                   m = beta * teacher + (1 - beta) * student: beta * KL(teacher || m) + (1 - beta) * KL(student || m).
                   jsd_beta = 0 and 1 are forward and reverse KL, the limits of JSD / (beta * (1 - beta)).
      temperature  tempers both K+1 vectors ("bucket") or the whole softmax ("renormalize"); the KD term and its
                   gradient are multiplied by temperature^2
      ce_weight, z_loss    as above;  softcap    z = softcap * tanh(z / softcap), after the bias
    method       "fused": never holds more than chunk_size rows of logits, gradients formed in the forward
                 pass. "forward_chunked": whole [N, V] logits, autograd. "dense": whole grids, autograd.
    labels       [N] int, needed with ce_weight > 0; ids in the vocabulary on valid rows, anything on others
    num_valid    what the sum is divided by: the valid rows of the whole accumulated batch (a number, or a
                 scalar tensor on the same device). Default: the valid rows of this call. 0 gives loss 0.
    vocab_size   real vocabulary: head rows from here on are masked out and get zero gradient. Default V.
    bias         [V]; its gradient is summed in float32
    chunk_size   rows of logits alive at a time; default from shapes (see `fused.default_chunk_size`)
    recompute    fused only: keep nothing, form the gradients in the backward pass (one product more);
                 allows backward twice, and double backward
    validate     check the rows' and labels' values first; on a GPU this waits for the device once, so pass False
                 in a training loop whose data were checked before. Not done under torch.compile.

    Accepted combinations: see `Objective`. If head_weight has a float32 attribute `main_grad` (Megatron's
    convention), the fused method adds its gradient there, in float32, and leaves head_weight.grad alone.
    Cost of "fused": three products of 2 N d V FLOP; extra memory at the worst moment
    max(chunk_size, d) * V * bytes + V * d * 4 + N * d * bytes.
    Raises ValueError for disagreeing shapes, unsupported combinations and (validate) bad values; TypeError for a
    keyword that is neither an argument nor an option.
    """
    options = LossOptions(**overrides) if options is None else replace(options, **overrides)
    if options.tail is None:
        raise ValueError(f"tail must be one of {', '.join(TAILS)}; None, the full vocabulary, is online_kl_loss's")
    options = options.for_rows(sampled=rows.exact is not None)
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, found {method!r}")
    if recompute and method != "fused":
        raise ValueError(f"recompute=True goes with method='fused' only, found method={method!r}")
    vocab_size = head_weight.shape[0] if vocab_size is None else vocab_size
    _check_shapes(hidden, head_weight, rows, labels, vocab_size, bias)
    if options.ce_weight and labels is None:
        raise ValueError(f"ce_weight = {options.ce_weight} needs labels [N], found None")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 or None, found {chunk_size}")
    labels = labels if options.ce_weight else None
    if validate and not torch.compiler.is_compiling():
        rows.check_values(vocab_size)
        if labels is not None:
            wrong = int(rows.where_valid((labels < 0) | (labels >= vocab_size), False).sum())
            if wrong:
                raise ValueError(
                    f"{wrong} labels of valid rows lie outside [0, {vocab_size}); mark them invalid in TeacherRows.valid"
                )
    if chunk_size is None:
        chunk_size = default_chunk_size(len(rows), hidden.shape[1], vocab_size, hidden.dtype, hidden.device)
    if hidden.stride(-1) != 1:
        hidden = hidden.contiguous()
    scale = _loss_scale(num_valid, rows, accumulator_dtype(hidden.dtype))
    constant = None
    if options.tail == "sampled":
        rows, constants = rows.estimate(accumulator_dtype(hidden.dtype))
        constant = options.kd_weight * constants.sum() * scale
    loss = _by_method(
        method, hidden, head_weight, bias, rows, labels, scale, options, vocab_size, chunk_size, recompute
    )
    return loss if constant is None else loss + constant


def _by_method(
    method: str,
    hidden: Tensor,
    head_weight: Tensor,
    bias: Tensor | None,
    rows: TeacherRows,
    labels: Tensor | None,
    scale: Tensor,
    options: LossOptions,
    vocab_size: int,
    chunk_size: int,
    recompute: bool,
) -> Tensor:
    """Return the sum of the rows' losses times `scale`; of sampled rows, KL against their weights."""
    if method == "fused":
        return fused_loss(hidden, head_weight, bias, rows, labels, scale, options, vocab_size, chunk_size, recompute)
    logits = rows.where_valid(hidden, 0.0) @ head_weight[:vocab_size].t()
    head_bias = None if bias is None else bias[:vocab_size]
    if method == "dense":
        return dense_losses(logits, head_bias, rows, labels, options).sum() * scale
    return forward_chunked_loss(logits, head_bias, rows, labels, options, chunk_size) * scale


def _check_shapes(
    hidden: Tensor, head_weight: Tensor, rows: TeacherRows, labels: Tensor | None, vocab_size: int, bias: Tensor | None
) -> None:
    if hidden.dim() != 2 or head_weight.dim() != 2 or hidden.shape[1] != head_weight.shape[1]:
        raise ValueError(
            f"hidden must be [N, d] and head_weight [V, d], found {tuple(hidden.shape)} and {tuple(head_weight.shape)}"
        )
    if hidden.dtype != head_weight.dtype or hidden.dtype not in DTYPES:
        raise ValueError(
            f"hidden and head_weight must share one dtype of bf16, fp16, fp32, fp64, found {hidden.dtype} "
            f"and {head_weight.dtype}"
        )
    n, v = hidden.shape[0], head_weight.shape[0]
    if len(rows) != n:
        raise ValueError(f"hidden has {n} rows and the teacher {len(rows)}; they must be the same positions")
    for name, x in (("head_weight", head_weight), ("topk_ids", rows.topk_ids), ("labels", labels), ("bias", bias)):
        if x is not None and x.device != hidden.device:
            raise ValueError(f"{name} is on {x.device} and hidden on {hidden.device}; move it there")
    if not 1 <= vocab_size <= v:
        raise ValueError(f"vocab_size must lie in [1, {v}], the rows of head_weight, found {vocab_size}")
    if rows.top_k > vocab_size:
        raise ValueError(f"K = {rows.top_k} teacher entries a row exceed the vocabulary of {vocab_size}")
    if bias is not None and bias.shape != (v,):
        raise ValueError(f"bias must be [{v}], one value a row of head_weight, found {tuple(bias.shape)}")
    if labels is not None and (labels.shape != (n,) or labels.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f"labels must be int32 or int64 [{n}], found {labels.dtype} {tuple(labels.shape)}")


def _loss_scale(num_valid: int | float | Tensor | None, rows: TeacherRows, dtype: torch.dtype) -> Tensor:
    """Return 1 / num_valid as a scalar on the rows' device, 0 where num_valid is 0. Never waits for the device."""
    device = rows.topk_ids.device
    if num_valid is None:
        num_valid = len(rows) if rows.valid is None else rows.valid.sum()
    if isinstance(num_valid, Tensor):
        if num_valid.numel() != 1 or num_valid.device != device:
            raise ValueError(
                f"num_valid must be a number or one value on {device}, found {tuple(num_valid.shape)} "
                f"on {num_valid.device}"
            )
        count = num_valid.detach().reshape(()).to(dtype)
        return torch.where(count > 0, 1.0 / count, 0.0)
    if num_valid < 0:
        raise ValueError(f"num_valid must not be negative, found {num_valid}")
    return torch.full((), 1.0 / num_valid if num_valid else 0.0, dtype=dtype, device=device)
