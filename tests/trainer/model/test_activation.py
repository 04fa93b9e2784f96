"""What is recomputed is what was computed, also where a fused layer writes into its inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GptOssConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from tests.trainer.model.test_attention import SMALL, build
from trainer.config import LoraConfig
from trainer.model import activation, attention, lora, student


def gradients(folder: Path, policy: str, tile: int | None) -> dict[str, torch.Tensor]:
    model = student.load_student(folder, dtype=torch.float32, device=torch.device("cpu")).train()
    layers = student.decoder(model).layers
    if tile:
        activation.tile_mlps(layers, tile)
    activation.apply_policy(model, layers, policy)
    layout = attention.DocumentLayout((40, 23), "documents", torch.device("cpu"))
    position_ids = torch.cat([torch.arange(40), torch.arange(23)])
    hidden = student.hidden_states(model, torch.arange(3, 66), position_ids, layout)
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tile", [None, 16])
@pytest.mark.parametrize("policy", activation.POLICIES)
def test_every_policy_gives_the_gradients_of_none(teacher: Path, policy: str, tile: int | None) -> None:
    plain, found = gradients(teacher, "none", None), gradients(teacher, policy, tile)
    assert found.keys() == plain.keys()
    for name, gradient in found.items():
        assert (gradient - plain[name]).norm() <= 1e-5 * plain[name].norm(), name


def layer_gradients(folder: Path, policy: str, *, autocast: bool = False, frozen: bool = False) -> torch.Tensor:
    """Gradients of the layers, flat."""
    model = student.load_student(folder, dtype=torch.float32, device=torch.device("cpu")).train()
    model.get_input_embeddings().requires_grad_(not frozen)
    activation.apply_policy(model, student.decoder(model).layers, policy)
    layout = attention.DocumentLayout((20,), "documents", torch.device("cpu"))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        hidden = student.hidden_states(model, torch.arange(3, 23), torch.arange(20), layout)
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return torch.cat([p.grad.flatten() for p in student.decoder(model).layers.parameters()])


@pytest.mark.parametrize("policy", [policy for policy in activation.POLICIES if policy != "none"])
def test_recomputing_follows_autocast_and_does_without_a_gradient_for_the_embedding(teacher: Path, policy: str) -> None:
    for options in ({"autocast": True}, {"frozen": True}):
        plain = layer_gradients(teacher, "none", **options)
        assert (layer_gradients(teacher, policy, **options) - plain).norm() <= 1e-5 * plain.norm(), options


def adapter_gradients(folder: Path, policy: str, tile: int | None) -> torch.Tensor:
    """Gradients of adapters with dropout, flat; the same random numbers each time."""
    torch.manual_seed(0)
    model = student.load_student(folder, dtype=torch.float32, device=torch.device("cpu"))
    model = lora.add(model, LoraConfig(rank=4, dropout=0.2), saved=None).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    layers = student.decoder(model).layers
    if tile:
        activation.tile_mlps(layers, tile)
    activation.apply_policy(model, layers, policy)
    layout = attention.DocumentLayout((20,), "documents", torch.device("cpu"))
    hidden = student.hidden_states(model, torch.arange(3, 23), torch.arange(20), layout)
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("policy", [policy for policy in activation.POLICIES if policy != "none"])
def test_what_is_recomputed_drops_what_was_dropped(teacher: Path, policy: str) -> None:
    pytest.importorskip("peft", reason="needs the package peft")
    for tile in (None, 7):  # other tiles draw other numbers: like is compared with like
        plain, found = adapter_gradients(teacher, "none", tile), adapter_gradients(teacher, policy, tile)
        assert (found - plain).norm() <= 1e-5 * plain.norm(), tile


@pytest.mark.parametrize(
    ("name", "normed", "tolerance"),
    [("llama", 0, 0.05), ("qwen3", 8 * 16 + 2 * 16, 0.05), ("qwen3-moe", 8 * 16 + 2 * 16, 0.25), ("gpt-oss", 0, 0.25)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_layer_keeps_is_what_was_counted(name: str, normed: int, tolerance: float, dtype: torch.dtype) -> None:
    """Experts too: a token that four of them use is kept four times."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64}
    shape = SMALL | heads | {"intermediate_size": 128}
    experts = {"num_experts_per_tok": 4}
    config = {
        "llama": LlamaConfig(**shape),
        "qwen3": Qwen3Config(**shape),
        "qwen3-moe": Qwen3MoeConfig(**shape, **experts, num_experts=8, moe_intermediate_size=32),
        "gpt-oss": GptOssConfig(
            **shape, **experts, num_local_experts=8, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}
        ),
    }[name]
    model = build(config, attention.NAME).to(dtype)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens, length = 256, 16
    layout = attention.DocumentLayout((length,) * (tokens // length), "documents", torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        student.hidden_states(model, torch.arange(tokens) % 90 + 3, torch.arange(tokens) % length, layout)
    measured = sum(storage.nbytes() for storage in kept.values()) / tokens
    estimate = config.num_hidden_layers * sum(activation.layer_bytes(config, "none", dtype.itemsize, normed=normed))
    print(f"{name}: estimate {estimate / measured:.3f} of what was kept")
    assert estimate == pytest.approx(measured, rel=tolerance)
