"""`bench-loss`: time, extra memory and error of every loss method, and of peers where installed.

Extra memory is the peak beyond the inputs, gradients included. One process, one device, methods side by side.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from trainer.bench.closed_form import closed_form_loss
from trainer.bench.measure import extra_gib, plot, release_memory, time_ms
from trainer.bench.shapes import HEADS, NEEDS_GPU, OUR_METHODS, HeadShape
from trainer.losses import TeacherRows, kl_loss

ERROR_ROWS = 64
# Fused over forward_chunked on a CPU, at most.
MAX_TIME_RATIO, MAX_MEMORY_RATIO = 1.3, 0.35


@dataclass
class LossInputs:
    """Inputs of one measurement: hidden [N, d], head_weight [V, d], rows and labels of N rows."""

    hidden: Tensor
    head_weight: Tensor
    rows: TeacherRows
    labels: Tensor

    def clear_grads(self) -> None:
        """Forget both gradients."""
        self.hidden.grad = self.head_weight.grad = None


@dataclass
class LossFigures:
    """One row of the table. None where it does not apply or did not run; `note` says why."""

    method: str
    head: str
    rows: int
    hidden_size: int
    vocab_size: int
    top_k: int
    dtype: str
    time_ms: float | None = None
    extra_gib: float | None = None
    error_hidden: float | None = None
    error_weight: float | None = None
    note: str = ""


Method = Callable[[LossInputs], Tensor]


def make_inputs(rows: int, head: HeadShape, top_k: int, dtype: torch.dtype, device: torch.device) -> LossInputs:
    """Return random hidden states and head with logits of about unit variance, and decaying rows of mass 0.95."""
    generator = torch.Generator(device=device).manual_seed(0)
    d, v = head
    hidden = torch.empty(rows, d, dtype=dtype, device=device)
    for start in range(0, rows, 65_536):
        hidden[start : start + 65_536].normal_(generator=generator)
    head_weight = torch.empty(v, d, dtype=dtype, device=device).normal_(std=d**-0.5, generator=generator)
    # Distinct ids: an arithmetic progression modulo V, whose step shares no factor with V.
    step = next(s for s in range(v // (top_k + 1), v) if math.gcd(s, v) == 1)
    first = torch.randint(v, (rows, 1), device=device, generator=generator)
    ids = ((first + step * torch.arange(top_k, device=device)) % v).to(torch.int32)
    slope = 0.03 + 0.1 * torch.rand(rows, 1, device=device, generator=generator)
    logprobs = torch.log_softmax(-slope * torch.arange(top_k, device=device), dim=1) + math.log(0.95)
    tail = torch.full((rows,), math.log(0.05), device=device)
    teacher = TeacherRows(ids, logprobs, tail)
    return LossInputs(hidden.requires_grad_(), head_weight.requires_grad_(), teacher, ids[:, 0].long())


def _ours(inputs: LossInputs, **call: Any) -> Tensor:
    return kl_loss(inputs.hidden, inputs.head_weight, inputs.rows, validate=False, **call)


def _closed_form(inputs: LossInputs, lean: bool) -> Tensor:
    return closed_form_loss(inputs.hidden, inputs.head_weight, inputs.rows, lean=lean)


def fused(chunk_size: int | None = None) -> Method:
    """Return the fused method with that many rows a chunk."""
    return partial(_ours, chunk_size=chunk_size)


def methods() -> dict[str, Method]:
    """Return name to callable: this package's, then the peers that are installed."""
    found: dict[str, Method] = {name: partial(_ours, method=name) for name in ("fused", "forward_chunked", "dense")}
    found["fused_recompute"] = partial(_ours, recompute=True)
    found["closed_form"] = partial(_closed_form, lean=False)
    found["closed_form_lean"] = partial(_closed_form, lean=True)
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        found["liger_hard_label"] = lambda x: liger(x.head_weight, x.hidden, x.labels)
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy as cce

        found["cce_hard_label"] = lambda x: cce(x.hidden, x.head_weight, x.labels)
    builtin = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if builtin is not None:
        found["torch_hard_label"] = lambda x: builtin(x.hidden, x.head_weight, x.labels)
    return found


def measure(method: Method, inputs: LossInputs, repeats: int) -> tuple[float | None, float | None, str]:
    """Return the median ms and extra GiB of forward and backward, and a note when it ran out of memory."""
    device = inputs.hidden.device

    def step() -> None:
        inputs.clear_grads()
        method(inputs).backward()

    try:
        step()  # compile and warm up
        inputs.clear_grads()
        extra = extra_gib(step, device)
        return time_ms(step, device, repeats), extra, ""
    except torch.OutOfMemoryError:
        return None, None, "out of memory"
    finally:
        inputs.clear_grads()
        release_memory(device)


