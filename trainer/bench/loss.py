"""`python -m trainer bench-loss`: time, extra memory and error of every loss method, and of peers where installed.

Extra memory is the peak beyond the inputs, gradients included. One process, one device, methods side by side.
"""

from __future__ import annotations

import datetime
import gc
import importlib.util
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from trainer.losses import TeacherRows, kl_loss


@dataclass(frozen=True)
class Head:
    """A student's output head: hidden size and vocabulary."""

    hidden_size: int
    vocab_size: int


HEADS = {
    "llama-3.2-3b": Head(3072, 128_256),
    "llama-3.1-8b": Head(4096, 128_256),
    "gpt-oss": Head(2880, 201_088),
    "qwen3-4b": Head(2560, 151_936),
    "gemma-3-1b": Head(1152, 262_144),
    "smollm2-135m": Head(576, 49_152),
}
LENGTHS = (4_096, 8_192, 16_384, 32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576)
ERROR_ROWS = 64
# A method whose smallest footprint is certainly beyond the device is not tried: whole logits of these dtypes.
GIB = 1 << 30


@dataclass
class Case:
    """Inputs of one measurement: hidden [N, d], head_weight [V, d], rows and labels of N rows."""

    hidden: Tensor
    head_weight: Tensor
    rows: TeacherRows
    labels: Tensor


@dataclass
class Result:
    """One row of the table. None where it does not apply or did not run; `note` says why."""

    method: str
    head: str
    rows: int
    hidden_size: int
    vocab_size: int
    topk: int
    dtype: str
    time_ms: float | None = None
    extra_gib: float | None = None
    error_hidden: float | None = None
    error_weight: float | None = None
    note: str = ""


