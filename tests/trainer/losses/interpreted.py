"""Run the Triton row kernel under Triton's interpreter on the CPU; a child process, since the switch is read at import.

Prints the worst error against the float64 twin. Started by test_row_triton.py.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor

from tests.trainer.losses.cases import (
    MODE_SEEKING,
    accepted_kd,
    accepted_with_mix,
    exact,
    input_variants,
    make_case,
    one_sided_case,
    run,
)
from trainer.losses import TeacherRows, kl_loss, row_triton

# Several full blocks and a ragged one over 101 columns.
row_triton.DEFAULT_CONFIG = row_triton.LaunchConfig(block=32)


def combinations() -> float:
    """Every accepted divergence, tail and temperature, each with a rotating choice of mix and inputs."""
    worst = 0.0
    variants = list(input_variants())
    turn = 0
    for kd in accepted_kd():
        for options in accepted_with_mix(kd):
            case = make_case(n=5, **variants[turn % len(variants)], seed=turn)
            turn += 3
            error = run(case, options, chunk_size=3).relative_error(exact(case, options))
            assert error <= 5e-6, (options, error)
            worst = max(worst, error)
    return worst


def shapes() -> float:
    """One row, K = 1, K = V, an odd vocabulary, a vocabulary that is a multiple of the block."""
    worst = 0.0
    for shape in (
        {"n": 1, "k": 1},
        {"n": 3, "v": 64, "k": 64},
        {"n": 3, "v": 64, "k": 63},
        {"n": 2, "v": 257, "k": 100, "d": 13},
        {"n": 2, "v": 96, "k": 3},
    ):
        case = make_case(**shape)
        error = run(case, {}, chunk_size=2).relative_error(exact(case, {}))
        assert error <= 5e-6, (shape, error)
        worst = max(worst, error)
    return worst


def strided() -> float:
    """Rows, bias and labels that are columns of something wider."""
    case = make_case(n=5, with_bias=True)
    options = {"ce_weight": 0.3}

    def column(x: Tensor) -> Tensor:
        return torch.stack([x, x.flip(0)], dim=1)[:, 0]

    rows = TeacherRows(
        case.rows.topk_ids.t().contiguous().t(),
        case.rows.topk_logprobs.t().contiguous().t(),
        column(case.rows.tail_logprob),
    )
    bias = column(case.bias)  # type: ignore[arg-type]
    ours = kl_loss(case.hidden, case.head_weight, rows, labels=column(case.labels), bias=bias, chunk_size=3, **options)  # type: ignore[arg-type]
    error = float((ours - exact(case, options).loss).abs())
    assert error <= 5e-6, error
    return error


def extreme_logits() -> float:
    """Logits far beyond float32's exponent range around the known offset: the kernel's second way to sum."""
    worst = 0.0
    for logit_std in (100.0, 1e4):
        for kd in accepted_kd():
            case = make_case(n=6, logit_std=logit_std)
            error = run(case, kd, chunk_size=4).relative_error(exact(case, kd), scale=exact(case, {}))
            assert error <= 1e-5 + 2e-6 * logit_std, (kd, logit_std, error)
            worst = max(worst, error / logit_std)
    return worst


def one_sided() -> float:
    """A student with nearly all its mass on one outcome, over a large vocabulary in large blocks."""
    small, row_triton.DEFAULT_CONFIG = row_triton.DEFAULT_CONFIG, row_triton.LaunchConfig()
    worst = 0.0
    for options in MODE_SEEKING:
        for on_cached in (False, True):
            case = one_sided_case(on_cached=on_cached, dtype=torch.float32)
            error = run(case, options).relative_error(exact(case, options))
            assert error <= 5e-6, (options, on_cached, error)
            worst = max(worst, error)
    row_triton.DEFAULT_CONFIG = small
    return worst


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "start with TRITON_INTERPRET=1"
    print(
        f"combinations {combinations():.1e}, shapes {shapes():.1e}, extreme logits {extreme_logits():.1e} per unit, "
        f"strided {strided():.1e}, one-sided {one_sided():.1e}"
    )
    sys.exit(0)
