"""What the losses share about matrix products: which GPU, which dtype sums, and the head's gradient."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Make x's GPU current while a Triton kernel starts: Triton takes the current GPU, torch's operators x's own."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums are taken in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def weight_grad(grad_logits: Tensor, hidden: Tensor, out: Tensor, accumulate: bool) -> None:
    """Set out [V, d] (+)= grad_logits [n, V]^T @ hidden [n, d], summed in `out`'s dtype.

    CUDA multiplies bf16 and fp16 operands into a float32 `out` directly; the CPU converts the operands.
    """
    left, options = grad_logits.t(), dict[str, Any](out=out)
    if out.is_cuda and out.dtype != grad_logits.dtype:
        options["out_dtype"] = out.dtype
    else:
        left, hidden = left.to(out.dtype), hidden.to(out.dtype)
    if accumulate:
        torch.addmm(out, left, hidden, **options)
    else:
        torch.mm(left, hidden, **options)
