"""The CUDA path against the float64 twin, and its promises on one GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.trainer.losses.cases import (
    MODE_SEEKING,
    accepted_kd,
    accepted_with_mix,
    exact,
    input_variants,
    kd_name,
    make_case,
    one_sided_case,
    run,
)
from trainer.losses import TeacherRows, kl_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = {"n": 64, "d": 64, "v": 509, "k": 16, "logit_std": 1.0, "device": "cuda"}
BF16_BAR, FP16_BAR, FP32_BAR = 5e-3, 2e-3, 5e-6


@pytest.mark.parametrize("kd", accepted_kd(), ids=kd_name)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_every_accepted_combination_is_right_in_bf16_and_as_right_as_dense(kd: dict, with_bias: bool) -> None:
    worst, worst_ratio = 0.0, 0.0
    for options in accepted_with_mix(kd):
        for variant in input_variants():
            if variant["with_bias"] != with_bias:
                continue
            if variant["vocab_size"]:
                variant = variant | {"vocab_size": 500}
            case = make_case(**SHAPE, **variant, dtype=torch.bfloat16)
            # An upstream gradient that is no power of two rounds the hidden states' gradient once more.
            truth = exact(case, options, upstream=1.0)
            fused = run(case, options, upstream=1.0, chunk_size=40)
            dense = run(case, options, upstream=1.0, method="dense")
            assert fused.relative_error(truth) <= BF16_BAR, (options, variant)
            # The bias is left out: dense sums its gradient from float32 where fused sums what is rounded to bf16.
            error, dense_error = (
                replace(x, bias=None).relative_error(replace(truth, bias=None)) for x in (fused, dense)
            )
            assert error <= 1.2 * dense_error, (options, variant, error, dense_error)
            worst, worst_ratio = max(worst, error), max(worst_ratio, error / dense_error)
    print(f"{kd_name(kd)} bf16: worst error {worst:.1e}, at most {worst_ratio:.2f} of dense's")
    truth, ours = exact(case, options, upstream=3.0), run(case, options, upstream=3.0, chunk_size=40)
    assert ours.relative_error(truth) <= BF16_BAR


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, FP32_BAR), (torch.float16, FP16_BAR)], ids=["fp32", "fp16"])
@pytest.mark.parametrize("kd", accepted_kd(), ids=kd_name)
def test_fp32_and_fp16_are_right(kd: dict, dtype: torch.dtype, bar: float) -> None:
    for options in accepted_with_mix(kd):
        if (options["ce_weight"] > 0) != (options["z_loss"] > 0):
            continue
        case = make_case(**SHAPE, with_bias=True, with_invalid=True, dtype=dtype)
        error = run(case, options, chunk_size=40).relative_error(exact(case, options))
        assert error <= bar, (options, error)


@pytest.mark.parametrize(
    "shape",
    [
        {"n": 1, "d": 64, "v": 509, "k": 16},
        {"n": 37, "d": 100, "v": 50_257, "k": 100},
        {"n": 33, "d": 13, "v": 257, "k": 1},
        {"n": 9, "d": 16, "v": 64, "k": 64},
        {"n": 5, "d": 16, "v": 9001, "k": 5000},
    ],
    ids=str,
)
def test_odd_shapes(shape: dict) -> None:
    for dtype, bar in ((torch.bfloat16, 6e-3), (torch.float32, FP32_BAR)):
        case = make_case(**shape, device="cuda", dtype=dtype, logit_std=1.0)
        assert run(case, {}, chunk_size=16).relative_error(exact(case, {})) <= bar


def test_extreme_logits_are_finite_and_right() -> None:
    for scale in (30.0, 1e3, 1e4):
        case = make_case(**SHAPE | {"logit_std": scale}, dtype=torch.float32)
        for kd in accepted_kd():
            ours, truth = run(case, kd, chunk_size=40), exact(case, kd)
            assert torch.isfinite(ours.loss)
            assert torch.isfinite(ours.hidden).all()
            assert torch.isfinite(ours.head_weight).all()
            # Float32 logits of this size carry 1e-7 of it as an absolute error, which no softmax can undo.
            assert ours.relative_error(truth, scale=exact(case, {})) <= 1e-4 + 2e-6 * scale, (scale, kd)


@pytest.mark.parametrize("on_cached", [False, True], ids=["untrained", "sure"])
def test_a_student_with_all_its_mass_on_one_outcome_is_as_right_as_dense(on_cached: bool) -> None:
    for options in MODE_SEEKING:
        case = one_sided_case(on_cached=on_cached, device="cuda", dtype=torch.float32)
        error = run(case, options).relative_error(exact(case, options))
        assert error <= FP32_BAR, (options, error)
        case = one_sided_case(on_cached=on_cached, device="cuda", dtype=torch.bfloat16)
        truth = exact(case, options, upstream=1.0)
        fused, dense = (
            run(case, options, upstream=1.0, method=method).relative_error(truth) for method in ("fused", "dense")
        )
        print(f"{options}: fp32 {error:.1e}, bf16 {fused:.1e}, dense {dense:.1e}")
        assert fused <= 1.2 * dense, (options, fused, dense)


def _large() -> tuple[torch.Tensor, torch.Tensor, TeacherRows]:
    case = make_case(n=3000, d=256, v=32_000, k=100, device="cuda", dtype=torch.bfloat16, logit_std=1.0)
    return case.hidden.requires_grad_(), case.head_weight.requires_grad_(), case.rows


def test_same_inputs_twice_give_bitwise_equal_results() -> None:
    hidden, head, rows = _large()
    outcomes = []
    for _ in range(3):
        hidden.grad = head.grad = None
        loss = kl_loss(hidden, head, rows, chunk_size=768)
        loss.backward()
        outcomes.append((loss.detach(), hidden.grad, head.grad))
    for other in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], other, strict=True))


def test_nothing_waits_for_the_device() -> None:
    hidden, head, rows = _large()
    rows = TeacherRows(rows.topk_ids, rows.topk_logprobs, rows.tail_logprob, torch.rand(3000, device="cuda") > 0.2)
    kl_loss(hidden, head, rows).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for options in ({}, {"recompute": True}, {"chunk_size": 768, "z_loss": 1e-4}):
            (kl_loss(hidden, head, rows, validate=False, **options) / 3).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_torch_compile_sees_one_graph() -> None:
    hidden, head, rows = _large()

    def step(h: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor, tail: torch.Tensor):
        return kl_loss(h * 2, w, TeacherRows(ids, logprobs, tail), chunk_size=768) / 2

    args = (rows.topk_ids, rows.topk_logprobs, rows.tail_logprob)
    torch.compile(step, fullgraph=True)(hidden, head, *args).backward()
    compiled = hidden.grad, head.grad
    hidden.grad = head.grad = None
    step(hidden, head, *args).backward()
    assert (compiled[0] - hidden.grad).float().norm() <= 5e-3 * hidden.grad.float().norm()
    assert (compiled[1] - head.grad).float().norm() <= 5e-3 * head.grad.float().norm()


def test_main_grad_accumulates_in_float32() -> None:
    hidden, head, rows = _large()
    head.main_grad = torch.zeros_like(head, dtype=torch.float32)
    for _ in range(2):
        (kl_loss(hidden, head, rows, chunk_size=768) / 2).backward()
    assert head.grad is None
    exact_hidden, exact_head = hidden.detach().float().requires_grad_(), head.detach().float().requires_grad_()
    kl_loss(exact_hidden, exact_head, rows, chunk_size=768).backward()
    assert (head.main_grad - exact_head.grad).norm() <= 5e-3 * exact_head.grad.norm()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_loss_on_another_gpu_than_the_current_one() -> None:
    for dtype, bar in ((torch.bfloat16, BF16_BAR), (torch.float16, FP16_BAR), (torch.float32, FP32_BAR)):
        case = make_case(**SHAPE | {"device": "cuda:1"}, dtype=dtype)
        assert torch.cuda.current_device() == 0
        assert run(case, {}, chunk_size=40).relative_error(exact(case, {})) <= bar
