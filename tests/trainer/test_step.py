"""A step's gradient is that of the whole batch, however it is split, padded, checkpointed or computed."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import teachercache
from teachercache.errors import UsageError
from trainer.config import TrainerConfig, load_config
from trainer.data import PackedCache, PackedSequence
from trainer.data.sequence import NO_LABEL, pack_records
from trainer.model import activation, student
from trainer.model.attention import DocumentLayout
from trainer.optim import (
    accumulate_in_float32,
    build_optimizer,
    clear_gradients,
    gradient,
    gradient_norm,
)
from trainer.step import Step, TrainingDiverged

CPU = torch.device("cpu")


def make_step(folder: Path, dtype: torch.dtype = torch.float32, **sections: Any) -> Step:
    config = TrainerConfig(cache="unused", student=str(folder), **sections)
    model = student.load_student(folder, dtype=dtype, device=CPU).train()
    return Step(model, build_optimizer(model, config.optim), config, attention_kind="documents", vocab_size=320)


def gradients(step: Step, sequences: list[PackedSequence]) -> dict[str, torch.Tensor]:
    """Gradients of one step's batch, by parameter name, as `Step.run` forms them."""
    total = sum(sequence.num_rows for sequence in sequences)
    clear_gradients(step.parameters)
    for sequence in sequences:
        step.loss(sequence, num_valid=total).backward()
    found = {name: gradient(parameter) for name, parameter in step.model.named_parameters()}
    return {name: value.clone().float() for name, value in found.items() if value is not None}


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        error = (value - theirs[name]).norm() / theirs[name].norm().clamp_min(1e-12)
        assert error < tolerance, f"{name}: {error:.2e}"


@pytest.fixture(scope="module")
def cache(cache_url: str) -> teachercache.Cache:
    return teachercache.open(cache_url)


@pytest.fixture(scope="module")
def sequences(cache: teachercache.Cache) -> list[PackedSequence]:
    return list(PackedCache(cache, seq_len=128))[:4]


def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(cache: teachercache.Cache, student: Path) -> None:
    records = list(cache.records(split="train"))[:9]
    step = make_step(student)
    whole = gradients(step, [pack_records(records)])
    for cuts in ([4], [1, 2, 7], list(range(1, 9))):
        borders = [0, *cuts, 9]
        split = [pack_records(records[a:b]) for a, b in itertools.pairwise(borders)]
        assert_close(gradients(step, split), whole, 1e-5)


def test_the_gradient_does_not_depend_on_padding(cache: teachercache.Cache, student: Path) -> None:
    records = list(cache.records(split="train"))[:5]
    step = make_step(student)
    plain = gradients(step, [pack_records(records)])
    for pad_to in (300, 512):
        assert_close(gradients(step, [pack_records(records, pad_to=pad_to)]), plain, 1e-5)


def test_packed_loss_and_gradient_equal_those_of_separate_passes_of_transformers(
    cache: teachercache.Cache, student: Path
) -> None:
    """The whole way once without anything of ours: transformers' forward, and the KL over K+1 outcomes spelled out."""
    from transformers import AutoModelForCausalLM

    records = list(cache.records(split="train"))[:6]
    step = make_step(student)
    ours = gradients(step, [pack_records(records)])
    plain = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32, attn_implementation="eager").train()
    total, rows = torch.zeros(()), 0
    for record in records:
        logprobs = plain(torch.tensor(record.input_ids)[None].long()).logits[0].log_softmax(dim=1)
        for index, position in enumerate(record.row_pos):
            if not record.loss_mask[index]:
                continue
            ids = torch.tensor(record.topk_ids[index]).long()
            q = logprobs[position].exp()
            outside = q.sum() - q[ids].sum()
            p = torch.tensor(record.topk_logprobs[index]).exp()
            p_tail = math.exp(record.tail_logprob[index])
            mass = p.sum() + p_tail
            p, p_tail = p / mass, p_tail / mass
            total = total + (p * (p.log() - logprobs[position][ids])).sum()
            total = total + p_tail * (torch.log(p_tail) - outside.log())
            rows += 1
    (total / rows).backward()
    theirs = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
    loss = step.loss(pack_records(records), num_valid=rows).item()
    assert loss == pytest.approx((total / rows).item(), rel=1e-5)
    assert_close(ours, theirs, 1e-5)


