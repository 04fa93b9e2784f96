"""The loss's bench on a CPU: every method of this package runs, is right, and is described."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.bench import loss
from trainer.bench.closed_form import closed_form_loss
from trainer.bench.shapes import HEADS, METHODS, NEEDS_GPU, OUR_METHODS, HeadShape
from trainer.losses import kl_loss

CPU = torch.device("cpu")


@pytest.mark.slow
def test_every_method_of_this_package_is_measured_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HEADS, "tiny", HeadShape(16, 300))
    seen: list[loss.LossFigures] = []
    results = loss.run_benchmark(
        ["tiny"], [32], OUR_METHODS, top_k=10, dtype=torch.float32, device=CPU, repeats=1, report=seen.append
    )
    assert seen == results
    assert [result.method for result in results] == list(OUR_METHODS)
    for result in results:
        assert result.time_ms is not None
        assert result.extra_gib is not None
        assert result.error_hidden is not None
        assert result.error_hidden < 1e-5, result
    assert loss.table(results).row_count == len(OUR_METHODS)
    assert set(loss.methods()) <= set(METHODS)


def test_on_a_cpu_a_peer_that_needs_a_gpu_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HEADS, "tiny", HeadShape(16, 300))
    call = {"top_k": 10, "dtype": torch.float32, "device": CPU, "repeats": 1, "report": lambda _: None}
    results = loss.run_benchmark(["tiny"], [8], NEEDS_GPU, **call)
    assert [(result.note, result.time_ms) for result in results] == [("needs a GPU", None)] * len(NEEDS_GPU)


@pytest.mark.parametrize("lean", [False, True])
def test_the_closed_form_is_the_loss_without_a_tail(lean: bool) -> None:
    inputs = loss.make_inputs(50, HeadShape(16, 300), 10, torch.float32, CPU)
    rows = inputs.rows
    ours = kl_loss(inputs.hidden, inputs.head_weight, rows, tail="none")
    ours.backward()
    expected = inputs.hidden.grad, inputs.head_weight.grad
    inputs.clear_grads()
    theirs = closed_form_loss(inputs.hidden, inputs.head_weight, rows, chunk_size=16, lean=lean)
    theirs.backward()
    torch.testing.assert_close(theirs, ours)
    torch.testing.assert_close((inputs.hidden.grad, inputs.head_weight.grad), expected)


@pytest.mark.slow
def test_the_command_writes_its_file_and_refuses_unknown_names(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer", "bench-loss", "--rows", "8", "--repeats", "1", "--json"]
    done = subprocess.run([*command, "--method", "fused", "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    assert (result["method"], result["rows"], result["top_k"]) == ("fused", 8, 100)
    assert json.loads((tmp_path / "loss.json").read_text())["results"] == [result]
    done = subprocess.run([*command, "--method", "fussed"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "is not a method; expected one of fused" in done.stderr


def test_the_commands_options_are_read_without_torch() -> None:
    code = "import sys, trainer.bench.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
