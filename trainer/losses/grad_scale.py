"""Multiply a gradient by the incoming scalar, in float32, without asking the device what the scalar is."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """factor [] * grad as a new tensor of `dtype`. What torch.compile traces."""
    return (grad.to(factor.dtype) * factor).to(dtype)


def scaled_in_place(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """factor [] * grad; in grad's own memory if its dtype is already `dtype`.

    On CUDA a factor of exactly one (a plain `loss.backward()`) costs a launch and no memory traffic: the
    kernel looks at the scalar on the device.
    """
    on_gpu = grad.is_cuda and torch.float64 not in (grad.dtype, dtype)
    if grad.dtype != dtype:
        out = torch.empty_like(grad, dtype=dtype)
        if on_gpu:
            from trainer.losses.triton_scale import scale_into

            scale_into(grad, factor, out)
            return out
        return torch.mul(grad, factor, out=out)
    grad = grad.data  # the saved tensor's own memory: its version must not count as modified
    if on_gpu:
        from trainer.losses.triton_scale import scale_unless_one

        scale_unless_one(grad, factor)
        return grad
    if grad.dtype == factor.dtype:
        return grad.mul_(factor)
    return grad.copy_(grad.to(factor.dtype) * factor)  # a bf16 multiply would round the factor first
