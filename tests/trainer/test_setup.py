"""What is loaded for training is what trains, and what is recomputed is what must be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import teachercache
from tests.trainer import tiny
from tests.trainer.model.test_student import ARCHITECTURES
from trainer import setup
from trainer.config import load_config
from trainer.data import PackedCache
from trainer.model import activation
from trainer.model.attention import DocumentLayout
from trainer.model.student import hidden_states, load_student
from trainer.optim import accumulate_in_float32, build_optimizer
from trainer.step import Step

CPU = setup.Compute(torch.device("cpu"), torch.bfloat16, "documents")


@pytest.mark.parametrize("adapters", [False, True])
def test_what_no_text_goes_through_neither_decays_nor_costs_memory(
    cache_url: str, tmp_path: Path, adapters: bool
) -> None:
    """In bf16 with gradient accumulation: a trainable tower would have a main_grad of zeros, which AdamW takes."""
    if adapters:
        pytest.importorskip("peft", reason="needs the package peft")
    architecture, shape = ARCHITECTURES["gemma3-with-images"]
    architecture(shape).save_pretrained(tmp_path)
    tiny.make_tokenizer(tmp_path)
    settings = [f"cache={cache_url}", f"student={tmp_path}", "data={seq_len: 64, batch_tokens: 128}"]
    settings += ["optim={lr: 1e-2, weight_decay: 0.1}", *(["lora.rank=4"] if adapters else [])]
    config = load_config(None, settings)
    model = setup.load_for_training(config, tmp_path, CPU, resumed=False)
    optimizer = build_optimizer(model, config.optim)
    assert setup.sums_in_float32(config, CPU.dtype, ranks=1)
    accumulate_in_float32(model)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    step = Step(model, optimizer, config, attention_kind="documents", vocab_size=320)
    sequences = PackedCache(teachercache.open(cache_url), seq_len=64)
    step.run([sequence for sequence, _ in zip(sequences, range(2), strict=False)], lr=1e-2)
    after = dict(model.named_parameters())
    unseen = {name for name in before if "vision" in name or "projector" in name}
    assert unseen
    for name in unseen:
        assert torch.equal(before[name], after[name]), name
        assert after[name] not in optimizer.state
        assert not hasattr(after[name], "main_grad")
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_auto_checkpointing_counts_the_bytes_of_the_weights_dtype(
    student: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(None, ["cache=unused", f"student={student}"])
    for dtype in (torch.bfloat16, torch.float32):
        model = load_student(student, dtype=dtype, device=torch.device("cpu"))
        weights = sum(parameter.numel() for parameter in model.parameters())
        kept = activation.bytes_per_token(model.config, "none", dtype.itemsize) * config.data.seq_len
        # Gradients, float32 moments and, of bf16 weights, their low bits come on top of what the layers keep.
        other = weights * (dtype.itemsize + 8 + (2 if dtype == torch.bfloat16 else 0))
        for free, expected in ((other + 1.26 * kept, "none"), (other + 1.24 * kept, "keep-matmuls")):
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device, free=free: (int(free), 0))
            compute = setup.Compute(torch.device("cuda"), dtype, "auto")
            assert setup.choose_policy(model, config, compute) == expected, dtype


def test_autocast_computes_in_bf16_over_float32_weights(cache_url: str, student: Path) -> None:
    sequence = next(iter(PackedCache(teachercache.open(cache_url), seq_len=64)))
    losses, seen = {}, {"none": [], "bfloat16": []}
    for autocast in ("none", "bfloat16"):
        config = load_config(None, [f"cache={cache_url}", f"student={student}", f"train.autocast={autocast}"])
        compute = setup.choose_compute(config.train)
        for model in (
            setup.load_frozen(student, compute, trust_remote_code=False),
            setup.load_for_training(config, student, compute, resumed=False),
        ):
            layout = DocumentLayout(sequence.document_lengths, "documents", compute.device)
            hidden = hidden_states(model, sequence.input_ids, sequence.position_ids, layout)
            seen[autocast].append(hidden.float())
        step = Step(model, build_optimizer(model, config.optim), config, attention_kind="documents", vocab_size=320)
        loss = step.loss(sequence, num_valid=sequence.num_rows)
        loss.backward()
        assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
        losses[autocast] = loss.item()
    for plain, found in zip(seen["none"], seen["bfloat16"], strict=True):  # the frozen and the trained model
        assert 1e-4 < (found - plain).norm() / plain.norm() < 2e-2
    assert losses["bfloat16"] != losses["none"]
    assert losses["bfloat16"] == pytest.approx(losses["none"], rel=1e-2)
