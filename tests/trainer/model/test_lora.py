"""LoRA: only adapters train, resuming is exact, and the final folder needs no peft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from teachercache.errors import UsageError
from tests.trainer import runs
from trainer.checkpoint import resolve_model_folder
from trainer.config import LoraConfig
from trainer.model import lora
from trainer.model.student import load_student

peft = pytest.importorskip("peft", reason="needs the package peft")


def test_a_lora_run_resumes_bitwise_and_its_final_model_is_plain(cache_url: str, student: Path, tmp_path: Path) -> None:
    settings = {
        "cache": cache_url,
        "student": str(student),
        "data": {"seq_len": 128},
        "optim": {"lr": 1e-2, "schedule": "constant", "warmup_steps": 0},
        "train": {"threads": 1, "epochs": 2, "checkpointing": "offload"},
        "lora": {"rank": 4, "dropout": 0.1},
        "log": {"tensorboard": False},
    }
    whole = runs.write_config(tmp_path / "whole.yaml", **settings, output=str(tmp_path / "whole"))
    parts = runs.write_config(tmp_path / "parts.yaml", **settings, output=str(tmp_path / "parts"))
    runs.fit_here(whole)
    runs.fit_here(parts, "train.max_steps=5")
    runs.fit_here(parts)
    # What a run trained is its merged model, as `eval student=RUN` and a next run's `student=RUN` take it.
    assert resolve_model_folder(str(tmp_path / "parts")) == tmp_path / "parts" / "final"
    curves = [[entry["loss"] for entry in runs.metrics(tmp_path / name)] for name in ("whole", "parts")]
    assert curves[0] == curves[1]
    assert sum(curves[0][-5:]) < sum(curves[0][:5])
    a, b = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any("lora" in name for name in a)
    before = load_file(student / "model.safetensors")
    assert before.keys() == a.keys()
    assert torch.equal(before["model.embed_tokens.weight"], a["model.embed_tokens.weight"])
    assert not torch.equal(before["model.layers.0.mlp.up_proj.weight"], a["model.layers.0.mlp.up_proj.weight"])
    ids = torch.arange(3, 13)[None]
    out = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "final").generate(ids, max_new_tokens=3)
    assert out.shape == (1, 13)


@pytest.mark.parametrize(("names", "message"), [(["q_proj", "lm_head"], "adapts the head"), (["nose"], r"\['nose'\]")])
def test_an_adapter_on_the_head_or_on_no_layer_is_refused(student: Path, names: list[str], message: str) -> None:
    """The loss multiplies with the head's weight: such an adapter would get no gradient, and no one would know."""
    model = load_student(student, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(UsageError, match=message):
        lora.add(model, LoraConfig(target_modules=names), saved=None)


def test_adapters_go_on_the_layers_that_are_named(student: Path) -> None:
    model = load_student(student, dtype=torch.float32, device=torch.device("cpu"))
    wrapped = lora.add(model, LoraConfig(rank=2, target_modules=["q_proj"]), saved=None)
    trained = [name for name, parameter in wrapped.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(".q_proj.lora_" in name for name in trained)