@pytest.mark.parametrize("policy", activation.POLICIES)
def test_every_checkpointing_policy_gives_the_same_gradients(
    policy: str, student: Path, sequences: list[PackedSequence]
) -> None:
    step = make_step(student)
    expected = gradients(step, sequences[:2])
    activation.apply_policy(step.model, step.model.model.layers, policy)
    assert_close(gradients(step, sequences[:2]), expected, 1e-6)


def test_a_tiled_mlp_gives_the_same_gradients(student: Path, sequences: list[PackedSequence]) -> None:
    step = make_step(student)
    expected = gradients(step, sequences[:2])
    activation.tile_mlps(step.model.model.layers, 50)
    assert_close(gradients(step, sequences[:2]), expected, 1e-5)
    activation.apply_policy(step.model, step.model.model.layers, "keep-attention")
    assert_close(gradients(step, sequences[:2]), expected, 1e-5)


def test_unknown_policies_are_refused(student: Path) -> None:
    step = make_step(student)
    with pytest.raises(ValueError, match="not one of none, full"):
        activation.apply_policy(step.model, step.model.model.layers, "some")


def test_the_automatic_policy_recomputes_less_where_there_is_more_room(student: Path) -> None:
    config = make_step(student).model.config
    room = [activation.bytes_per_token(config, policy) for policy in ("full", "keep-attention", "keep-matmuls", "none")]
    assert room == sorted(room)
    chosen = [activation.choose_policy(config, 1000, int(1000 * need * 1.3)) for need in room]
    assert chosen == ["full", "keep-attention", "keep-matmuls", "none"]
    assert activation.choose_policy(config, 1000, 1000) == "offload"


@pytest.mark.parametrize("tail", ["bucket", "none", "renormalize"])
def test_the_three_cached_methods_give_one_training_curve(
    tail: str, student: Path, sequences: list[PackedSequence]
) -> None:
    curves = {}
    for method in ("dense", "forward_chunked", "fused"):
        step = make_step(student, loss={"method": method, "tail": tail})
        curves[method] = [step.run([sequence], lr=1e-3).loss for _ in range(3) for sequence in sequences]
    for method in ("forward_chunked", "fused"):
        assert curves[method] == pytest.approx(curves["dense"], rel=2e-4)
    print(f"{tail}: {curves['fused'][0]:.4f} -> {curves['fused'][-1]:.4f}")


def test_online_with_the_teachers_own_top_k_is_the_cached_loss(
    student: Path, teacher: Path, sequences: list[PackedSequence]
) -> None:
    from trainer.model import student as students

    live = students.load_student(teacher, dtype=torch.float32, device=CPU).eval()
    cached = make_step(student)
    rows = sequences[0].num_rows
    expected = cached.loss(sequences[0], num_valid=rows).item()
    for tail, check in (("bucket", pytest.approx(expected, rel=1e-3)), (None, None)):
        config = {"method": "online", "tail": tail}
        step = make_step(student, loss=config, teacher=str(teacher))
        step.teacher = live
        loss = step.loss(sequences[0], num_valid=rows).item()
        if check is not None:
            assert loss == check
        else:
            assert loss >= expected  # the full-vocabulary KL is never below the one over K+1 outcomes


def test_a_cross_entropy_mix_counts_labelled_rows_alone(cache: teachercache.Cache, student: Path) -> None:
    records = list(cache.records(split="train"))[:3]
    open_ended = [
        dataclasses.replace(r, loss_mask=torch.ones(len(r.row_pos), dtype=torch.bool).numpy()) for r in records
    ]
    sequence = pack_records(open_ended)
    assert int((sequence.labels == NO_LABEL).sum()) == 3
    step = make_step(student, loss={"ce_weight": 0.5})
    result = step.run([sequence], lr=1e-3)
    assert result.rows == sequence.num_rows - 3
    reference = make_step(student, loss={"ce_weight": 0.5}).run([pack_records(records)], lr=1e-3)
    assert result.loss == pytest.approx(reference.loss, rel=1e-6)


