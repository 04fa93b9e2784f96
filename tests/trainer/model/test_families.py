"""Real model families with tiny random weights: cut, saved, loaded again, with the logits of the cut teacher; or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from teachercache.errors import UsageError
from trainer.bench.step import synthetic_sequence
from trainer.config import TrainerConfig
from trainer.losses import kl_loss
from trainer.model.init_student import init_student
from trainer.model.student import load_student
from trainer.optim import build_optimizer
from trainer.step import Step

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
MLA = EXPERTS | {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "num_key_value_heads": 4,
}  # fmt: skip
ERNIE = EXPERTS | {"moe_num_experts": 4, "moe_k": 2}
LLAMA4 = EXPERTS | {"intermediate_size_mlp": 48, "attention_chunk_size": 8}
SLIDING = {"sliding_window": 8}
GEMMA4 = SLIDING | {"vocab_size_per_layer_input": 96, "num_kv_shared_layers": 0}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"] * 2
# model_type, what differs from SMALL, the layers that are kept; each choice of layers breaks the teacher's own pattern
CUT: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {}, "every-2"),
    "mistral": ("mistral", SLIDING, "every-2"),
    "qwen2": ("qwen2", {}, "1,2,7"),
    "qwen2, sliding from layer 5": ("qwen2", SLIDING | {"use_sliding_window": True, "max_window_layers": 5}, "1,3,5,7"),
    "qwen3": ("qwen3", SLIDING | {"use_sliding_window": True, "max_window_layers": 3}, "0,4,5"),
    "qwen3_moe, dense layer 2": ("qwen3_moe", EXPERTS | {"mlp_only_layers": [2]}, "every-2"),
    "qwen3_moe, every third": ("qwen3_moe", EXPERTS | {"decoder_sparse_step": 3, "mlp_only_layers": [5]}, "1,2,5,6"),
    "qwen2_moe": ("qwen2_moe", EXPERTS | {"decoder_sparse_step": 2, "shared_expert_intermediate_size": 16}, "0,1,2,5"),
    "mixtral": ("mixtral", EXPERTS, "every-2"),
    "gemma": ("gemma", {}, "every-2"),
    "gemma2": ("gemma2", SLIDING, "1,3,4,7"),
    "gemma3_text": ("gemma3_text", SLIDING | {"sliding_window_pattern": 3}, "1,2,5,6"),
    "cohere": ("cohere", {}, "every-2"),
    "cohere2": ("cohere2", SLIDING, "1,3,5,7"),
    "olmo2": ("olmo2", {}, "every-2"),
    "olmo3": ("olmo3", SLIDING, "1,3,5,7"),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0]}, "1,3,5,7"),
    "smollm3, by interval": ("smollm3", {"no_rope_layer_interval": 3}, "every-2"),
    "smollm3, sliding": ("smollm3", SLIDING | {"use_sliding_window": True, "no_rope_layer_interval": 2}, "0,1,2,5"),
    "exaone4": ("exaone4", SLIDING | {"sliding_window_pattern": 4}, "1,3,5,7"),
    "granite": ("granite", {"logits_scaling": 4.0, "residual_multiplier": 0.5}, "every-2"),
    "granitemoe": ("granitemoe", EXPERTS, "every-2"),
    "gpt_oss": ("gpt_oss", EXPERTS | SLIDING | ROPE, "1,3,4,7"),
    "deepseek_v2": ("deepseek_v2", MLA | {"first_k_dense_replace": 3, "topk_method": "greedy"}, "1,2,4,6"),
    "deepseek_v3": ("deepseek_v3", MLA | {"first_k_dense_replace": 3, "num_nextn_predict_layers": 1}, "every-2"),
    "glm4": ("glm4", {}, "every-2"),
    "glm4_moe": ("glm4_moe", EXPERTS | {"first_k_dense_replace": 3, "n_group": 1, "topk_group": 1}, "1,2,3,4"),
    "phi3": ("phi3", SLIDING, "every-2"),
    "phimoe": ("phimoe", EXPERTS, "every-2"),
    "starcoder2": ("starcoder2", SLIDING, "every-2"),
    "nemotron": ("nemotron", {}, "every-2"),
    "ernie4_5": ("ernie4_5", {}, "every-2"),
    "ernie4_5_moe": ("ernie4_5_moe", ERNIE | {"moe_layer_start_index": 2, "moe_layer_end_index": 5}, "0,3,4,7"),
    "ernie4_5_moe, every second": ("ernie4_5_moe", ERNIE | {"moe_layer_interval": 2}, "0,1,2,3,4,5"),
    "llama4_text": ("llama4_text", LLAMA4 | {"moe_layers": [1, 4, 5]}, "1,3,4,7"),
    "llama4_text, by step": ("llama4_text", LLAMA4 | {"interleave_moe_layer_step": 2}, "0,2,3,5"),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}, "every-2"),
    "helium": ("helium", {}, "every-2"),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 8, "n_head": 4, "n_positions": 128}, "every-2"),
}  # fmt: skip
REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 4}, "every-2", "layer_types of conv"),
    "qwen3_next": ("qwen3_next", EXPERTS, "every-2", "layer_types of linear_attention"),
    "bamba": ("bamba", {"attn_layer_indices": [3], "mamba_n_heads": 4, "mamba_d_head": 16}, "every-2", "layer_types of linear"),
    "jamba": ("jamba", EXPERTS, "every-2", "layer_types of linear_attention"),
    "falcon_h1": ("falcon_h1", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}, "every-2", "layer_types of hybrid"),
    "mamba2": ("mamba2", {"num_heads": 4, "head_dim": 16, "n_groups": 1}, "every-2", "layer_types of linear_attention"),
    "gemma3n_text": ("gemma3n_text", SLIDING | {"num_kv_shared_layers": 2}, "every-2", "num_kv_shared_layers"),
    "gemma4_text": ("gemma4_text", GEMMA4 | {"hidden_size_per_layer_input": 8}, "every-2", "embed_tokens_per_layer"),
    "gemma4_unified_text, sizes of some layers": ("gemma4_unified_text", GEMMA4, "1,2,5,7", "store_full_length_kv"),
    "gpt_neo": ("gpt_neo", {"num_layers": 8, "num_heads": 4, "attention_types": [[["global", "local"], 4]]}, "1,2,5,7",
                "attention_layers"),
    "diffllama": ("diffllama", {}, "every-2", "lambda_init"),
    "gpt2, scaled by place": ("gpt2", {"n_layer": 8, "scale_attn_by_inverse_layer_idx": True}, "every-2", "scale_attn_by"),
    "ernie4_5_moe": ("ernie4_5_moe", ERNIE | {"moe_layer_start_index": 0, "moe_layer_interval": 3}, "2,3,5", "moe_layer"),
}  # fmt: skip


def teacher(folder: Path, model_type: str, changes: dict[str, Any]) -> Path:
    """Tiny random weights with spread: at the usual 0.02 two different layers give the same logits to five digits."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**SMALL | {"initializer_range": 0.2} | changes)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    return folder


