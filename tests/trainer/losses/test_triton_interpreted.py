"""The Triton row kernel, checked without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_triton_row_kernel_agrees_with_the_float64_twin_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed: the kernel cannot be interpreted")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    child = subprocess.run(
        [sys.executable, "-m", "tests.trainer.losses.interpreted"],
        cwd=Path(__file__).resolve().parents[3],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    print(child.stdout)