def make_case(rows: int, head: Head, topk: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Case:
    """Random hidden states and head with logits of about unit variance, and decaying teacher rows of mass 0.95."""
    generator = torch.Generator(device=device).manual_seed(seed)
    d, v = head.hidden_size, head.vocab_size
    hidden = torch.empty(rows, d, dtype=dtype, device=device)
    for start in range(0, rows, 65_536):
        hidden[start : start + 65_536].normal_(generator=generator)
    head_weight = torch.empty(v, d, dtype=dtype, device=device).normal_(std=d**-0.5, generator=generator)
    # Distinct ids: an arithmetic progression modulo V, whose step shares no factor with V.
    step = next(s for s in range(v // (topk + 1), v) if math.gcd(s, v) == 1)
    first = torch.randint(v, (rows, 1), device=device, generator=generator)
    ids = ((first + step * torch.arange(topk, device=device)) % v).to(torch.int32)
    slope = 0.03 + 0.1 * torch.rand(rows, 1, device=device, generator=generator)
    logprobs = torch.log_softmax(-slope * torch.arange(topk, device=device), dim=1) + math.log(0.95)
    tail = torch.full((rows,), math.log(0.05), device=device)
    labels = ids[:, 0].long()
    return Case(hidden.requires_grad_(), head_weight.requires_grad_(), TeacherRows(ids, logprobs, tail), labels)


Method = Callable[[Case], Tensor]


def methods() -> dict[str, Method]:
    """Name to callable: ours, then the peers that are installed."""

    def ours(case: Case, **options: Any) -> Tensor:
        return kl_loss(case.hidden, case.head_weight, case.rows, validate=False, **options)

    found: dict[str, Method] = {name: partial(ours, method=name) for name in ("fused", "forward_chunked", "dense")}
    found["fused_recompute"] = partial(ours, recompute=True)
    if importlib.util.find_spec("benchmarks") and importlib.util.find_spec("benchmarks.closed_form"):
        from benchmarks.closed_form import closed_form_loss

        def closed_form(case: Case, lean: bool) -> Tensor:
            rows = case.rows
            return closed_form_loss(case.hidden, case.head_weight, rows.topk_ids, rows.topk_logprobs, lean=lean)

        found["closed_form"] = partial(closed_form, lean=False)
        found["closed_form_lean"] = partial(closed_form, lean=True)
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        found["liger_hard_label"] = lambda c: liger(c.head_weight, c.hidden, c.labels)
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy as cce

        found["cce_hard_label"] = lambda c: cce(c.hidden, c.head_weight, c.labels)
    builtin = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if builtin is not None:
        found["torch_hard_label"] = lambda c: builtin(c.hidden, c.head_weight, c.labels)
    return found


def _clear_grads(case: Case) -> None:
    case.hidden.grad = case.head_weight.grad = None


def _step(case: Case, method: Method) -> None:
    _clear_grads(case)
    method(case).backward()  # type: ignore[no-untyped-call]


class _PeakMemory:
    """Bytes beyond those in use at the start. CUDA: the allocator's peak. Linux CPU: the resident set's peak."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _status(self, field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/self/status has no {field}: extra memory on CPU is measured on Linux only")

    def start(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present
            self.base = self._status("VmRSS")

    def stop(self) -> int:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - self.base
        return self._status("VmHWM") - self.base


def time_ms(step: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Median milliseconds of a call, after one warm-up."""
    step()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            begin.record()
            step()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            began = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - began))
    return float(statistics.median(times))


def measure(name: str, method: Method, case: Case, repeats: int) -> tuple[float | None, float | None, str]:
    """Median time in ms, extra memory in GiB, and a note when it ran out of memory."""
    device = case.hidden.device
    try:
        _step(case, method)  # compile and warm up
        _clear_grads(case)
        peak = _PeakMemory(device)
        peak.start()
        _step(case, method)
        extra = peak.stop() / GIB
        return time_ms(lambda: _step(case, method), device, repeats), extra, ""
    except torch.OutOfMemoryError:
        return None, None, "out of memory"
    finally:
        _clear_grads(case)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def gradient_errors(method: Method, case: Case) -> tuple[float, float]:
    """Norm-wise relative error of both gradients against float64 on the case's first rows (bucket, forward KL)."""
    n = min(ERROR_ROWS, case.hidden.shape[0])

    def cut(dtype: torch.dtype) -> Case:
        hidden = case.hidden.detach()[:n].to(dtype).requires_grad_()
        return Case(hidden, case.head_weight.detach().to(dtype).requires_grad_(), case.rows[:n], case.labels[:n])

    small, exact = cut(case.hidden.dtype), cut(torch.float64)
    method(small).backward()  # type: ignore[no-untyped-call]
    truth = kl_loss(exact.hidden, exact.head_weight, exact.rows, method="forward_chunked", validate=False)
    truth.backward()  # type: ignore[no-untyped-call]
    errors = []
    for ours, theirs in ((small.hidden, exact.hidden), (small.head_weight, exact.head_weight)):
        assert ours.grad is not None
        assert theirs.grad is not None
        errors.append(float((ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()))
    return errors[0], errors[1]


def certainly_too_large(name: str, rows: int, head: Head, dtype: torch.dtype, device: torch.device) -> bool:
    """True where [N, V] grids alone exceed the device, so that trying would only take time."""
    if device.type != "cuda" or name not in ("dense", "forward_chunked"):
        return False
    grid_bytes = {"dense": 16, "forward_chunked": 6}[name] * rows * head.vocab_size
    return grid_bytes > torch.cuda.get_device_properties(device).total_memory


def machine(device: torch.device) -> dict[str, Any]:
    """Where and when figures were taken."""
    info: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device.type,
        "cpu_threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        import triton

        properties = torch.cuda.get_device_properties(device)
        info |= {"gpu": properties.name, "cuda": torch.version.cuda, "triton": triton.__version__}
    else:
        info["cpu"] = platform.machine()
    return info


def run_benchmark(
    heads: Sequence[str],
    lengths: Sequence[int],
    names: Sequence[str],
    *,
    topk: int,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
    report: Callable[[Result], None],
) -> list[Result]:
    """Every method at every length and head; `report` sees each row as it comes."""
    available = methods()
    results = []
    for head_name in heads:
        head = HEADS[head_name]
        for length in lengths:
            case = make_case(length, head, topk, dtype, device)
            for name in names:
                result = Result(
                    name, head_name, length, head.hidden_size, head.vocab_size, topk, str(dtype).removeprefix("torch.")
                )
                if name not in available:
                    result.note = "not installed"
                elif certainly_too_large(name, length, head, dtype, device):
                    result.note = "out of memory (its grids alone exceed the device)"
                else:
                    result.time_ms, result.extra_gib, result.note = measure(name, available[name], case, repeats)
                    same_loss = name in ("fused", "forward_chunked", "dense", "fused_recompute")
                    if result.time_ms is not None and same_loss and length == min(lengths):
                        result.error_hidden, result.error_weight = gradient_errors(available[name], case)
                results.append(result)
                report(result)
            del case
    return results


@dataclass(frozen=True)
class CpuRatio:
    """The CPU bar: fused over forward-chunked, in time and in extra memory, in one process."""

    time_ratio: float
    memory_ratio: float
    fused_ms: float
    forward_chunked_ms: float
    fused_extra_mib: float
    forward_chunked_extra_mib: float
    max_time_ratio: float = 1.3
    max_memory_ratio: float = 0.35

    @property
    def holds(self) -> bool:
        return self.time_ratio <= self.max_time_ratio and self.memory_ratio <= self.max_memory_ratio


def cpu_ratio(rows: int = 2048, head: Head = HEADS["smollm2-135m"], topk: int = 100, repeats: int = 3) -> CpuRatio:
    """Measure fused and forward-chunked in turn on the CPU, in float32."""
    case = make_case(rows, head, topk, torch.float32, torch.device("cpu"))
    available = methods()
    figures: dict[str, tuple[float, float]] = {}
    for name in ("fused", "forward_chunked"):
        elapsed, extra, _ = measure(name, available[name], case, repeats)
        assert elapsed is not None
        assert extra is not None
        figures[name] = (elapsed, extra * 1024)
    fused, whole = figures["fused"], figures["forward_chunked"]
    return CpuRatio(fused[0] / whole[0], fused[1] / whole[1], fused[0], whole[0], fused[1], whole[1])


def plot(results: Sequence[Result], folder: Path) -> list[Path]:
    """Two SVG plots, extra memory and time against rows, one line a method, for the first head measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    head = results[0].head
    paths = []
    for field, label in (("extra_gib", "extra memory, GiB"), ("time_ms", "forward + backward, ms")):
        figure, axes = pyplot.subplots(figsize=(6, 4))
        for name in dict.fromkeys(r.method for r in results):
            points = [(r.rows, getattr(r, field)) for r in results if r.method == name and r.head == head]
            points = [p for p in points if p[1] is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set(xscale="log", yscale="log", xlabel="rows", ylabel=label, title=f"{head}, K = {results[0].topk}")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        path = folder / f"loss-{field.split('_')[0]}.svg"
        figure.savefig(path, bbox_inches="tight")
        pyplot.close(figure)
        paths.append(path)
    return paths


def table(results: Sequence[Result]) -> Table:
    """The results for a terminal."""
    out = Table("method", "head", "rows", "ms", "extra GiB", "error dH", "error dW", "note")
    for r in results:

        def show(x: float | None, pattern: str) -> str:
            return "" if x is None else format(x, pattern)

        errors = show(r.error_hidden, ".1e"), show(r.error_weight, ".1e")
        out.add_row(r.method, r.head, f"{r.rows:,}", show(r.time_ms, ".1f"), show(r.extra_gib, ".3f"), *errors, r.note)
    return out


DEFAULT_METHODS = (
    "fused",
    "fused_recompute",
    "closed_form",
    "closed_form_lean",
    "forward_chunked",
    "dense",
    "liger_hard_label",
    "cce_hard_label",
    "torch_hard_label",
)


def bench_loss(
    rows: Annotated[
        list[int] | None, typer.Option(help="Rows (tokens) to measure at; repeat. Default 4,096 up.")
    ] = None,
    head: Annotated[list[str] | None, typer.Option(help=f"Heads, of {', '.join(HEADS)}; repeat.")] = None,
    method: Annotated[list[str] | None, typer.Option(help=f"Methods, of {', '.join(DEFAULT_METHODS)}; repeat.")] = None,
    topk: Annotated[int, typer.Option(help="Cached entries a row.")] = 100,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32. Default bfloat16 on CUDA.")] = "",
    device: Annotated[str, typer.Option(help="cuda or cpu. Default: cuda if there is one.")] = "",
    repeats: Annotated[int, typer.Option(help="Timed repetitions; the median is reported.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Folder for loss.json and two plots.")] = None,
    cpu_ratio_only: Annotated[
        bool, typer.Option("--cpu-ratio", help="Only the CPU bar: fused against forward_chunked; exit 1 if missed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure the losses: time, extra memory beyond inputs (gradients included), error against float64.

    Without a GPU the defaults are one small head and 2,048 rows. A method that runs out of memory is a row that says so.

    Example: python -m trainer bench-loss --rows 2048 --method fused --out build/bench
    """
    console = Console()
    if cpu_ratio_only:
        ratio = cpu_ratio(repeats=repeats)
        if as_json:
            print(json.dumps(asdict(ratio) | {"holds": ratio.holds, "machine": machine(torch.device("cpu"))}))
        else:
            print(
                f"CPU, 2,048 rows x 576 x 49,152, float32: fused / forward_chunked time {ratio.time_ratio:.2f} "
                f"(at most {ratio.max_time_ratio}), extra memory {ratio.memory_ratio:.2f} "
                f"(at most {ratio.max_memory_ratio}); fused {ratio.fused_ms:.0f} ms, {ratio.fused_extra_mib:.0f} MiB; "
                f"forward_chunked {ratio.forward_chunked_ms:.0f} ms, {ratio.forward_chunked_extra_mib:.0f} MiB"
            )
        raise typer.Exit(0 if ratio.holds else 1)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = where.type == "cuda"
    heads = head or (["llama-3.2-3b"] if on_gpu else ["smollm2-135m"])
    lengths = rows or (list(LENGTHS) if on_gpu else [2048])
    names = method or list(DEFAULT_METHODS)
    for kind, given, known in (("head", heads, HEADS), ("method", names, DEFAULT_METHODS)):
        for name in given:
            if name not in known:
                raise typer.BadParameter(f"{name!r} is not a {kind}; expected one of {', '.join(known)}")
    number = dtype or ("bfloat16" if on_gpu else "float32")
    if number not in ("bfloat16", "float16", "float32"):
        raise typer.BadParameter(f"dtype must be bfloat16, float16 or float32, found {number!r}")

    def report(result: Result) -> None:
        if not as_json:
            shown = result.note or f"{result.time_ms:.1f} ms, {result.extra_gib:.3f} GiB"
            console.print(f"{result.head} {result.rows:,} rows {result.method}: {shown}")

    results = run_benchmark(
        heads, lengths, names, topk=topk, dtype=getattr(torch, number), device=where, repeats=repeats, report=report
    )
    document = {"machine": machine(where), "results": [asdict(r) for r in results]}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "loss.json").write_text(json.dumps(document, indent=1) + "\n")
        if importlib.util.find_spec("matplotlib"):
            plot(results, out)
        else:
            console.print("matplotlib is not installed: no plots")
    if as_json:
        print(json.dumps(document))
    else:
        console.print(table(results))