def by_hand(folder: Path, kept: list[int]) -> Any:
    """The naive twin: the teacher in memory, its layers numbered anew, its configuration untouched but for their number."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    inner = model.model if hasattr(model, "model") else model.base_model
    name = "layers" if hasattr(inner, "layers") else "h"
    stack = getattr(inner, name)
    setattr(inner, name, torch.nn.ModuleList(stack[i] for i in kept))
    config = model.config
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in kept]
    config.num_hidden_layers = len(kept)
    for place, layer in enumerate(getattr(inner, name)):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = place
    return model


def test_at_least_25_families_are_cut_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    cut, refused = ({case[0] for case in cases.values()} for cases in (CUT, REFUSED))
    with capsys.disabled():
        print(f"\n{len(CUT)} models of {len(cut)} families are cut, {len(REFUSED)} refused by name; ", end="")
        print(f"{len(cut | refused)} families in all")
    assert len(cut) >= 25


@pytest.mark.parametrize("name", CUT)
def test_a_cut_student_is_the_teacher_without_some_layers(tmp_path: Path, name: str) -> None:
    model_type, changes, layers = CUT[name]
    folder = teacher(tmp_path / "teacher", model_type, changes)
    made = init_student(folder, tmp_path / "student", layers=layers)
    ids = torch.randint(96, (1, 48), generator=torch.Generator().manual_seed(1))
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "student", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        found = loaded.eval()(ids, use_cache=False).logits
        expected = by_hand(folder, made["layers"])(ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["student", "teacher"]


def test_a_cut_gpt_oss_trains_router_experts_and_sinks_as_plain_transformers_would(tmp_path: Path) -> None:
    model_type, changes, layers = CUT["gpt_oss"]
    init_student(teacher(tmp_path / "teacher", model_type, changes), tmp_path / "student", layers=layers)
    model = load_student(tmp_path / "student", dtype=torch.float32, device=torch.device("cpu")).train()
    assert model.config._experts_implementation == "grouped_mm"
    sequence = synthetic_sequence(48, 3, 96, top_k=8)
    config = TrainerConfig(cache="unused", student="unused")
    step = Step(model, build_optimizer(model, config.optim), config, attention_kind="documents", vocab_size=96)
    step.loss(sequence, num_valid=sequence.num_rows).backward()
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    twin = AutoModelForCausalLM.from_pretrained(tmp_path / "student", **plain).train()
    hidden = twin.model(sequence.input_ids.view(3, 16), use_cache=False).last_hidden_state.flatten(0, 1)
    kl_loss(hidden[sequence.row_index], twin.lm_head.weight, sequence.teacher_rows(), method="dense").backward()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None, name
        assert ours.grad.abs().max() > 0, name
        torch.testing.assert_close(
            ours.grad, theirs.grad, atol=1e-6, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_cut_is_refused_by_its_key_before_anything_is_read_or_written(
    tmp_path: Path, name: str
) -> None:
    model_type, changes, layers, says = REFUSED[name]
    (tmp_path / "teacher").mkdir()
    config = CONFIG_MAPPING[model_type](**SMALL | changes)
    config.architectures = None
    config.save_pretrained(tmp_path / "teacher")  # no weights: none is looked at
    with pytest.raises(UsageError) as caught:
        init_student(tmp_path / "teacher", tmp_path / "new" / "student", layers=layers)
    assert says in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]


def test_a_list_with_an_entry_a_layer_is_taken_apart_whatever_its_name() -> None:
    from trainer.model.cut_config import map_layers

    config = CONFIG_MAPPING["llama"](**SMALL)
    lists: dict[str, Any] = {
        "sizes": list(range(8)),
        "num_kv_heads": [2, 2, 4, 4, 6, 6, 8, 8],
        "ffn_multipliers": [0.5 * i for i in range(8)],
        "block_configs": [{"n": i} for i in range(8)],
    }
    for key, value in lists.items():
        setattr(config, key, value)
    config.per_layer = {str(i): i for i in range(8)}
    config.some_layers = {3: "a", 4: "b", 6: "c"}
    map_layers(config, [1, 3, 6])
    stored = json.loads(config.to_json_string(use_diff=False))
    assert [stored[key] for key in (*lists, "per_layer", "some_layers")] == [
        [1, 3, 6], [2, 4, 8], [0.5, 1.5, 3.0], [{"n": 1}, {"n": 3}, {"n": 6}], {"0": 1, "1": 3, "2": 6},
        {"1": "a", "2": "c"},
    ]  # fmt: skip
