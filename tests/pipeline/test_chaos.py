"""One seed of the chaos test, three with `-m soak`; `make soak` runs twenty with longer outages (benchmarks/soak.py)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.pipeline.conftest import ROOT, environment


@pytest.mark.slow
@pytest.mark.timeout(290)
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 3))])
def test_every_document_is_cached_once_whatever_dies(seed):
    """In a separate process: the cluster's raylets are its children, and it finds the actors among them."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.chaos", str(seed), "3"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    report = json.loads(result.stdout.splitlines()[-1])
    print(report)
    assert report["faults"]
