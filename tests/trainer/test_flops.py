"""Model work counts what a token is multiplied with: a tied head once, a used expert of many, no vision tower."""

from __future__ import annotations

import pytest
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from trainer.flops import matmul_parameters, step_flops

D, INNER, LAYERS, HEADS, HEAD, VOCAB = 32, 64, 2, 4, 8, 100
SHAPE = {
    "hidden_size": D, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "head_dim": HEAD, "vocab_size": VOCAB, "pad_token_id": 0,
}  # fmt: skip
ATTENTION, MLP = 4 * D * HEADS * HEAD, 3 * D * INNER


@pytest.mark.parametrize("tied", [False, True])
def test_a_dense_model_counts_its_matrices_and_one_head(tied: bool) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied))
    assert matmul_parameters(model) == LAYERS * (ATTENTION + MLP) + D * VOCAB
    # 6 P T, and 6 n² d_attn a layer for each document
    work = step_flops(model.config, 1000, [10, 20])
    assert work == 6 * 1000 * 30 + 6 * LAYERS * HEADS * HEAD * (100 + 400)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SHAPE, moe_intermediate_size=INNER, num_experts=8, num_experts_per_tok=2)),
        (GptOssForCausalLM, GptOssConfig(
            **SHAPE, num_local_experts=8, num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        )),
    ],
)  # fmt: skip
def test_experts_count_as_far_as_a_token_uses_them(architecture, config) -> None:
    model = architecture(config)
    router, biases = 8 * D, 0
    if architecture is GptOssForCausalLM:
        biases = 2 * (2 * INNER + D)  # of the two experts in use: held as matrices [experts, n]
    assert matmul_parameters(model) == LAYERS * (ATTENTION + router + 2 * MLP + biases) + D * VOCAB


def test_positions_that_are_looked_up_do_not_count() -> None:
    config = GPT2Config(n_embd=D, n_inner=INNER, n_layer=LAYERS, n_head=HEADS, vocab_size=VOCAB, n_positions=77)
    assert matmul_parameters(GPT2LMHeadModel(config)) == LAYERS * (ATTENTION + 2 * D * INNER) + D * VOCAB


def test_a_vision_tower_does_not_count() -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=SHAPE, vision_config=vision, mm_tokens_per_image=4))
    assert matmul_parameters(model) == LAYERS * (ATTENTION + MLP) + D * VOCAB
