"""Scaling a gradient by the incoming scalar."""

from __future__ import annotations

import pytest
import torch

from trainer.losses.scale import scaled, scaled_in_place

HALF = (torch.bfloat16, torch.float16)
PAIRS = [(x, x) for x in (*HALF, torch.float32, torch.float64)] + [(torch.float32, x) for x in HALF]


@pytest.mark.parametrize(("source", "dtype"), PAIRS, ids=str)
def test_in_place_and_traced_scaling_agree_and_reuse_memory_of_the_same_dtype(
    source: torch.dtype, dtype: torch.dtype
) -> None:
    grad = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(source)
    factor = torch.tensor(1 / 3, dtype=torch.float64 if source == torch.float64 else torch.float32)
    expected = (grad.double() * factor.double()).to(dtype)
    assert torch.equal(scaled(grad, factor, dtype), scaled_in_place(grad.clone(), factor, dtype))
    torch.testing.assert_close(scaled(grad, factor, dtype), expected)
    found = scaled_in_place(grad, factor, dtype)
    assert (found.data_ptr() == grad.data_ptr()) == (source == dtype)
