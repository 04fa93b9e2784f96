"""Students of other architectures go the whole way: cut, trained, evaluated, loaded by transformers, generating."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from teachercache.errors import UsageError
from teachercache.fingerprint import TOKENIZER_FILES, fingerprint_tokenizer
from tests.trainer import runs, tiny
from trainer.checkpoint import CheckpointFolder, resolve_model_folder
from trainer.model.init_student import init_student
from trainer.model.student import load_student

# The head has 384 rows, the tokenizer 320 tokens: the rest is padding that no student may put mass on.
SMALL: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL)),
    # Layers 0, 2, 4, 6 of eight: the one layer of full attention in six must stay what it was
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**{**SMALL, "num_hidden_layers": 8}, sliding_window=16)),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(
        **SMALL, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2
    )),
    "granite": (GraniteForCausalLM, GraniteConfig(**SMALL, logits_scaling=4.0)),
    "gemma3-with-images": (Gemma3ForConditionalGeneration, Gemma3Config(
        text_config={**SMALL, "sliding_window": 16}, mm_tokens_per_image=4,
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 28, "patch_size": 14},
    )),
    "gpt2": (GPT2LMHeadModel, GPT2Config(
        vocab_size=384, n_embd=32, n_layer=4, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_student_is_cut_trained_evaluated_and_generates(name: str, cache_url: str, tmp_path: Path) -> None:
    architecture, shape = ARCHITECTURES[name]
    architecture(shape).save_pretrained(tmp_path / "teacher")
    tiny.make_tokenizer(tmp_path / "teacher")
    made = init_student(tmp_path / "teacher", tmp_path / "student", layers="every-2")
    config = runs.write_config(
        tmp_path / "train.yaml", cache=cache_url, student=made["student"], output=str(tmp_path / "run"),
        data={"seq_len": 128}, optim={"lr": 1e-2, "warmup_steps": 2, "weight_decay": 0.1}, train={"max_steps": 12, "threads": 1},
        eval={"every_steps": 5}, checkpoint={"every_steps": 5}, log={"tensorboard": False},
    )  # fmt: skip
    summary = runs.fit_here(config)
    measured = {entry["step"]: entry["heldout_kl"] for entry in runs.metrics(tmp_path / "run", "eval")}
    assert list(measured) == [5, 10, 12]  # the end is evaluated whether it is due or not
    assert summary["heldout_kl"] == measured[12] < measured[5]
    assert summary["best"].startswith(f"step {min(measured, key=measured.__getitem__)}: ")

    final = tmp_path / "run" / "final"
    model = AutoModelForCausalLM.from_pretrained(final)
    assert json.loads((final / "config.json").read_text()).get("use_cache", True), "generation would be quadratic"
    prompt = AutoTokenizer.from_pretrained(final)("the cat", return_tensors="pt").input_ids
    assert model.generate(prompt, max_new_tokens=4, do_sample=False).shape == (1, prompt.shape[1] + 4)
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "student", final))
    assert before.keys() == after.keys()
    seen = {name for name in before if "vision" in name or "projector" in name}  # what no text goes through
    assert all(before[name].equal(after[name]) for name in seen)
    assert bool(seen) == ("images" in name)


def test_a_student_with_dropout_is_refused_where_the_dropout_is(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=384, n_embd=32, n_layer=1, n_head=4)).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"a dropout of 0\.1 in drop; packed training needs 0"):
        load_student(tmp_path, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.slow
def test_a_student_on_s3_is_trained_and_a_run_there_is_evaluated(
    cache_url: str, student: Path, tmp_path: Path, s3_url: str
) -> None:
    place = CheckpointFolder(f"{s3_url}/models/student")
    for path in student.iterdir():
        place.put(path.name, path)
    config = runs.write_config(
        tmp_path / "train.yaml", cache=cache_url, student=f"{s3_url}/models/student", output=f"{s3_url}/run",
        data={"seq_len": 128}, train={"max_steps": 3, "threads": 1},
    )  # fmt: skip
    runs.fit_here(config)
    folder = resolve_model_folder(f"{s3_url}/run")
    assert not (folder / "optimizer.pt").exists()  # the final model, without the optimiser's gigabytes
    assert (folder / "model.safetensors").read_bytes() == (
        resolve_model_folder(f"{s3_url}/run/final") / "model.safetensors"
    ).read_bytes()
    run = CheckpointFolder(f"{s3_url}/run")
    assert run.store.list("tensorboard/")
    with pytest.raises(UsageError, match=r"neither config\.json nor"):
        resolve_model_folder(f"{s3_url}/models/nothing")


def test_every_tokenizer_file_travels_with_a_student(tmp_path: Path, teacher: Path) -> None:
    """chat_template.json too: without it the student's tokenizer would have another identity."""
    copy = tmp_path / "teacher"
    shutil.copytree(teacher, copy)
    (copy / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    init_student(copy, tmp_path / "student")
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        assert (tmp_path / "student" / name).exists() == (copy / name).exists(), name
    assert fingerprint_tokenizer(tmp_path / "student") == fingerprint_tokenizer(copy)
