"""What callers rely on: shapes, refusals, chunks, accumulation, frozen parts, compilation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.trainer.losses.cases import exact, make_case, run
from trainer.losses import TeacherRows, kl_loss, online_kl_loss
from trainer.losses.fused import default_chunk_size


@pytest.mark.parametrize(
    "shape",
    [
        {"n": 1},
        {"n": 1, "k": 1},
        {"n": 7, "v": 16, "k": 16},
        {"n": 7, "v": 16, "k": 15},
        {"n": 5, "v": 50_257, "k": 100, "d": 13},
        {"n": 11, "v": 2, "k": 1, "d": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["fused", "forward_chunked", "dense"])
def test_odd_shapes(shape: dict, method: str) -> None:
    case = make_case(**shape)
    assert run(case, {"ce_weight": 0.5}, method=method).relative_error(exact(case, {"ce_weight": 0.5})) <= 5e-6


def test_ids_at_the_last_vocabulary_entry() -> None:
    case = make_case()
    ids = torch.arange(94, 101).expand(13, 7)
    rows = TeacherRows(ids, case.rows.topk_logprobs, case.rows.tail_logprob)
    last = replace(case, rows=rows, labels=torch.full((13,), 100))
    assert run(last, {"ce_weight": 0.5}).relative_error(exact(last, {"ce_weight": 0.5})) <= 5e-6


def test_non_contiguous_inputs() -> None:
    case = make_case()
    rows = TeacherRows(
        case.rows.topk_ids.T.contiguous().T,
        case.rows.topk_logprobs.T.contiguous().T,
        case.rows.tail_logprob.repeat_interleave(2)[::2],
    )
    strided = replace(
        case, hidden=case.hidden.T.contiguous().T, head_weight=case.head_weight.T.contiguous().T, rows=rows
    )
    assert run(strided, {}, chunk_size=5).relative_error(exact(case, {})) <= 5e-6


@pytest.mark.parametrize("method", ["fused", "forward_chunked", "dense"])
def test_zero_valid_rows_and_zero_rows_give_zero(method: str) -> None:
    case = make_case()
    nothing = replace(case, rows=replace(case.rows, valid=torch.zeros(13, dtype=torch.bool)))
    for empty in (nothing, replace(case, hidden=case.hidden[:0], rows=case.rows[:0], labels=case.labels[:0])):
        found = run(empty, {}, method=method)
        assert float(found.loss) == 0.0
        assert float(found.hidden.abs().sum() + found.head_weight.abs().sum()) == 0.0


def test_padding_rows_of_the_head_get_no_gradient() -> None:
    case = make_case(vocab_size=97, with_bias=True)
    found = run(case, {"z_loss": 1e-3})
    assert found.bias is not None
    assert float(found.head_weight[97:].abs().sum() + found.bias[97:].abs().sum()) == 0.0


def test_loss_and_gradients_do_not_depend_on_the_chunk() -> None:
    case = make_case(n=29, dtype=torch.float64)
    whole = run(case, {}, chunk_size=29)
    for chunk in (1, 2, 7, 28, 30, 1000, None):
        assert run(case, {}, chunk_size=chunk).relative_error(whole) <= 1e-13


@pytest.mark.parametrize("method", ["fused", "forward_chunked", "dense"])
def test_accumulated_micro_batches_equal_the_whole_batch(method: str) -> None:
    case = make_case(n=30, with_invalid=True, dtype=torch.float64)
    assert case.rows.valid is not None
    count = case.rows.valid.sum()
    whole = run(case, {}, method=method, upstream=1.0)
    head = case.head_weight.clone().requires_grad_()
    hidden = case.hidden.clone().requires_grad_()
    total = 0.0
    for part in (slice(0, 4), slice(4, 5), slice(5, 30)):
        loss = kl_loss(hidden[part], head, case.rows[part], num_valid=count, method=method, chunk_size=3)
        loss.backward()
        total += float(loss.detach())
    assert total == pytest.approx(float(whole.loss), rel=1e-12)
    torch.testing.assert_close(head.grad, whole.head_weight)
    torch.testing.assert_close(hidden.grad, whole.hidden)


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


def test_tied_embeddings_get_both_gradients() -> None:
    case = make_case(dtype=torch.float64)
    tokens = torch.randint(0, 101, (13,))

    def gradient(method: str) -> torch.Tensor:
        table = case.head_weight.clone().requires_grad_()
        kl_loss(table[tokens].tanh(), table, case.rows, method=method).backward()
        assert table.grad is not None
        return table.grad

    torch.testing.assert_close(gradient("fused"), gradient("dense"))


@pytest.mark.parametrize("recompute", [False, True])
def test_frozen_parts_get_no_gradient(recompute: bool) -> None:
    case = make_case()
    truth = exact(case, {}, upstream=1.0)
    hidden, head = case.hidden.clone().requires_grad_(), case.head_weight.clone()
    kl_loss(hidden, head, case.rows, recompute=recompute).backward()
    assert head.grad is None
    torch.testing.assert_close(hidden.grad, truth.hidden.float())
    hidden, head = case.hidden.clone(), case.head_weight.clone().requires_grad_()
    kl_loss(hidden, head, case.rows, recompute=recompute).backward()
    assert hidden.grad is None
    torch.testing.assert_close(head.grad, truth.head_weight.float())
    with torch.no_grad():
        assert float(kl_loss(hidden, head, case.rows)) == pytest.approx(float(truth.loss), rel=1e-5)


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


@pytest.mark.parametrize("recompute", [False, True])
def test_torch_compile_sees_one_graph(recompute: bool) -> None:
    case = make_case(n=20)
    hidden, head = case.hidden.requires_grad_(), case.head_weight.requires_grad_()

    def step(h: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor, tail: torch.Tensor):
        return kl_loss(h * 2, w, TeacherRows(ids, logprobs, tail), chunk_size=8, recompute=recompute) / 3

    args = (hidden, head, case.rows.topk_ids, case.rows.topk_logprobs, case.rows.tail_logprob)
    torch.compile(step, fullgraph=True, backend="aot_eager")(*args).backward()
    compiled = hidden.grad, head.grad
    hidden.grad = head.grad = None
    step(*args).backward()
    torch.testing.assert_close(compiled[0], hidden.grad)
    torch.testing.assert_close(compiled[1], head.grad)


def test_the_operator_passes_torchs_own_checks() -> None:
    from trainer.losses.fused import Settings, fused_kl
    from trainer.losses.options import LossOptions

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
        *Settings(101, 4, False, True, True, False, False, LossOptions()).flat(),
    )
    torch.library.opcheck(fused_kl, args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


REFUSED = [
    ({"method": "liger"}, "method must be one of"),
    ({"tail": "other"}, "tail must be one of"),
    ({"divergence": "hellinger"}, "divergence must be one of"),
    ({"tail": "none", "temperature": 2.0}, "temperature 1 only"),
    ({"tail": "none", "divergence": "reverse"}, "needs tail='bucket'"),
    ({"tail": "renormalize", "divergence": "jsd"}, "needs tail='bucket'"),
    ({"tail": "renormalize", "temperature": 2.0, "ce_weight": 0.1}, "cannot be mixed"),
    ({"tail": "renormalize", "temperature": 2.0, "z_loss": 0.1}, "cannot be mixed"),
    ({"temperature": 0.0}, "temperature must be positive"),
    ({"temperature": math.nan}, "temperature must be positive"),
    ({"ce_weight": 1.5}, "ce_weight must lie in"),
    ({"jsd_beta": -0.1}, "jsd_beta must lie in"),
    ({"softcap": 0.0}, "softcap must be positive"),
    ({"z_loss": -1.0}, "z_loss must be non-negative"),
    ({"recompute": True, "method": "dense"}, "recompute=True goes with"),
    ({"vocab_size": 102}, "vocab_size must lie in"),
    ({"vocab_size": 6}, "exceed the vocabulary"),
    ({"chunk_size": 0}, "chunk_size must be at least 1"),
    ({"bias": torch.zeros(5)}, "bias must be"),
    ({"ce_weight": 0.1, "labels": None}, "needs labels"),
    ({"ce_weight": 0.1, "labels": torch.zeros(4, dtype=torch.long)}, "labels must be int32 or int64"),
    ({"ce_weight": 0.1, "labels": torch.full((13,), 101)}, "lie outside"),
    ({"num_valid": -1}, "num_valid must not be negative"),
    ({"num_valid": torch.zeros(2)}, "num_valid must be"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_is_not_supported_is_refused_by_name(call: dict, message: str) -> None:
    case = make_case()
    with pytest.raises(ValueError, match=message):
        kl_loss(case.hidden, case.head_weight, case.rows, **{"labels": case.labels} | call)


def test_bad_rows_are_refused_and_invalid_rows_are_not_looked_at() -> None:
    case = make_case()
    rows = case.rows

    def changed(**fields: torch.Tensor) -> TeacherRows:
        return replace(rows, **fields)

    ids = rows.topk_ids.clone()
    ids[4, 1] = ids[4, 0]
    twice = changed(topk_ids=ids)
    ids = rows.topk_ids.clone()
    ids[2, 3] = 101
    outside = changed(topk_ids=ids)
    logprobs = rows.topk_logprobs.clone()
    logprobs[5, 0] = math.nan
    broken = changed(topk_logprobs=logprobs)
    raw_logits = changed(topk_logprobs=rows.topk_logprobs + 5)
    for bad, message in (
        (twice, r"1 of 13 teacher rows hold an id twice \(the first is row 4\)"),
        (outside, r"outside \[0, 101\) \(the first is row 2\)"),
        (broken, "NaN or infinite"),
        (raw_logits, "are these logits"),
    ):
        with pytest.raises(ValueError, match=message):
            kl_loss(case.hidden, case.head_weight, bad)
    valid = torch.ones(13, dtype=torch.bool)
    valid[4] = False
    kl_loss(case.hidden, case.head_weight, replace(twice, valid=valid))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"topk_ids": torch.zeros(13, dtype=torch.long)}, r"must be \[N, K\]"),
        ({"topk_ids": torch.zeros(13, 6, dtype=torch.long)}, "same shape"),
        ({"topk_ids": torch.zeros(13, 7)}, "int32 or int64"),
        ({"tail_logprob": torch.zeros(12)}, "tail_logprob must be"),
        ({"valid": torch.ones(13)}, "valid must be bool"),
        ({"topk_logprobs": torch.zeros(13, 7, requires_grad=True)}, "constants"),
    ],
    ids=str,
)
def test_rows_of_wrong_shape_or_type_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(make_case().rows, **fields)


def test_hidden_and_head_must_fit() -> None:
    case = make_case()
    with pytest.raises(ValueError, match="hidden must be"):
        kl_loss(case.hidden[:, :5], case.head_weight, case.rows)
    with pytest.raises(ValueError, match="share one dtype"):
        kl_loss(case.hidden.bfloat16(), case.head_weight, case.rows)
    with pytest.raises(ValueError, match="12 rows and the teacher 13"):
        kl_loss(case.hidden[:12], case.head_weight, case.rows)


def test_default_chunk_is_free_of_extra_memory_on_cuda() -> None:
    cuda = torch.device("cuda")
    assert default_chunk_size(32_768, 3072, 128_256, torch.bfloat16, cuda) == 3072
    assert default_chunk_size(4096, 4096, 128_256, torch.bfloat16, cuda) == 4096
    assert default_chunk_size(10, 64, 100, torch.float32, torch.device("cpu")) == 10


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_online_over_the_full_vocabulary_bounds_the_bucket(divergence: str, temperature: float) -> None:
    case = make_case(dtype=torch.float64)
    teacher = torch.randn(13, 101, dtype=torch.float64) * 2
    options = {"divergence": divergence, "temperature": temperature, "jsd_beta": 0.3}
    full = online_kl_loss(case.hidden, case.head_weight, teacher, **options)
    everything = online_kl_loss(case.hidden, case.head_weight, teacher, tail="bucket", top_k=101, **options)
    torch.testing.assert_close(full, everything)
    if temperature == 1.0:
        cut = online_kl_loss(case.hidden, case.head_weight, teacher, tail="bucket", top_k=7, **options)
        assert float(cut) <= float(full)
    hidden = case.hidden.requires_grad_()
    valid = torch.arange(13) != 3
    loss = online_kl_loss(hidden, case.head_weight, teacher, valid=valid, chunk_size=4, **options)
    loss.backward()
    assert hidden.grad is not None
    assert float(hidden.grad[3].abs().sum()) == 0.0
    same = online_kl_loss(case.hidden.detach()[valid], case.head_weight, teacher[valid], **options)
    torch.testing.assert_close(loss.detach(), same)


def test_online_refuses_what_needs_a_tail() -> None:
    case = make_case()
    teacher = torch.randn(13, 101)
    with pytest.raises(ValueError, match="labels, method need tail="):
        online_kl_loss(case.hidden, case.head_weight, teacher, labels=case.labels, method="fused")
    for mix in ({"ce_weight": 0.5}, {"z_loss": 0.1}):
        with pytest.raises(ValueError, match="ce_weight and z_loss must be 0"):
            online_kl_loss(case.hidden, case.head_weight, teacher, **mix)
    with pytest.raises(ValueError, match="at least 101"):
        online_kl_loss(case.hidden, case.head_weight, torch.randn(13, 100))
