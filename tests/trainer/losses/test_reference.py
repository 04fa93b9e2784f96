"""Every method and every accepted combination against the float64 twin, on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.losses.cases import accepted_kd, accepted_with_mix, exact, input_variants, kd_name, make_case, run
from trainer.losses.options import DIVERGENCES, TAILS, LossOptions

METHODS = ("fused", "forward_chunked", "dense")


FP32_BAR = 5e-6


@pytest.mark.parametrize("kd", accepted_kd(), ids=kd_name)
def test_every_accepted_combination_agrees_with_the_twin(kd: dict) -> None:
    for options in accepted_with_mix(kd):
        for variant in input_variants():
            case = make_case(**variant)
            truth = exact(case, options)
            for method in METHODS:
                error = run(case, options, method=method, chunk_size=5).relative_error(truth)
                assert error <= FP32_BAR, (method, options, variant, error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_half_precision_is_right_to_its_rounding(method: str, dtype: torch.dtype) -> None:
    for variant in input_variants():
        case = make_case(n=48, d=64, v=509, k=16, dtype=dtype, logit_std=1.0, **variant | {"vocab_size": None})
        options = {"ce_weight": 0.2}
        error = run(case, options, method=method, chunk_size=20).relative_error(exact(case, options))
        assert error <= (6e-3 if dtype == torch.bfloat16 else 2e-3), (variant, error)


def test_fp16_gradients_of_a_mean_over_many_tokens_do_not_vanish() -> None:
    case = make_case(n=8, d=16, v=4001, k=3, dtype=torch.float16, logit_std=0.1)
    options = {"num_valid": 1e6}
    truth = exact(case, {}, upstream=65_536.0, num_valid=1e6)
    assert run(case, options, upstream=65_536.0, chunk_size=3).relative_error(truth) <= 3e-3


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_jsd_at_its_ends_is_forward_and_reverse_kl(beta: float) -> None:
    case = make_case()
    end = "forward" if beta == 0.0 else "reverse"
    jsd = run(case, {"divergence": "jsd", "jsd_beta": beta})
    assert jsd.relative_error(run(case, {"divergence": end})) == 0.0


@pytest.mark.parametrize("beta", [1e-4, 1 - 1e-4])
def test_jsd_over_beta_times_one_minus_beta_tends_to_forward_and_reverse_kl(beta: float) -> None:
    case = make_case(dtype=torch.float64)
    end = "forward" if beta < 0.5 else "reverse"
    jsd = run(case, {"divergence": "jsd", "jsd_beta": beta}).loss / (beta * (1 - beta))
    assert float(jsd) == pytest.approx(float(run(case, {"divergence": end}).loss), rel=2e-2)


@st.composite
def random_call(draw: st.DrawFn) -> tuple[dict, dict, dict]:
    """Shape and inputs, options, and call arguments: anything that is accepted."""
    vocab = draw(st.integers(2, 40))
    mask = draw(st.one_of(st.none(), st.integers(1, vocab)))
    inputs = {
        "n": draw(st.integers(1, 6)),
        "d": draw(st.integers(1, 9)),
        "v": vocab,
        "k": draw(st.integers(1, mask or vocab)),
        "vocab_size": mask,
        "with_bias": draw(st.booleans()),
        "with_invalid": draw(st.booleans()),
        "labels_in_topk": draw(st.booleans()),
        "logit_std": draw(st.sampled_from([0.1, 1.5, 6.0])),
        "seed": draw(st.integers(0, 2**31)),
    }
    tail = draw(st.sampled_from(TAILS))
    tempered = tail not in ("none", "sampled") and draw(st.booleans())
    mixable = not (tail == "renormalize" and tempered)
    options = {
        "tail": tail,
        "divergence": draw(st.sampled_from(DIVERGENCES)) if tail == "bucket" else "forward",
        "jsd_beta": draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])),
        "temperature": draw(st.sampled_from([0.7, 2.0, 4.0])) if tempered else 1.0,
        "ce_weight": draw(st.sampled_from([0.0, 0.4, 1.0])) if mixable else 0.0,
        "z_loss": draw(st.sampled_from([0.0, 1e-3])) if mixable else 0.0,
        "softcap": draw(st.sampled_from([None, 3.0, 30.0])),
    }
    LossOptions(**options)
    call = {
        "method": draw(st.sampled_from(METHODS)),
        "chunk_size": draw(st.sampled_from([None, 1, 2, 4])),
    }
    if call["method"] == "fused":
        call["recompute"] = draw(st.booleans())
    return inputs, options, call


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, derandomize=True)
@given(random_call())
def test_a_thousand_random_calls_agree_with_the_twin(drawn: tuple[dict, dict, dict]) -> None:
    inputs, options, call = drawn
    case = make_case(**inputs, dtype=torch.float64)
    truth = exact(case, options)
    # Where a gradient is zero by cancellation (K = V = 1, say) it is compared on the scale of the inputs instead.
    error = run(case, options, **call).relative_error(truth, scale=_unit(truth))
    assert error <= 1e-9, error


def _unit(outcome):  # type: ignore[no-untyped-def]
    """An outcome whose gradients have norm one."""

    one = torch.ones(1, dtype=torch.float64)
    return replace(outcome, hidden=one, head_weight=one, bias=one)
