"""A tiny run's loss curve is kept: a change of numbers anywhere in the trainer shows here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import teachercache
from teachercache.testing import synthetic_records
from tests.trainer import runs, tiny
from tests.trainer.small_blocks import small_blocks

GOLDEN = Path(__file__).parent / "assets" / "golden_loss.json"


def make_model_without_random_numbers(folder: Path) -> Path:
    """Weights from a formula: torch's generators may change between versions, sines do not."""
    shape = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(shape)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            count = torch.arange(parameter.numel(), dtype=torch.float64)
            values = torch.sin(count * (1.37 + 0.11 * index)) * (0.2 if parameter.dim() > 1 else 0.0)
            parameter.copy_(values.view(parameter.shape) + (0.0 if parameter.dim() > 1 else 1.0))
    model.save_pretrained(folder)
    tiny.make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def golden_run(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """Two runs of the same configuration: their curves."""
    root = tmp_path_factory.mktemp("golden")
    model = make_model_without_random_numbers(root / "student")
    spec = tiny.spec_for(model, top_k=16)
    writer = teachercache.create(str(root / "cache"), spec, tokenizer_files=model, probe=False)
    writer.commit("shard", synthetic_records(spec, 60, seed=3, length=24))
    writer.publish(allow_partial=True)
    settings: dict[str, Any] = {
        "cache": str(root / "cache"),
        "student": str(model),
        "data": {"seq_len": 96, "batch_tokens": 192},
        "optim": {"lr": 3e-3, "warmup_steps": 2, "weight_decay": 0.01},
        "train": {"epochs": 2, "threads": 1},
        "checkpoint": {"every_steps": None},
        "log": {"tensorboard": False},
    }
    curves = []
    for name in ("a", "b"):
        with small_blocks(block_sequences=4, blocks_per_flush=16):
            runs.fit_here(runs.write_config(root / f"{name}.yaml", **settings, output=str(root / name)))
        curves.append([entry["loss"] for entry in runs.metrics(root / name)])
    return curves


def test_two_runs_are_bitwise_equal(golden_run: list[list[float]]) -> None:
    assert golden_run[0] == golden_run[1]


def test_the_golden_loss_curve_is_reproduced(golden_run: list[list[float]]) -> None:
    """To 1e-6; TEACHERCACHE_WRITE_GOLDEN=1 writes a new one, for a change that is meant."""
    if os.environ.get("TEACHERCACHE_WRITE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps(golden_run[0], indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    assert golden_run[0] == pytest.approx(golden, rel=1e-6)
