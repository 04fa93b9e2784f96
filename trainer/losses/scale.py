"""Multiply a gradient by the incoming scalar, in float32, without asking the device what the scalar is."""

# Triton's kernels are another language: their arguments have no Python types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor

from trainer.losses.products import on_device_of

try:
    import triton
    import triton.language as tl
except ImportError:  # without a GPU, torch does it
    triton = None


def scaled(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return factor [] * grad as a new tensor of `dtype`. What torch.compile traces."""
    return (grad.to(factor.dtype) * factor).to(dtype)


def scaled_in_place(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return factor [] * grad, rounded once to `dtype`; in grad's own memory if that is its dtype.

    On CUDA a factor of exactly one (a plain `loss.backward()`) costs a launch and no memory traffic: the
    kernel looks at the scalar on the device.
    """
    grad = grad.data  # the saved tensor's own memory: its version must not count as modified
    out = grad if grad.dtype == dtype else torch.empty_like(grad, dtype=dtype)
    if grad.is_cuda and torch.float64 not in (grad.dtype, dtype):
        scale_into(grad, factor, out)
    elif grad.dtype == factor.dtype:
        torch.mul(grad, factor, out=out)
    else:
        out.copy_(grad.to(factor.dtype) * factor)  # a bf16 multiply would round the factor first
    return out


if triton is not None:

    @triton.jit
    def _scale_kernel(x_ptr, factor_ptr, out_ptr, numel, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
        factor = tl.load(factor_ptr)
        if not IN_PLACE or factor != 1.0:
            offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            mask = offsets < numel
            x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
            tl.store(out_ptr + offsets, (x * factor).to(out_ptr.dtype.element_ty), mask=mask)


def scale_into(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """Set out = x * float32 factor [] with Triton; both contiguous. Where out is x, a factor of one does nothing."""
    in_place = out is x
    block = 16384 if in_place else 8192
    if x.numel():
        grid = (triton.cdiv(x.numel(), block),)
        with on_device_of(x):
            _scale_kernel[grid](x, factor.to(torch.float32), out, x.numel(), in_place, BLOCK=block, num_warps=8)
