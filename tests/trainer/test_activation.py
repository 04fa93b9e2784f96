"""What is recomputed is what was computed, also where a fused layer writes into its inputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainer import runs
from trainer import activation, attention, student


def gradients(folder: Path, policy: str, tile: int | None) -> dict[str, torch.Tensor]:
    model = student.load_student(folder, dtype=torch.float32, device=torch.device("cpu")).train()
    layers = student.decoder(model).layers
    if tile:
        activation.tile_mlps(layers, tile)
    activation.apply_policy(model, layers, policy)
    documents = attention.DocumentLayout((40, 23), "documents", torch.device("cpu"))
    position_ids = torch.cat([torch.arange(40), torch.arange(23)])
    hidden = student.hidden_states(model, torch.arange(3, 66), position_ids, documents)
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tile", [None, 16])
@pytest.mark.parametrize("policy", activation.POLICIES)
def test_every_policy_gives_the_gradients_of_none(teacher: Path, policy: str, tile: int | None) -> None:
    plain, found = gradients(teacher, "none", None), gradients(teacher, policy, tile)
    assert found.keys() == plain.keys()
    for name, gradient in found.items():
        assert (gradient - plain[name]).norm() <= 1e-5 * plain[name].norm(), name


def test_no_policy_sees_what_ligers_rotation_wrote_in_place() -> None:
    pytest.importorskip("liger_kernel", reason="needs the package liger-kernel")
    pytest.importorskip("triton", reason="needs the package triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.liger_rotation"],
        capture_output=True, text=True, timeout=200, env=runs.environment(TRITON_INTERPRET="1"), cwd=runs.ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"relative gradient error of keep-matmuls: in place {found['in place']:.3g}, on copies {found['copies']}")
    assert found["in place"] > 1  # the trap is there: without the copies this test would fail
    assert set(found["copies"]) == set(activation.POLICIES)
    assert max(found["copies"].values()) < 1e-5
