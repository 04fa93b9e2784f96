"""The head's gradient is summed in the dtype of its buffer."""

from __future__ import annotations

import pytest
import torch

from trainer.losses.products import accumulator_dtype, weight_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_weight_grad_sets_then_adds_in_the_accumulators_dtype(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    grad, hidden = (torch.randn(6, n, generator=g, dtype=torch.float64).to(dtype) for n in (11, 4))
    out = torch.full((11, 4), torch.nan, dtype=accumulator_dtype(dtype))
    exact = grad.double().t() @ hidden.double()
    weight_grad(grad, hidden, out, accumulate=False)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    weight_grad(grad, hidden, out, accumulate=True)
    torch.testing.assert_close(out.double(), 2 * exact, rtol=1e-5, atol=1e-6)
