"""Fused method: hidden states and head weight in, loss and gradients out, one chunk of logits alive at a time.

For each chunk of rows: logits = hidden @ head^T; the row kernel turns them into their gradient in place;
grad_hidden = G @ head; grad_head += G^T @ hidden, in float32. Everything happens in the forward pass, so there are three
products where recomputing needs four or five, and backward only multiplies by the incoming scalar.

Cost: 6 N d V FLOP; extra memory V * d * 4 + max(chunk * V, V * d) * bytes + N * d * bytes at the worst moment:
the chunk of logits is gone when backward rounds the head's gradient to the head's dtype.

It is one custom operator, so torch.compile sees one node, and nothing in it waits for the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.losses import row_torch
from trainer.losses.forward_chunked import forward_chunked_loss
from trainer.losses.options import SCALARS, LossOptions
from trainer.losses.products import accumulator_dtype, weight_grad
from trainer.losses.rows import TeacherRows
from trainer.losses.scale import scaled, scaled_in_place

# fp16 cannot hold dloss/dlogits of a mean over many rows; the kernel works on this multiple of the sum's gradient.
FP16_SCALE = 1024.0
# Rows whose logits stay within this much memory are one chunk: fewer, larger products.
CPU_CHUNK_BYTES = 48 << 20
CUDA_SINGLE_CHUNK_BYTES = 1 << 30
# A product with d columns fills the GPU's multiprocessors best when its rows are a multiple of this.
CUDA_ROW_MULTIPLE = 128


def default_chunk_size(rows: int, hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the rows of logits that live at a time.

    On CUDA the last step of a loss holds the head's gradient twice, in float32 and in the head's dtype, after
    the chunk of logits is gone. A chunk of d rows is exactly as large as that second copy, so it is free.
    """
    row_bytes = vocab_size * dtype.itemsize
    if device.type != "cuda":
        return max(1, min(rows, CPU_CHUNK_BYTES // row_bytes))
    if rows * row_bytes <= CUDA_SINGLE_CHUNK_BYTES:
        return max(1, rows)
    limit = max(CUDA_ROW_MULTIPLE, hidden_size // CUDA_ROW_MULTIPLE * CUDA_ROW_MULTIPLE)
    return min(rows, limit)


class Settings(NamedTuple):
    """What the operator is asked for beyond its tensors."""

    vocab_size: int
    chunk_size: int
    has_invalid: bool
    needed: list[bool]  # the gradients of hidden, head_weight, bias
    recompute: bool
    wide: bool  # head_weight's gradient leaves in float32, whatever its dtype
    options: LossOptions

    def flat(self) -> tuple[Any, ...]:
        """Return the operator's arguments after its tensors: plain scalars, as its schema wants them."""
        return (*self[:-1], *self.options.to_scalars())

    @classmethod
    def of(cls, flat: tuple[Any, ...]) -> Settings:
        """Return the settings that `flat` wrote out."""
        count = len(cls._fields) - 1
        return cls._make((*flat[:count], LossOptions(*flat[count:])))


TENSORS = (
    "Tensor hidden, Tensor head_weight, Tensor? bias, Tensor topk_ids, Tensor topk_logprobs, Tensor tail_logprob, "
    "Tensor? labels, Tensor row_scale, Tensor loss_scale, Tensor? main_grad"
)
SETTINGS = "int vocab_size, int chunk_size, bool has_invalid, bool[] needed, bool recompute, bool wide"
SCHEMA = f"({TENSORS}, {SETTINGS}, {SCALARS}) -> (Tensor, Tensor, Tensor, Tensor)"


def _row_kernel(logits: Tensor, top_k: int) -> Callable[..., Tensor]:
    """Return the Triton kernel on CUDA (or under its interpreter), else torch's."""
    if logits.dtype != torch.float64 and (logits.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        from trainer.losses import row_triton

        if top_k <= row_triton.MAX_K:
            return row_triton.loss_and_grad_in_place
    return row_torch.loss_and_grad_in_place


def _padded_buffer(rows: int, vocab: int, like: Tensor) -> Tensor:
    """Return [rows, vocab] with rows aligned to 128 bytes: cuBLAS falls to slow kernels for odd leading dimensions."""
    unit = max(1, 128 // like.element_size())
    buffer = like.new_empty(rows, (vocab + unit - 1) // unit * unit)
    if not like.is_cuda:
        buffer[:, vocab:] = 0.0  # bf16 products of a CPU with AMX multiply the padding by zero, and 0 * NaN is NaN
    return buffer[:, :vocab]


@torch.library.custom_op("teachercache::fused_kl", mutates_args=(), schema=SCHEMA)
def fused_kl(
    hidden: Tensor,
    head_weight: Tensor,
    bias: Tensor | None,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    tail_logprob: Tensor,
    labels: Tensor | None,
    row_scale: Tensor,
    loss_scale: Tensor,
    main_grad: Tensor | None,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss (sum over rows times loss_scale) and the gradients of its rows scaled by row_scale.

    Returns loss [], grad_hidden [N, d], grad_weight [V, d], grad_bias [V]; what is not needed is empty.
    grad_weight is in the head's dtype if one product made it (see `_weight_grad_dtype`), else in float32.
    `main_grad` is only carried to the backward pass; `recompute` asks for no gradients now.
    """
    asked = Settings.of(settings)
    rows = TeacherRows(topk_ids, topk_logprobs, tail_logprob)
    n, vocab_size, chunk_size = len(rows), asked.vocab_size, asked.chunk_size
    acc_dtype = accumulator_dtype(hidden.dtype)
    need_hidden, need_weight, need_bias = (need and not asked.recompute for need in asked.needed)
    write_grad = need_hidden or need_weight or need_bias
    head, head_bias = head_weight[:vocab_size], None if bias is None else bias[:vocab_size]

    grad_hidden = torch.empty_like(hidden) if need_hidden else hidden.new_empty(0)
    grad_bias = bias.new_zeros(bias.shape, dtype=acc_dtype) if need_bias and bias is not None else hidden.new_empty(0)
    grad_weight = hidden.new_empty(0)
    if need_weight:
        weight_dtype = _weight_grad_dtype(head_weight, asked.wide or main_grad is not None, n, chunk_size)
        grad_weight = head_weight.new_empty(head_weight.shape, dtype=weight_dtype)
        grad_weight[vocab_size if n else 0 :].zero_()  # the products fill the rest

    logits = _padded_buffer(min(chunk_size, n), vocab_size, hidden)
    kernel = _row_kernel(logits, rows.top_k)
    losses = []
    for start in range(0, n, chunk_size):
        part = slice(start, min(start + chunk_size, n))
        h, scale = hidden[part], row_scale[part]
        if asked.has_invalid:  # the hidden state of a padding position may be NaN, and 0 * NaN would reach the head
            h = h.masked_fill((scale == 0)[:, None], 0.0)
        chunk = logits[: h.shape[0]]
        torch.mm(h, head.t(), out=chunk)
        part_labels = None if labels is None else labels[part]
        losses.append(kernel(chunk, head_bias, rows[part], part_labels, scale, asked.options, write_grad))
        if need_hidden:
            torch.mm(chunk, head, out=grad_hidden[part])
        if need_weight:
            weight_grad(chunk, h, grad_weight[:vocab_size], accumulate=start > 0)
        if need_bias:
            grad_bias[:vocab_size] += chunk.sum(dim=0, dtype=acc_dtype)
    loss = torch.cat(losses).sum() * loss_scale if losses else loss_scale * 0.0
    return loss, grad_hidden, grad_weight, grad_bias


def _weight_grad_dtype(head_weight: Tensor, wide: bool, rows: int, chunk_size: int) -> torch.dtype:
    """Return the head's own dtype if one product forms the gradient (it sums in float32, rounds once), else float32.

    fp16 stays float32 because of FP16_SCALE, and `wide` gradients go to a float32 tensor.
    """
    if rows > chunk_size or wide or head_weight.dtype == torch.float16:
        return accumulator_dtype(head_weight.dtype)
    return head_weight.dtype


@fused_kl.register_fake
def _(hidden, head_weight, bias, *args):  # type: ignore[no-untyped-def]
    main_grad, asked = args[6], Settings.of(args[7:])
    acc_dtype = accumulator_dtype(hidden.dtype)
    need_hidden, need_weight, need_bias = (need and not asked.recompute for need in asked.needed)
    wide = asked.wide or main_grad is not None
    weight_dtype = _weight_grad_dtype(head_weight, wide, hidden.shape[0], asked.chunk_size)
    return (
        hidden.new_empty((), dtype=acc_dtype),
        torch.empty_like(hidden) if need_hidden else hidden.new_empty(0),
        head_weight.new_empty(head_weight.shape, dtype=weight_dtype) if need_weight else hidden.new_empty(0),
        bias.new_empty(bias.shape, dtype=acc_dtype) if need_bias else hidden.new_empty(0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, head_weight, bias, *teacher, row_scale, loss_scale, main_grad = inputs[:10]
    ctx.asked = Settings.of(inputs[10:])
    ctx.inputs = len(inputs)
    ctx.dtype = head_weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.main_grad = main_grad
    ctx.scaled_once = False
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    if ctx.asked.recompute:
        ctx.save_for_backward(hidden, head_weight, bias, *teacher, row_scale, loss_scale)
    else:
        # Not the hidden states: nothing else may need them any more.
        ctx.save_for_backward(loss_scale, *output[1:])


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    asked: Settings = ctx.asked
    unused = (None,) * (ctx.inputs - 3)  # one for each input that has no gradient
    if grad_loss is None:
        return (None, None, None, *unused)
    # Not a plain tensor: torch.compile is tracing this (is_compiling() is not always set here), or a subclass.
    traced = torch.compiler.is_compiling() or type(grad_loss) is not Tensor
    if torch.is_grad_enabled() and not traced:
        if not asked.recompute:
            raise RuntimeError(
                "the fused loss formed its gradients in the forward pass and cannot be differentiated twice; "
                "pass recompute=True to kl_loss"
            )
        return (*_differentiable_grads(ctx, grad_loss), *unused)
    if asked.recompute:
        *tensors, loss_scale = ctx.saved_tensors
        _, *grads = fused_kl(*tensors, loss_scale, ctx.main_grad, *asked._replace(recompute=False).flat())
    else:
        if ctx.scaled_once and not traced:
            raise RuntimeError(
                "the fused loss scales its gradients in place and can go backward once; "
                "pass recompute=True to kl_loss to go backward again"
            )
        ctx.scaled_once = True
        loss_scale, *grads = ctx.saved_tensors
    grad_hidden, grad_weight, grad_bias = grads
    factor = grad_loss.to(loss_scale.dtype)
    if ctx.dtype == torch.float16:
        factor = factor * loss_scale / FP16_SCALE
    scale = scaled if traced else scaled_in_place
    need_hidden, need_weight, need_bias = asked.needed
    out_hidden = scale(grad_hidden, factor, ctx.dtype) if need_hidden else None
    out_bias = scale(grad_bias, factor, ctx.bias_dtype) if need_bias else None
    out_weight = None
    if need_weight and ctx.main_grad is not None:
        ctx.main_grad.data.addcmul_(grad_weight, factor.to(grad_weight.dtype))
    elif need_weight:
        out_weight = scale(grad_weight, factor, accumulator_dtype(ctx.dtype) if asked.wide else ctx.dtype)
    return (out_hidden, out_weight, out_bias, *unused)


def _differentiable_grads(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients by something that can itself be differentiated: plain autograd over recomputed logits."""
    hidden, head_weight, bias, ids, logprobs, tail, labels, row_scale, loss_scale = ctx.saved_tensors
    asked: Settings = ctx.asked
    rows = TeacherRows(ids, logprobs, tail, row_scale != 0)
    with torch.enable_grad():
        logits = (rows.where_valid(hidden, 0.0) if asked.has_invalid else hidden) @ head_weight[: asked.vocab_size].t()
        head_bias = None if bias is None else bias[: asked.vocab_size]
        loss = forward_chunked_loss(logits, head_bias, rows, labels, asked.options, asked.chunk_size) * loss_scale
    wanted = [x for x, need in zip((hidden, head_weight, bias), asked.needed, strict=True) if need]
    found = iter(torch.autograd.grad(loss, wanted, grad_loss, create_graph=True))
    return tuple(next(found) if need else None for need in asked.needed)


fused_kl.register_autograd(_backward, setup_context=_setup_context)


def fused_loss(
    hidden: Tensor,
    head_weight: Tensor,
    bias: Tensor | None,
    rows: TeacherRows,
    labels: Tensor | None,
    loss_scale: Tensor,
    options: LossOptions,
    vocab_size: int,
    chunk_size: int,
    recompute: bool,
) -> Tensor:
    """Call the operator with its bookkeeping: which gradients are wanted, what each row counts, a float32 main_grad.

    A head_weight whose `grad_dtype` is float32 (torch 2.10) gets its gradient in float32.

    Raises ValueError for a main_grad of another shape or dtype, RuntimeError for one under torch.compile.
    """
    grad_enabled = torch.is_grad_enabled()
    main_grad = getattr(head_weight, "main_grad", None) if grad_enabled and head_weight.requires_grad else None
    if main_grad is not None:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "head_weight.main_grad is written by the backward pass, which torch.compile would lose: "
                "call kl_loss outside the compiled region"
            )
        if main_grad.shape != head_weight.shape or main_grad.dtype != accumulator_dtype(head_weight.dtype):
            raise ValueError(
                f"head_weight.main_grad must be {accumulator_dtype(head_weight.dtype)} "
                f"{tuple(head_weight.shape)}, found {main_grad.dtype} {tuple(main_grad.shape)}"
            )
    # bf16 and float32 hold the mean's gradient; fp16 would flush it to zero (see FP16_SCALE).
    scale = torch.full_like(loss_scale, FP16_SCALE) if hidden.dtype == torch.float16 else loss_scale
    row_scale = scale.expand(len(rows)) if rows.valid is None else rows.valid * scale
    needed = [grad_enabled and x is not None and x.requires_grad for x in (hidden, head_weight, bias)]
    wide = not torch.compiler.is_compiling() and head_weight.is_leaf
    wide = wide and getattr(head_weight, "grad_dtype", None) == accumulator_dtype(head_weight.dtype)
    asked = Settings(vocab_size, chunk_size, rows.valid is not None, needed, recompute, wide, options)
    tensors = (hidden, head_weight, bias, rows.topk_ids, rows.topk_logprobs, rows.tail_logprob, labels)
    loss: Tensor = fused_kl(*tensors, row_scale.contiguous(), loss_scale, main_grad, *asked.flat())[0]
    return loss
