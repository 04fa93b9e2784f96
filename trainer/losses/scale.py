"""Multiply a gradient by the incoming scalar, in float32, without asking the device what the scalar is."""

# Triton's kernels are a language of their own: their arguments have no Python types.
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
    """Return factor [] * grad; in grad's own memory if its dtype is already `dtype`.

    On CUDA a factor of exactly one (a plain `loss.backward()`) costs a launch and no memory traffic: the
    kernel looks at the scalar on the device.
    """
    on_gpu = grad.is_cuda and torch.float64 not in (grad.dtype, dtype)
    if grad.dtype != dtype:
        out = torch.empty_like(grad, dtype=dtype)
        if on_gpu:
            scale_into(grad, factor, out)
            return out
        return torch.mul(grad, factor, out=out)
    grad = grad.data  # the saved tensor's own memory: its version must not count as modified
    if on_gpu:
        scale_unless_one(grad, factor)
        return grad
    if grad.dtype == factor.dtype:
        return grad.mul_(factor)
    return grad.copy_(grad.to(factor.dtype) * factor)  # a bf16 multiply would round the factor first


if triton is not None:

    @triton.jit
    def _scale_kernel(x_ptr, factor_ptr, numel, BLOCK: tl.constexpr):
        factor = tl.load(factor_ptr)
        if factor != 1.0:
            offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            mask = offsets < numel
            x = tl.load(x_ptr + offsets, mask=mask)
            tl.store(x_ptr + offsets, (x.to(tl.float32) * factor).to(x.dtype), mask=mask)

    @triton.jit
    def _scale_into_kernel(x_ptr, factor_ptr, out_ptr, numel, BLOCK: tl.constexpr):
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < numel
        x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
        tl.store(out_ptr + offsets, (x * tl.load(factor_ptr)).to(out_ptr.dtype.element_ty), mask=mask)


def scale_unless_one(x: Tensor, factor: Tensor) -> None:
    """Multiply contiguous x by float32 factor [] in place, in float32, with Triton."""
    block = 16384
    if x.numel():
        with on_device_of(x):
            grid = (triton.cdiv(x.numel(), block),)
            _scale_kernel[grid](x, factor.to(torch.float32), x.numel(), BLOCK=block, num_warps=8)


def scale_into(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """Set out = x * float32 factor [], rounded once to out's dtype, with Triton; both contiguous."""
    block = 8192
    if x.numel():
        with on_device_of(x):
            grid = (triton.cdiv(x.numel(), block),)
            _scale_into_kernel[grid](x, factor.to(torch.float32), out, x.numel(), BLOCK=block, num_warps=8)
