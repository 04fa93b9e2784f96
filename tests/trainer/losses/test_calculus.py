"""Derivatives by finite differences, and the places where calculus on computers goes wrong."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.losses.cases import accepted_kd, accepted_with_mix, exact, kd_name, make_case, run
from trainer.losses import TeacherRows, kl_loss
from trainer.losses.options import LossOptions
from trainer.losses.row_math import row_loss, row_loss_and_grad, teacher_log_vector


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
                case.rows,
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
            return float(kl_loss(hidden, head, case.rows, labels=case.labels, chunk_size=3, **options))

        numeric = (at(step) - at(-step)) / (2 * step)
        analytic = float((ours.hidden * d_hidden).sum() + (ours.head_weight * d_head).sum())
        assert analytic == pytest.approx(numeric, rel=1e-6, abs=1e-9), options


def test_double_backward_through_recompute() -> None:
    for options in ({}, {"divergence": "reverse", "temperature": 2.0}, {"tail": "none", "softcap": 4.0}):
        case = make_case(n=3, d=3, v=7, k=2, dtype=torch.float64)

        def loss(h: torch.Tensor, w: torch.Tensor, case=case, options=options) -> torch.Tensor:
            return kl_loss(h, w, case.rows, recompute=True, chunk_size=2, **options)

        assert torch.autograd.gradgradcheck(loss, (case.hidden.requires_grad_(), case.head_weight.requires_grad_()))


@pytest.mark.parametrize("kd", accepted_kd(), ids=kd_name)
def test_row_gradients_written_out_equal_autograd(kd: dict) -> None:
    for options in (LossOptions(**o) for o in accepted_with_mix(kd)):
        g = torch.Generator().manual_seed(3)
        y = torch.randn(6, 5, generator=g, dtype=torch.float64).requires_grad_()
        teacher = torch.log_softmax(torch.randn(6, 5, generator=g, dtype=torch.float64), 1)
        rows = TeacherRows(torch.arange(4).expand(6, 4), teacher[:, :4], teacher[:, 4])
        log_s = teacher_log_vector(rows, options, True)
        z_label = torch.zeros(6, dtype=torch.float64)
        scale = options.logit_scale
        row_loss(y[:, :4] * scale, y[:, 4] * scale, z_label, log_s, options, True).sum().backward()
        ours = row_loss_and_grad(y.detach()[:, :4] * scale, y.detach()[:, 4] * scale, z_label, log_s, options, True)
        assert y.grad is not None
        torch.testing.assert_close(ours.topk, y.grad[:, :4])
        torch.testing.assert_close(ours.outside, y.grad[:, 4])


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("method", ["fused", "forward_chunked", "dense"])
def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient(
    divergence: str, temperature: float, method: str
) -> None:
    case = make_case(dtype=torch.float64)
    rows = TeacherRows.from_logits(case.hidden @ case.head_weight.T, 7)
    from dataclasses import replace

    found = run(replace(case, rows=rows), {"divergence": divergence, "temperature": temperature}, method=method)
    assert abs(float(found.loss)) <= 1e-12
    assert float(found.hidden.norm()) <= 1e-12
    assert float(found.head_weight.norm()) <= 1e-12


@pytest.mark.parametrize("scale", [30.0, 1e3, 1e4])
@pytest.mark.parametrize("method", ["fused", "forward_chunked", "dense"])
def test_extreme_logits_are_finite_and_right(scale: float, method: str) -> None:
    case = make_case(logit_std=scale)
    reference = exact(case, {})
    for kd in accepted_kd():
        ours = run(case, kd, method=method, chunk_size=5)
        for part in (ours.loss, ours.hidden, ours.head_weight):
            assert torch.isfinite(part).all(), kd
        # Float32 logits of this size carry 1e-7 of it as an absolute error, which no softmax can undo.
        assert ours.relative_error(exact(case, kd), scale=reference) <= 1e-5 + 2e-6 * scale, kd


@pytest.mark.parametrize("gap", [50.0, 200.0, 1e4])
def test_a_student_without_mass_outside_the_cached_ids(gap: float) -> None:
    """q_t -> 0 while p_t > 0: the loss is about p_t * gap and the outside is pushed up by p_t, spread as it stands."""
    z = torch.randn(4, 12, dtype=torch.float64)
    z[:, :3] += gap
    ids = torch.arange(3).expand(4, 3)
    logprobs = torch.log(torch.tensor([0.5, 0.3, 0.1])).expand(4, 3)
    rows = TeacherRows(ids, logprobs, torch.full((4,), 0.1).log())
    for dtype in (torch.float64, torch.float32):
        hidden, eye = z.to(dtype, copy=True).requires_grad_(), torch.eye(12, dtype=dtype)
        loss = kl_loss(hidden, eye, rows, num_valid=1)
        loss.backward()
        assert float(loss.detach()) == pytest.approx(0.1 * gap * 4, rel=0.2)
        pushed = -0.1 * torch.softmax(z[:, 3:], dim=1)
        assert hidden.grad is not None
        torch.testing.assert_close(hidden.grad[:, 3:].double(), pushed, rtol=2e-3, atol=1e-9)


def test_a_teacher_whose_top_k_hold_all_its_mass_to_rounding() -> None:
    case = make_case()
    probs = torch.softmax(torch.randn(13, 7), dim=1)
    rows = TeacherRows(case.rows.topk_ids, probs.log(), torch.full((13,), 2.0**-23).log())
    from dataclasses import replace

    sharp = replace(case, rows=rows)
    for kd in accepted_kd():
        assert run(sharp, kd, chunk_size=5).relative_error(exact(sharp, kd)) <= 5e-6, kd
