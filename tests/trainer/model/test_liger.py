"""Fused layers from liger-kernel give the gradients of the layers that they replace."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.trainer import runs
from trainer.model import activation


@pytest.mark.slow
def test_no_policy_sees_what_ligers_rotation_wrote_in_place() -> None:
    pytest.importorskip("liger_kernel", reason="needs the package liger-kernel")
    pytest.importorskip("triton", reason="needs the package triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.model.liger_rotation"],
        capture_output=True, text=True, timeout=200, env=runs.environment(TRITON_INTERPRET="1"), cwd=runs.ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"relative gradient error of keep-matmuls: in place {found['in place']:.3g}, on copies {found['copies']}")
    assert found["in place"] > 1  # the trap is there: without the copies this test would fail
    assert set(found["copies"]) == set(activation.POLICIES)
    assert max(found["copies"].values()) < 1e-5