def gradient_errors(method: Method, inputs: LossInputs) -> tuple[float, float]:
    """Return the norm-wise relative error of both gradients against float64 on the first rows (bucket, forward KL)."""
    n = min(ERROR_ROWS, len(inputs.rows))

    def cut(dtype: torch.dtype) -> LossInputs:
        hidden, head = (x.detach().to(dtype).requires_grad_() for x in (inputs.hidden[:n], inputs.head_weight))
        return LossInputs(hidden, head, inputs.rows[:n], inputs.labels[:n])

    def error(ours: Tensor, truth: Tensor) -> float:
        assert ours.grad is not None
        assert truth.grad is not None
        return float((ours.grad.double() - truth.grad).norm() / truth.grad.norm())

    small, exact = cut(inputs.hidden.dtype), cut(torch.float64)
    method(small).backward()
    _ours(exact, method="forward_chunked").backward()
    return error(small.hidden, exact.hidden), error(small.head_weight, exact.head_weight)


def certainly_too_large(name: str, rows: int, head: HeadShape, device: torch.device) -> bool:
    """Return whether [N, V] grids alone exceed the device, so that trying would only take time."""
    grid_bytes = {"dense": 16, "forward_chunked": 6}.get(name, 0) * rows * head.vocab_size
    return device.type == "cuda" and grid_bytes > torch.cuda.get_device_properties(device).total_memory


def run_benchmark(
    heads: Sequence[str],
    lengths: Sequence[int],
    names: Sequence[str],
    *,
    top_k: int,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
    report: Callable[[LossFigures], None],
) -> list[LossFigures]:
    """Measure every method at every length and head; `report` sees each row as it comes."""
    available = methods()
    results = []
    for head_name in heads:
        head = HEADS[head_name]
        for length in lengths:
            inputs = make_inputs(length, head, top_k, dtype, device)
            for name in names:
                result = LossFigures(name, head_name, length, *head, top_k, str(dtype).removeprefix("torch."))
                if name in NEEDS_GPU and device.type != "cuda":
                    result.note = "needs a GPU"
                elif name not in available:
                    result.note = "not installed"
                elif certainly_too_large(name, length, head, device):
                    result.note = "out of memory (its grids alone exceed the device)"
                else:
                    result.time_ms, result.extra_gib, result.note = measure(available[name], inputs, repeats)
                    if result.time_ms is not None and name in OUR_METHODS and length == min(lengths):
                        result.error_hidden, result.error_weight = gradient_errors(available[name], inputs)
                results.append(result)
                report(result)
            del inputs
    return results


def cpu_ratio(repeats: int = 3) -> dict[str, Any]:
    """Measure fused over forward-chunked, in time and in extra memory, in turn on the CPU in float32: the CPU's bar."""
    inputs = make_inputs(2048, HEADS["smollm2-135m"], 100, torch.float32, torch.device("cpu"))
    found: dict[str, Any] = {}
    for name in ("fused", "forward_chunked"):
        elapsed, extra, _ = measure(methods()[name], inputs, repeats)
        assert extra is not None
        found |= {f"{name}_ms": elapsed, f"{name}_extra_mib": extra * 1024}
    time_ratio = found["fused_ms"] / found["forward_chunked_ms"]
    memory_ratio = found["fused_extra_mib"] / found["forward_chunked_extra_mib"]
    found |= {"time_ratio": time_ratio, "max_time_ratio": MAX_TIME_RATIO}
    found |= {"memory_ratio": memory_ratio, "max_memory_ratio": MAX_MEMORY_RATIO}
    return found | {"holds": time_ratio <= MAX_TIME_RATIO and memory_ratio <= MAX_MEMORY_RATIO}


def plots(results: Sequence[LossFigures], path: Path) -> None:
    """Write extra memory and time over rows, one line a method, for the first head measured."""
    head, top_k = results[0].head, results[0].top_k
    points = [(r.method, r.rows, r.extra_gib, r.time_ms) for r in results if r.head == head]
    plot(path, f"{head}, K = {top_k}", ("rows", "extra memory, GiB", "forward + backward, ms"), points, log_y=True)


def table(results: Sequence[LossFigures]) -> Table:
    """Return the results for a terminal."""
    out = Table("method", "head", "rows", "ms", "extra GiB", "error dH", "error dW", "note")
    for r in results:
        figures = ((r.time_ms, ".1f"), (r.extra_gib, ".3f"), (r.error_hidden, ".1e"), (r.error_weight, ".1e"))
        shown = ["" if value is None else format(value, pattern) for value, pattern in figures]
        out.add_row(r.method, r.head, f"{r.rows:,}", *shown, r.note)
    return out
