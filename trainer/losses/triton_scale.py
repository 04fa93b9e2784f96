"""Multiply by a scalar that lives on the device, without asking the device for it."""

# Triton's kernels are a language of their own: their arguments have no Python types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.losses.products import on_device_of


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, numel, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < numel
        x = tl.load(x_ptr + offsets, mask=mask)
        tl.store(x_ptr + offsets, (x.to(tl.float32) * factor).to(x.dtype), mask=mask)


def scale_unless_one(x: Tensor, factor: Tensor) -> None:
    """Multiply contiguous x by float32 factor [] in place, in float32."""
    block = 16384
    grid = (triton.cdiv(x.numel(), block),)
    if x.numel():
        with on_device_of(x):
            _scale_kernel[grid](x, factor.to(torch.float32), x.numel(), BLOCK=block, num_warps=8)


@triton.jit
def _scale_into_kernel(x_ptr, factor_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    tl.store(out_ptr + offsets, (x * tl.load(factor_ptr)).to(out_ptr.dtype.element_ty), mask=mask)


def scale_into(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """out = x * float32 factor [], rounded once to out's dtype; both contiguous."""
    block = 8192
    if x.numel():
        grid = (triton.cdiv(x.numel(), block),)
        with on_device_of(x):
            _scale_into_kernel[grid](x, factor.to(torch.float32), out, x.numel(), BLOCK=block, num_warps=8)
