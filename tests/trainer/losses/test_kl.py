"""What callers of kl_loss rely on: shapes, refusals, accumulation, frozen parts, extreme inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.trainer.losses.cases import MODE_SEEKING, accepted_kd, exact, make_case, one_sided_case, run
from trainer.losses import TeacherRows, kl_loss, online_kl_loss
from trainer.losses.online import sampled_rows


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


def test_hidden_and_head_must_fit() -> None:
    case = make_case()
    with pytest.raises(ValueError, match="hidden must be"):
        kl_loss(case.hidden[:, :5], case.head_weight, case.rows)
    with pytest.raises(ValueError, match="share one dtype"):
        kl_loss(case.hidden.bfloat16(), case.head_weight, case.rows)
    with pytest.raises(ValueError, match="12 rows and the teacher 13"):
        kl_loss(case.hidden[:12], case.head_weight, case.rows)


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
    """q_t -> 0 while p_t > 0: the loss is about p_t * gap and the outside is pushed up by p_t, spread as it is."""
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


@pytest.mark.parametrize("on_cached", [False, True], ids=["untrained", "sure"])
@pytest.mark.parametrize("options", MODE_SEEKING, ids=lambda o: f"{o['divergence']}{o.get('jsd_beta', '')}")
def test_a_student_with_all_its_mass_on_one_outcome_keeps_its_digits(options: dict, on_cached: bool) -> None:
    """The mean of log r - log s is that outcome's own to rounding: their difference must not be taken."""
    for seed in (0, 1):
        case = one_sided_case(on_cached=on_cached, seed=seed, dtype=torch.float32)
        truth = exact(case, options)
        for method in ("fused", "forward_chunked", "dense"):
            error = run(case, options, method=method).relative_error(truth)
            print(f"{method}, seed {seed}: float32 gradients {error:.1e} off float64's")
            assert error <= 5e-6, (method, seed, error)


def test_the_gradient_of_sampled_rows_is_unbiased() -> None:
    """The mean over 4,000 draws is full-vocabulary KL's to chance, and the values' mean is its value."""
    torch.manual_seed(1)
    n, d, v, entries, draws = 3, 6, 131, 8, 4000
    hidden, head = (torch.randn(*shape, dtype=torch.float64) for shape in ((n, d), (v, d)))
    teacher = torch.randn(n, v, dtype=torch.float64) * 2

    def gradient(loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        leaves = [x.clone().requires_grad_() for x in (hidden, head)]
        value = loss(*leaves)
        value.backward()
        return value.detach(), torch.cat([x.grad.flatten() for x in leaves])  # type: ignore[union-attr]

    loss, truth = gradient(lambda h, w: online_kl_loss(h, w, teacher))
    # A hundred draws a call: the chance of a mean over them is a tenth of one draw's.
    calls, each = 40, draws // 40
    rows = sampled_rows(teacher.repeat(draws, 1), entries, 2, torch.rand(draws * n, dtype=torch.float64))
    for method in ("fused", "forward_chunked", "dense"):
        found = [
            gradient(lambda h, w, i=i, m=method: kl_loss(h.repeat(each, 1), w, rows[i : i + each * n], method=m))
            for i in range(0, draws * n, each * n)
        ]
        values, gradients = (torch.stack(x) for x in zip(*found, strict=True))
        chance = gradients.var(dim=0).sum().sqrt() / calls**0.5
        off = (gradients.mean(dim=0) - truth).norm()
        print(f"{method}: the mean gradient of {draws:,} draws is {off / chance:.2f} x chance off")
        assert off <= 1.2 * chance, method
        assert abs(values.mean() - loss) <= 4 * values.std() / calls**0.5
        assert chance <= 0.05 * truth.norm()


@pytest.mark.parametrize("method", ["fused", "forward_chunked", "dense"])
def test_sampled_rows_of_the_whole_vocabulary_are_the_full_divergence(method: str) -> None:
    torch.manual_seed(0)
    hidden, head, teacher = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 6), (17, 6), (5, 17)))
    p = teacher.softmax(dim=1)
    entropy = -(p * p.log()).sum(dim=1)
    top = TeacherRows.from_logits(teacher, 17)
    rows = replace(top, exact=torch.full((5,), 17), entropy=entropy)
    full = online_kl_loss(hidden, head, teacher)
    torch.testing.assert_close(kl_loss(hidden, head, rows, method=method), full)
    without = kl_loss(hidden, head, replace(rows, entropy=None), method=method)  # the cross-entropy
    torch.testing.assert_close(without, full + entropy.mean())


def test_sampled_rows_refuse_other_tails_and_cut_to_exact_entries() -> None:
    torch.manual_seed(0)
    hidden, head, teacher = torch.randn(4, 6), torch.randn(50, 6), torch.randn(4, 50)
    rows = sampled_rows(teacher, 8, 3, torch.rand(4, dtype=torch.float64))
    for tail in ("bucket", "none", "renormalize"):
        with pytest.raises(ValueError, match="does not go with sampled rows"):
            kl_loss(hidden, head, rows, tail=tail)
    for wanted in ({"divergence": "reverse"}, {"divergence": "jsd"}, {"temperature": 2.0}):
        with pytest.raises(ValueError, match=r"forward KL at temperature 1 alone.*data.top_k"):
            kl_loss(hidden, head, rows, **wanted)
        cut, top = rows.truncate(3), TeacherRows.from_logits(teacher, 3)
        torch.testing.assert_close(kl_loss(hidden, head, cut, **wanted), kl_loss(hidden, head, top, **wanted))
    with pytest.raises(ValueError, match="as few as 3 exact"):
        rows.truncate(4)
    with pytest.raises(ValueError, match=r"needs the unbiased rows.*kind: sampled"):
        kl_loss(hidden, head, TeacherRows.from_logits(teacher, 8), tail="sampled")
    with pytest.raises(ValueError, match=r"exact entries outside \[1, 8\]"):
        kl_loss(hidden, head, replace(rows, exact=torch.zeros(4, dtype=torch.int64)))
