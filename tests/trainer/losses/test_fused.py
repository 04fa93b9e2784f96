"""The fused method: main_grad, backward twice, one graph under torch.compile, chunks."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.losses.cases import exact, make_case, run
from trainer.losses import TeacherRows, kl_loss
from trainer.losses.fused import Settings, default_chunk_size, fused_kl
from trainer.losses.options import LossOptions


def test_main_grad_accumulates_in_float32_and_leaves_grad_alone() -> None:
    case = make_case(n=40, dtype=torch.bfloat16)
    head = case.head_weight.requires_grad_()
    head.main_grad = torch.zeros(head.shape)  # type: ignore[attr-defined]
    hidden = case.hidden.requires_grad_()
    for part in (slice(0, 10), slice(10, 40)):
        (kl_loss(hidden[part], head, case.rows[part], num_valid=40, chunk_size=8) * 3).backward()
    assert head.grad is None
    truth = exact(case, {})
    error = (head.main_grad.double() - truth.head_weight).norm() / truth.head_weight.norm()  # type: ignore[attr-defined]
    assert float(error) <= 5e-3
    head.main_grad = torch.zeros(3)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"main_grad must be torch\.float32"):
        kl_loss(hidden, head, case.rows)


@pytest.mark.parametrize("chunk_size", [8, 100])
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="Tensor.grad_dtype came with torch 2.10")
def test_a_head_that_wants_its_gradient_in_float32_gets_what_main_grad_gets(chunk_size: int) -> None:
    case = make_case(n=40, dtype=torch.bfloat16)
    gradients = []
    for wide in (True, False):
        head = case.head_weight.clone().requires_grad_()
        if wide:
            head.grad_dtype = torch.float32
        else:
            head.main_grad = torch.zeros(head.shape)  # type: ignore[attr-defined]
        kl_loss(case.hidden, head, case.rows, chunk_size=chunk_size).backward()
        gradients.append(head.grad if wide else head.main_grad)  # type: ignore[attr-defined]
    assert gradients[0] is not None
    assert gradients[0].dtype == torch.float32
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_backward_twice_needs_recompute() -> None:
    case = make_case()
    hidden = case.hidden.requires_grad_()
    loss = kl_loss(hidden, case.head_weight, case.rows)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="recompute=True"):
        loss.backward()
    with pytest.raises(RuntimeError, match="recompute=True"):
        torch.autograd.grad(kl_loss(hidden, case.head_weight, case.rows), hidden, create_graph=True)
    hidden.grad = None
    loss = kl_loss(hidden, case.head_weight, case.rows, recompute=True)
    loss.backward(retain_graph=True)
    first = hidden.grad.clone()
    loss.backward()
    torch.testing.assert_close(hidden.grad, 2 * first)


def test_same_inputs_twice_give_bitwise_equal_results() -> None:
    case = make_case(n=50, dtype=torch.bfloat16)
    first, second = (run(case, {}, chunk_size=16) for _ in range(2))
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(first.hidden, second.hidden)
    assert torch.equal(first.head_weight, second.head_weight)


@pytest.mark.parametrize(
    "call",
    [{"recompute": False}, {"recompute": True}, {"options": LossOptions(temperature=2.0), "softcap": 5.0}],
    ids=str,
)
def test_torch_compile_sees_one_graph(call: dict) -> None:
    case = make_case(n=20)
    hidden, head = case.hidden.requires_grad_(), case.head_weight.requires_grad_()

    def step(h: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor, tail: torch.Tensor):
        return kl_loss(h * 2, w, TeacherRows(ids, logprobs, tail), chunk_size=8, **call) / 3

    args = (hidden, head, case.rows.topk_ids, case.rows.topk_logprobs, case.rows.tail_logprob)
    torch.compile(step, fullgraph=True, backend="aot_eager")(*args).backward()
    compiled = hidden.grad, head.grad
    hidden.grad = head.grad = None
    step(*args).backward()
    torch.testing.assert_close(compiled[0], hidden.grad)
    torch.testing.assert_close(compiled[1], head.grad)


def test_the_operator_passes_torchs_own_checks() -> None:

    case = make_case(n=6)
    args = (
        case.hidden.requires_grad_(),
        case.head_weight.requires_grad_(),
        None,
        case.rows.topk_ids,
        case.rows.topk_logprobs,
        case.rows.tail_logprob,
        None,
        torch.full((6,), 1 / 6),
        torch.tensor(1 / 6),
        None,
        *Settings(101, 4, False, [True, True, False], False, False, LossOptions()).flat(),
    )
    torch.library.opcheck(fused_kl, args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


def test_default_chunk_is_free_of_extra_memory_on_cuda() -> None:
    cuda = torch.device("cuda")
    assert default_chunk_size(32_768, 3072, 128_256, torch.bfloat16, cuda) == 3072
    assert default_chunk_size(4096, 4096, 128_256, torch.bfloat16, cuda) == 4096
    assert default_chunk_size(10, 64, 100, torch.float32, torch.device("cpu")) == 10


def test_double_backward_through_recompute() -> None:
    for options in ({}, {"divergence": "reverse", "temperature": 2.0}, {"tail": "none", "softcap": 4.0}):
        case = make_case(n=3, d=3, v=7, k=2, dtype=torch.float64)

        def loss(h: torch.Tensor, w: torch.Tensor, case=case, options=options) -> torch.Tensor:
            return kl_loss(h, w, case.rows, recompute=True, chunk_size=2, **options)

        assert torch.autograd.gradgradcheck(loss, (case.hidden.requires_grad_(), case.head_weight.requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_memory_held_before_does_not_reach_the_gradient(dtype: torch.dtype) -> None:
    """A buffer of logits has padding behind the vocabulary, which bf16 products of a CPU with AMX read."""
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        for v in (509, 1000):
            found = run(make_case(n=48, d=64, v=v, k=16, dtype=dtype, logit_std=1.0), {}, chunk_size=20)
            for part in (found.loss, found.hidden, found.head_weight):
                assert torch.isfinite(part).all(), v
    finally:
        torch.use_deterministic_algorithms(False)