def test_the_heads_padding_rows_get_no_gradient(student: Path, sequences: list[PackedSequence]) -> None:
    plain, padded = make_step(student), make_step(student)
    padded.model.resize_token_embeddings(328)  # the tokenizer has 320 tokens
    expected, loss = (step.loss(sequences[0], num_valid=10) for step in (plain, padded))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    head = padded.model.lm_head.weight
    assert head.shape[0] == 328
    assert head.grad[320:].abs().max() == 0
    assert head.grad[:320].abs().max() > 0


def test_not_finite_and_jumping_losses_stop_before_the_update_and_name_the_documents(
    student: Path, sequences: list[PackedSequence]
) -> None:
    step = make_step(student)
    before = [parameter.clone() for parameter in step.parameters]
    first = sequences[0].documents[0][0]
    with pytest.raises(TrainingDiverged, match=f"above the limit .*{first}#0"):
        step.run([sequences[0]], lr=1e-3, loss_limit=1e-6)
    broken = dataclasses.replace(sequences[0], tail_logprob=torch.full_like(sequences[0].tail_logprob, float("nan")))
    with pytest.raises(TrainingDiverged, match=f"the loss is nan .*{first}#0"):
        step.run([broken], lr=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(before, step.parameters, strict=True))


def test_float32_gradient_buffers_hold_what_bf16_gradients_lose(student: Path, sequences: list[PackedSequence]) -> None:
    """The sum over 32 micro-batches, against the float64 sum of the same micro-batches' own bf16 gradients."""
    batch = sequences * 8
    total = sum(sequence.num_rows for sequence in batch)
    plain, buffered = make_step(student, torch.bfloat16), make_step(student, torch.bfloat16)
    accumulate_in_float32(buffered.model)
    exact: dict[str, torch.Tensor] = {}
    for sequence in sequences:
        clear_gradients(plain.parameters)
        plain.loss(sequence, num_valid=total).backward()
        for name, parameter in plain.model.named_parameters():
            exact[name] = exact.get(name, 0) + 8 * parameter.grad.double()

    def error(found: dict[str, torch.Tensor]) -> float:
        return max(((found[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact)

    rounded, kept = error(gradients(plain, batch)), error(gradients(buffered, batch))
    print(f"worst relative error of a sum of 32: bf16 .grad {rounded:.2e}, float32 buffer {kept:.2e}")
    assert all(parameter.grad is None for parameter in buffered.parameters)
    assert gradient_norm(buffered.parameters).dtype == torch.float32
    assert kept < 0.5 * rounded


def test_evaluation_and_training_see_the_same_loss(
    student: Path, sequences: list[PackedSequence], cache: teachercache.Cache
) -> None:
    from trainer.evaluate import evaluate

    step = make_step(student)
    result = evaluate(step.model, sequences[:1], vocab_size=320, attention_kind="documents")
    loss = step.loss(sequences[0], num_valid=sequences[0].num_rows).item()
    assert result["heldout_kl"] == pytest.approx(loss, rel=1e-4)
    assert step.model.training


def test_hidden_states_of_a_layout_are_the_models_own(student: Path, sequences: list[PackedSequence]) -> None:
    from trainer.model import student as students

    model = students.load_student(student, dtype=torch.float32, device=CPU).eval()
    sequence = sequences[0]
    layout = DocumentLayout(sequence.document_lengths, "documents", CPU)
    hidden = students.hidden_states(model, sequence.input_ids, sequence.position_ids, layout)
    first = sequence.document_lengths[0]
    alone = model(sequence.input_ids[None, :first], use_cache=False).logits[0]
    assert torch.allclose(students.head(model).logits(hidden[:first]), alone, atol=1e-4)


def test_a_loss_that_does_not_exist_is_refused_before_the_cache_is_opened() -> None:
    paths = ["cache=nowhere", "student=nowhere", "output=nowhere"]
    with pytest.raises(UsageError, match="tail='none' is defined at temperature 1 only"):
        load_config(None, [*paths, "loss={tail: none, temperature: 2.0}"])
