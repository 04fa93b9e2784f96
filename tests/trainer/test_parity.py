"""dense, forward_chunked and fused train alike: in float64, where rounding cannot grow into a difference, curves are equal."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

import teachercache
from tests.trainer import tiny
from trainer.config import TrainerConfig
from trainer.data import PackedCache
from trainer.model import student
from trainer.step import Step

STEPS = 100


@pytest.mark.slow
@pytest.mark.parametrize("tail", ["bucket", "none", "renormalize"])
def test_every_method_gives_the_same_training_curve(tmp_path: Path, tail: str) -> None:
    teacher = tiny.make_model(tmp_path / "teacher", seed=1)
    folder = tiny.make_model(tmp_path / "student", seed=2, layers=2)
    cache = teachercache.open(tiny.make_cache(str(tmp_path / "cache"), teacher))
    sequences = list(islice(PackedCache(cache, seq_len=128, epochs=None), STEPS))
    curves, weights = {}, {}
    for method in ("dense", "forward_chunked", "fused"):
        settings = {"cache": "", "student": "", "loss": {"method": method, "tail": tail, "chunk_size": 37}}
        model = student.load_student(folder, dtype=torch.float64, device=torch.device("cpu")).train()
        # Adam divides by the root of v: with the usual eps of 1e-8, gradients near 0 make rounding a visible difference.
        optimizer = torch.optim.AdamW(model.parameters(), eps=1e-6)
        config = TrainerConfig.model_validate(settings)
        step = Step(model, optimizer, config, attention_kind="documents", vocab_size=320)
        curves[method] = torch.tensor([step.run([sequence], lr=5e-3).loss for sequence in sequences])
        weights[method] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    for method, curve in curves.items():
        gap = ((curve - curves["dense"]).abs() / curves["dense"]).max().item()
        moved = ((weights[method] - weights["dense"]).norm() / weights["dense"].norm()).item()
        print(
            f"{tail}, {method}: loss {curve[0]:.4f} -> {curve[-1]:.4f}; difference of losses {gap:.1e}, of weights {moved:.1e}"
        )
        assert moved < 1e-12
        assert gap < 3e-7  # the loss itself is reported in float32
        assert curve[-1] < 0.7 * curve[0]
