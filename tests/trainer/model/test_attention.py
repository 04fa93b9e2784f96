"""Packed documents give what separate passes give: outputs and gradients, for every path and architecture."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention import flex_attention as flex
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from teachercache.errors import UsageError
from trainer.model import activation, attention, student
from trainer.model.attention import DocumentLayout, rounded_length

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
    "gemma3": Gemma3TextConfig(**SMALL, sliding_window=8, query_pre_attn_scalar=8, final_logit_softcapping=30.0),
    "gpt-oss": GptOssConfig(
        **SMALL, sliding_window=8, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
}  # fmt: skip
LENGTHS = (23, 17, 17, 9, 1)
CUDA_KINDS = ["auto", "documents", "varlen", "flex", "mixed"]


def build(config: PreTrainedConfig, implementation: str) -> torch.nn.Module:
    """A model with our attention, and experts as transformers chooses them; or "eager", both of them plain."""
    torch.manual_seed(0)
    config = copy.deepcopy(config)  # a model writes its attention into the configuration it was given
    plain = {"experts_implementation": "eager"} if implementation == "eager" else {}
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32, **plain)
    for parameter in model.parameters():  # sinks and experts too: nothing may hide at zero
        torch.nn.init.normal_(parameter, std=0.3)
    return model.train()


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-12)).item()


@pytest.mark.parametrize("kind", ["documents", "plain"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_documents_equal_separate_passes_of_plain_transformers(name: str, kind: str) -> None:
    packed, apart = build(ARCHITECTURES[name], attention.NAME), build(ARCHITECTURES[name], "eager")
    ids = torch.randint(3, 128, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    position = torch.cat([torch.arange(length) for length in LENGTHS])
    weight = torch.randn(len(ids), 32, generator=torch.Generator().manual_seed(2))
    layout = DocumentLayout(LENGTHS, kind, torch.device("cpu"))
    hidden = student.hidden_states(packed, ids, position, layout)
    (hidden * weight).sum().backward()
    expected = torch.cat(
        [apart.base_model(input_ids=part[None], use_cache=False).last_hidden_state[0] for part in ids.split(LENGTHS)]
    )
    (expected * weight).sum().backward()
    assert relative(hidden, expected) < 1e-5
    parameters = zip(packed.base_model.named_parameters(), apart.base_model.parameters(), strict=True)
    worst = max(relative(ours.grad, theirs.grad) for (_, ours), theirs in parameters)  # routers, experts, sinks too
    print(f"{name} {kind}: hidden {relative(hidden, expected):.1e}, worst gradient {worst:.1e}")
    assert worst < 1e-5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tiled_mlps_change_nothing(name: str) -> None:
    layout = DocumentLayout((30,), "documents", torch.device("cpu"))
    found = []
    for tile in (None, 7):
        model = build(ARCHITECTURES[name], attention.NAME)
        if tile:
            activation.tile_mlps(model.model.layers, tile)
        found.append(student.hidden_states(model, torch.arange(3, 33), torch.arange(30), layout))
    assert relative(found[1], found[0]) < 1e-6


def test_lengths_are_planned_before_a_training_step_alone_and_outside_its_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr(attention, "sdpa_backends", lambda _device: (SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH))
    monkeypatch.setattr(attention, "plan_lengths", lambda *shapes: asked.append((*shapes[1:], layer.calls)))
    model = build(ARCHITECTURES["llama"], attention.NAME).bfloat16()
    layer = DocumentLayout((9, 9), "documents", torch.device("cpu"))
    ids = torch.arange(3, 21)
    student.hidden_states(model, ids, torch.arange(9).repeat(2), layer)  # one length: one plan, where it is needed
    layer = DocumentLayout((10, 8), "documents", torch.device("cpu"))
    with torch.no_grad():
        student.hidden_states(model, ids, torch.arange(18), layer)
    assert not asked
    layer = DocumentLayout((10, 8), "documents", torch.device("cpu"))
    student.hidden_states(model, ids, torch.arange(18), layer)
    assert asked == [(torch.bfloat16, 4, 2, 8, 18, 0)]


@pytest.mark.parametrize("window", [None, 16])
def test_sinks_of_flex_attention_get_the_gradients_of_a_float64_twin(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses FlexAttention's backward pass on a CPU, though its uncompiled mathematics has one."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    lengths, generator = (150, 100, 37), torch.Generator().manual_seed(0)
    shapes = [(1, 4, sum(lengths), 8), (1, 2, sum(lengths), 8), (1, 2, sum(lengths), 8), (4,)]
    inputs = [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]
    q, k, v, sinks = inputs
    layout = DocumentLayout(lengths, "flex", torch.device("cpu"))
    ours, _ = attention.document_attention(
        torch.nn.Module(), q, k, v, None, sliding_window=window, s_aux=sinks, layout=layout
    )
    document, place = torch.arange(3).repeat_interleave(torch.tensor(lengths)), torch.arange(sum(lengths))
    behind = place[:, None] - place
    seen = (document[:, None] == document) & (behind >= 0) & (behind < (window or 1000))
    scores = q @ k.repeat_interleave(2, dim=1).transpose(2, 3) / 8**0.5
    scores = torch.cat(
        [scores.masked_fill(~seen, -torch.inf), sinks.view(1, 4, 1, 1).expand(1, 4, len(place), 1)], dim=3
    )
    twin = (scores.softmax(dim=3)[..., :-1] @ v.repeat_interleave(2, dim=1)).transpose(1, 2)
    weight = torch.randn(twin.shape, dtype=torch.float64, generator=generator)
    for mine, theirs in zip(*(torch.autograd.grad(out, inputs, weight) for out in (ours, twin)), strict=True):
        assert relative(mine, theirs) < 1e-6
    assert relative(ours, twin) < 1e-6


@pytest.mark.parametrize("window", [None, 1, 100, 128, 300])
def test_a_block_mask_of_lengths_is_that_of_create_block_mask(window: int | None) -> None:
    drawn = np.random.default_rng(0)
    lengths = [tuple(drawn.integers(1, 400, count).tolist()) for count in (1, 4, 9)] + [
        (128, 256, 128),
        (5, 123, 300, 84),
    ]
    for documents in lengths:
        total = sum(documents)
        ours = attention.document_block_mask(documents, window, torch.device("cpu"))
        torchs = flex.create_block_mask(ours.mask_mod, None, None, total, total, device="cpu")
        assert ours.seq_lengths == torchs.seq_lengths
        assert ours.BLOCK_SIZE == torchs.BLOCK_SIZE
        for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
            for key in (name, f"full_{name}"):
                mine, theirs = getattr(ours, key), getattr(torchs, key)
                assert mine.dtype == theirs.dtype
                assert torch.equal(mine, theirs), (documents, key)


@pytest.mark.parametrize(
    ("capability", "cudnn"), [((8, 0), False), ((8, 6), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)]
)
def test_cudnn_attends_on_devices_where_it_wins(
    capability: tuple[int, int], cudnn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A100, A10G, H200, B200, RTX PRO."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    backends = attention.sdpa_backends.__wrapped__(torch.device("cuda"))
    assert (backends[0] == SDPBackend.CUDNN_ATTENTION) == cudnn
    assert SDPBackend.CUDNN_ATTENTION not in backends[1:]
    assert SDPBackend.FLASH_ATTENTION in backends


def test_every_rounded_length_is_planned_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = [], []

    def attend(q: torch.Tensor, _k: torch.Tensor, _v: torch.Tensor, _scale: float) -> torch.Tensor:
        forward.append(q.shape[2])
        out = q * 1
        out.register_hook(lambda _gradient, length=q.shape[2]: backward.append(length))
        return out

    monkeypatch.setattr(attention, "sdpa_backends", lambda _device: (SDPBackend.CUDNN_ATTENTION,))
    monkeypatch.setattr(attention, "sdpa_causal", attend)
    attention.plan_lengths.__wrapped__(torch.device("cpu"), torch.float32, 2, 1, 2, 10_000)
    expected = sorted({rounded_length(length) for length in range(2048, 10_001)})
    assert backward == expected
    assert forward == [length for length in expected for _thread in range(2)]


def test_a_document_sees_no_other_document() -> None:
    model = build(ARCHITECTURES["llama"], attention.NAME).eval()
    ids = torch.randint(3, 128, (sum(LENGTHS),))
    position = torch.cat([torch.arange(length) for length in LENGTHS])
    layout = DocumentLayout(LENGTHS, "documents", torch.device("cpu"))
    before = student.hidden_states(model, ids, position, layout)
    changed = ids.clone()
    changed[: LENGTHS[0]] = 5
    after = student.hidden_states(model, changed, position, layout)
    assert torch.equal(before[LENGTHS[0] :], after[LENGTHS[0] :])
    assert not torch.equal(before[: LENGTHS[0]], after[: LENGTHS[0]])


def test_a_model_that_does_not_call_our_attention_is_refused() -> None:
    model = build(ARCHITECTURES["llama"], "eager")
    layout = DocumentLayout((4, 4), "documents", torch.device("cpu"))
    with pytest.raises(UsageError, match="0 of its 4 layers called it"):
        student.hidden_states(model, torch.arange(8), torch.arange(4).repeat(2), layout)


def test_a_model_with_layers_that_mix_tokens_otherwise_is_refused() -> None:
    """A convolution over time (or a recurrence) knows no documents: it would carry one into the next."""
    config = Lfm2Config(**SMALL, layer_types=["conv", "full_attention"] * 2, block_multiple_of=8)
    layout = DocumentLayout((4, 4), "documents", torch.device("cpu"))
    with pytest.raises(UsageError, match="2 of its 4 layers called it, so packed documents would see one another"):
        student.hidden_states(build(config, attention.NAME), torch.arange(8), torch.arange(4).repeat(2), layout)


def test_generation_without_a_layout_is_plain_causal() -> None:
    ours, theirs = build(ARCHITECTURES["llama"], attention.NAME).eval(), build(ARCHITECTURES["llama"], "eager").eval()
    ids = torch.randint(3, 128, (1, 20))
    assert relative(ours(ids, use_cache=False).logits, theirs(ids, use_cache=False).logits) < 1e-5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_after_cached_ones_see_all_of_them(name: str) -> None:
    ours, theirs = (build(ARCHITECTURES[name], kind).eval() for kind in (attention.NAME, "eager"))
    ids = torch.randint(3, 128, (2, 20))
    caches = [model(ids[:, :13], use_cache=True).past_key_values for model in (ours, theirs)]
    for part in (ids[:, 13:14], ids[:, 14:15]):
        a, b = (model(part, past_key_values=cache).logits for model, cache in zip((ours, theirs), caches, strict=True))
        assert relative(a, b) < 1e-5


@pytest.mark.parametrize("length", [1, 127, 128, 129, 2048, 2049, 4096, 5000, 32768, 40000])
def test_rounded_lengths_are_few_and_close(length: int) -> None:
    rounded = rounded_length(length)
    assert length <= rounded <= max(128 * -(-length // 128), length * 17 / 16)
    assert rounded_length(rounded) == rounded


def test_few_kernel_shapes_serve_all_lengths() -> None:
    assert len({rounded_length(length) for length in range(2048, 32769)}) <= 66


def test_auto_follows_the_work_of_a_batch() -> None:
    def path(*lengths: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> str:
        return DocumentLayout(lengths, "auto", torch.device(device)).path(dtype)

    assert path(32768) == "documents"
    assert path(4096, 4096, 512, 512) == "mixed"
    assert path(*[512] * 64) == "documents"  # one call takes them all
    assert path(*[513] * 63, 449) == "flex"
    assert path(2100, *[2000] * 10) == "flex"  # one long document holds a tenth of the work
    assert path(*[512] * 64, dtype=torch.float32) == "documents"
    assert path(*[512] * 64, device="cpu") == "documents"


def test_unsupported_options_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="attention kind 'fast'"):
        DocumentLayout((3,), "fast", torch.device("cpu"))
    with pytest.raises(ValueError, match=r"train\.attention=flex needs a CUDA device"):
        attention.choose_kind(torch.device("cpu"), "flex")
    query = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"dropout 0\.1"):
        attention.document_attention(torch.nn.Module(), query, query, query, None, dropout=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: varlen, FlexAttention and cuDNN")
@pytest.mark.parametrize("special", [False, True], ids=["", "window and sinks"])
@pytest.mark.parametrize("kind", CUDA_KINDS)
def test_every_cuda_path_equals_the_naive_twin(kind: str, special: bool) -> None:
    device = torch.device("cuda")
    lengths = (4096, 2500, 700, 300, 300, 57)
    generator = torch.Generator(device).manual_seed(0)

    def heads(count: int) -> torch.Tensor:
        return torch.randn(
            1, count, sum(lengths), 64, device=device, dtype=torch.bfloat16, generator=generator
        ).requires_grad_()

    q, k, v = heads(6), heads(2), heads(2)
    sinks = torch.randn(6, device=device, generator=generator)
    grad = torch.randn(1, sum(lengths), 6, 64, device=device, dtype=torch.bfloat16, generator=generator)
    results = {}
    for name, dtype in ((kind, torch.bfloat16), ("plain", torch.float32)):
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v)]
        layout = DocumentLayout(lengths, name, device)
        inputs += [sinks.clone().requires_grad_()] if special else []
        options = {"sliding_window": 128, "s_aux": inputs[3]} if special else {}
        out, _ = attention.document_attention(torch.nn.Module(), *inputs[:3], None, layout=layout, **options)
        out.backward(grad.to(dtype))
        results[name] = [out.detach().float(), *(tensor.grad.float() for tensor in inputs)]
    for ours, theirs in zip(results[kind], results["plain"], strict=True):
        assert relative(ours, theirs) < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: cuDNN's plans")
def test_lengths_are_planned_on_a_gpu() -> None:
    attention.plan_lengths.__wrapped__(torch.device("cuda"), torch.bfloat16, 6, 2, 64, 4096)
