"""The three matrix products of the fused loss, with the head's gradient accumulated in at least float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# Rows per call of the logits product and of the hidden states' gradient on CUDA; None for a whole chunk.
LOGITS_ROWS: int | None = None
GRAD_HIDDEN_ROWS: int | None = None


def mm_by_rows(left: Tensor, right: Tensor, out: Tensor, rows: int | None) -> None:
    """out = left @ right, in calls of at most `rows` rows of `left`."""
    if rows is None or not left.is_cuda or left.shape[0] <= rows:
        torch.mm(left, right, out=out)
        return
    for start in range(0, left.shape[0], rows):
        part = slice(start, start + rows)
        torch.mm(left[part], right, out=out[part])


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """While a Triton kernel starts: Triton takes the current GPU and its stream, where torch's operators take x's own."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def weight_grad(grad_logits: Tensor, hidden: Tensor, out: Tensor, accumulate: bool) -> None:
    """out [V, d] (+)= grad_logits [n, V]^T @ hidden [n, d], summed in `out`'s dtype.

    CUDA multiplies bf16 and fp16 operands into a float32 `out` directly; the CPU converts the operands.
    """
    left = grad_logits.t()
    if out.dtype == grad_logits.dtype:
        if accumulate:
            out.addmm_(left, hidden)
        else:
            torch.mm(left, hidden, out=out)
    elif out.is_cuda:
        if accumulate:
            torch.addmm(out, left, hidden, out_dtype=out.dtype, out=out)
        else:
            torch.mm(left, hidden, out_dtype=out.dtype, out=out)
    else:
        left, hidden = left.to(out.dtype), hidden.to(out.dtype)
        if accumulate:
            out.addmm_(left, hidden)
        else:
            torch.mm(left, hidden, out=out)
