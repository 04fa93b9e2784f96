"""The Triton row kernel, checked without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainer.losses.options import LossOptions


@pytest.mark.slow
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


def test_kernels_start_on_the_gpu_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes the current GPU: a loss on cuda:1 while cuda:0 is current would start on the wrong one."""
    pytest.importorskip("triton", reason="triton is not installed")
    from trainer.losses import TeacherRows, products, row_triton, scale

    events: list[object] = []

    @contextmanager
    def current(device: object) -> Iterator[None]:
        events.append(device)
        yield
        events.append("back")

    class Kernel:
        def __getitem__(self, _grid: object) -> Callable[..., None]:
            return lambda *_args, **_options: events.append("start")

    x, factor = torch.zeros(2, 32), torch.ones(())
    monkeypatch.setattr(torch.cuda, "device", current)
    with products.on_device_of(SimpleNamespace(is_cuda=True, device="cuda:1")):  # type: ignore[arg-type]
        pass
    assert events == ["cuda:1", "back"]
    for module, names in ((row_triton, ["_row_kernel"]), (scale, ["_scale_kernel"])):
        monkeypatch.setattr(module, "on_device_of", lambda tensor: current(tensor.device))
        for name in names:
            monkeypatch.setattr(module, name, Kernel())
    rows = TeacherRows(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3), torch.zeros(2))
    for start in (
        lambda: row_triton.loss_and_grad_in_place(x, None, rows, None, torch.ones(2), LossOptions(tail="bucket"), True),
        lambda: scale.scale_into(x, factor, x),
        lambda: scale.scale_into(x, factor, x.half()),
    ):
        events.clear()
        start()
        assert events == [x.device, "start", "back"]
