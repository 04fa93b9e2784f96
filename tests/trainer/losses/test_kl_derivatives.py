"""Derivatives of kl_loss by finite differences."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.losses.cases import accepted_kd, accepted_with_mix, kd_name, make_case, rows_for, run
from trainer.losses import kl_loss


def _mixes(kd: dict) -> list[dict]:
    everything = list(accepted_with_mix(kd))
    return [everything[0], everything[-1]]


@pytest.mark.parametrize("kd", accepted_kd(), ids=kd_name)
@pytest.mark.parametrize("method", ["fused", "forward_chunked", "dense"])
def test_gradcheck_the_reported_loss_is_the_one_whose_gradient_is_returned(kd: dict, method: str) -> None:
    for options in _mixes(kd):
        case = make_case(n=3, d=4, v=9, k=3, with_bias=True, vocab_size=8, dtype=torch.float64)

        def loss(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor, case=case, options=options) -> torch.Tensor:
            extra = {"recompute": True} if method == "fused" else {}  # gradcheck goes backward more than once
            return kl_loss(
                h,
                w,
                rows_for(case, options),
                labels=case.labels,
                bias=b,
                vocab_size=8,
                chunk_size=2,
                method=method,
                **options,
                **extra,
            )

        inputs = (case.hidden.requires_grad_(), case.head_weight.requires_grad_(), case.bias.requires_grad_())
        assert torch.autograd.gradcheck(loss, inputs)


@pytest.mark.parametrize("kd", accepted_kd(), ids=kd_name)
def test_the_gradient_formed_in_the_forward_pass_matches_finite_differences(kd: dict) -> None:
    step = 1e-5
    for options in accepted_with_mix(kd):
        case = make_case(n=4, d=5, v=23, k=4, dtype=torch.float64)
        ours = run(case, options, upstream=1.0, chunk_size=3)
        g = torch.Generator().manual_seed(1)
        d_hidden = torch.randn(case.hidden.shape, generator=g, dtype=torch.float64)
        d_head = torch.randn(case.head_weight.shape, generator=g, dtype=torch.float64)

        def at(t: float, case=case, options=options, d_hidden=d_hidden, d_head=d_head) -> float:
            hidden, head = case.hidden + t * d_hidden, case.head_weight + t * d_head
            return float(kl_loss(hidden, head, rows_for(case, options), labels=case.labels, chunk_size=3, **options))

        numeric = (at(step) - at(-step)) / (2 * step)
        analytic = float((ours.hidden * d_hidden).sum() + (ours.head_weight * d_head).sum())
        assert analytic == pytest.approx(numeric, rel=1e-6, abs=1e-9), options
