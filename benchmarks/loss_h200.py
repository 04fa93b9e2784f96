"""Everything about the loss that needs a GPU, in one call: kernel variants, products, whole losses, a profile.

    python benchmarks/loss_h200.py OUT [section ...]

Sections run one after another and a failing one does not stop the others; OUT/loss_h200.json holds what they found.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.bench.loss import (
    HEADS,
    Case,
    machine,
    make_case,
    measure,
    methods,
    run_benchmark,
    time_ms,
)
from trainer.losses import kl_loss, row_triton
from trainer.losses import products as product_settings
from trainer.losses.options import LossOptions
from trainer.losses.products import mm_by_rows, weight_grad

DEVICE = torch.device("cuda")
LLAMA_3B = HEADS["llama-3.2-3b"]
K = 100


CONFIGS = (
    (8192, 8, 2, 4, "evict_first"),
    (8192, 8, 2, 4, ""),
    (8192, 8, 1.5, 4, "evict_first"),
    (8192, 8, 2, 3, "evict_first"),
    (4096, 4, 4, 4, "evict_first"),
    (4096, 4, 3, 4, "evict_first"),
    (8192, 8, 3, 3, "evict_first"),
    (16384, 32, 1, 1, "evict_first"),
)


def say(*parts: Any) -> None:
    print(*parts, flush=True)


def bench(function: Callable[[], Any], repeats: int = 12) -> float:
    """Median ms."""
    return time_ms(function, DEVICE, repeats)


def fused(chunk: int | None = None) -> Callable[[Case], torch.Tensor]:
    return lambda c: kl_loss(c.hidden, c.head_weight, c.rows, chunk_size=chunk, validate=False)


def row_kernel() -> Any:
    """Milliseconds of the row kernel alone over 2,816 rows of 128,256 bf16 logits, by launch configuration."""
    n, v = 2816, LLAMA_3B.vocab_size
    case = make_case(n, LLAMA_3B, K, torch.bfloat16, DEVICE)
    source = torch.randn(n, v, device=DEVICE).bfloat16()
    logits = source.clone()
    scale = torch.full((n,), 1.0, device=DEVICE)
    rows = case.rows
    found = {}
    copy_ms = bench(lambda: logits.copy_(source))
    say(f"copy of the same bytes: {copy_ms:.3f} ms = {2 * n * v * 2 / copy_ms / 1e9:.2f} TB/s")
    for numbers in CONFIGS:
        config = row_triton.LaunchConfig(*numbers)

        def call(config: row_triton.LaunchConfig = config) -> None:
            row_triton.loss_and_grad_in_place(
                logits,
                None,
                rows.topk_ids,
                rows.topk_logprobs,
                rows.tail_logprob,
                None,
                scale,
                LossOptions(),
                True,
                config,
            )

        logits.copy_(source)
        found["/".join(map(str, numbers))] = bench(call)

    for name, value in sorted(found.items(), key=lambda item: item[1]):
        say(f"row kernel {name:>28}: {value:.3f} ms, {2 * n * v * 2 / value / 1e9:.2f} TB/s of read + write")
    return found | {"copy": copy_ms}


def row_kernel_in_loss() -> Any:
    """The whole loss by the row kernel's configuration: alone, the kernel runs at a higher clock than among products."""
    case = make_case(32_768, LLAMA_3B, K, torch.bfloat16, DEVICE)
    found = {}
    default = row_triton.DEFAULT_CONFIG
    for numbers in (
        (8192, 8, 2, 4, "evict_first"),
        (8192, 8, 2, 4, ""),
        (8192, 8, 1.5, 4, "evict_first"),
        (8192, 8, 2, 3, "evict_first"),
        (4096, 4, 4, 4, "evict_first"),
        (8192, 8, 3, 3, "evict_first"),
        (16384, 32, 1, 1, "evict_first"),
        (8192, 8, 2, 4, "evict_first"),
    ):
        row_triton.DEFAULT_CONFIG = row_triton.LaunchConfig(*numbers)
        result = measure("fused", fused(3072), case, 8)
        found[str(numbers)] = result
        say(f"{numbers}: {result[0]:.1f} ms")
    row_triton.DEFAULT_CONFIG = default
    return found


def sustained(function: Callable[[], Any], seconds: float = 0.35) -> float:
    """Mean ms under continuous load: a cool GPU runs products up to 15 % faster for the first tens of ms."""
    function()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(10):
            function()
        torch.cuda.synchronize()
    begin.record()
    for _ in range(30):
        function()
        count += 1
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count


def products_at(n: int, slices: tuple[int, ...]) -> dict[str, float]:
    """TFLOP/s of the three products for a chunk of n rows, whole and by slices of rows, under continuous load."""
    d, v = LLAMA_3B.hidden_size, LLAMA_3B.vocab_size
    head = torch.randn(v, d, device=DEVICE, dtype=torch.bfloat16) * d**-0.5
    hidden = torch.randn(n, d, device=DEVICE, dtype=torch.bfloat16)
    logits = torch.empty(n, v, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty(n, d, device=DEVICE, dtype=torch.bfloat16)
    acc = torch.zeros(v, d, device=DEVICE)
    half = torch.zeros(v, d, device=DEVICE, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {"logits": lambda: torch.mm(hidden, head.t(), out=logits)}
    for rows in slices:
        calls[f"logits/{rows}"] = lambda rows=rows: mm_by_rows(hidden, head.t(), logits, rows)  # type: ignore[misc]
    rates = {}
    tera = 2 * n * d * v / 1e9
    for name, call in calls.items():
        rates[name] = tera / sustained(call)
    # Values like those of a gradient: power, and so the clock, depend on them.
    torch.softmax(logits, dim=1, out=logits)
    calls = {"dH": lambda: torch.mm(logits, head, out=out)}
    for rows in slices:
        calls[f"dH/{rows}"] = lambda rows=rows: mm_by_rows(logits, head, out, rows)  # type: ignore[misc]
    calls["dW fp32 +="] = lambda: weight_grad(logits, hidden, acc, True)
    calls["dW fp32 ="] = lambda: weight_grad(logits, hidden, acc, False)
    calls["dW bf16 ="] = lambda: weight_grad(logits, hidden, half, False)
    half_v = v // 2

    def by_vocabulary() -> None:
        weight_grad(logits[:, :half_v], hidden, acc[:half_v], True)
        weight_grad(logits[:, half_v:], hidden, acc[half_v:], True)

    calls["dW += V/2"] = by_vocabulary
    for name, call in calls.items():
        rates[name] = tera / sustained(call)
    return rates


def products() -> Any:
    """TFLOP/s of the three products by chunk and slicing."""
    found = {}
    for n, slices in ((1408, ()), (2048, (1024,)), (2816, (1408, 704)), (3072, (1536, 2048)), (4096, (2048, 1408))):
        found[n] = rates = products_at(n, slices)
        say(f"chunk {n}: " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()))
    return found


def slices() -> Any:
    """The whole loss by the rows that a product takes at a time."""
    case = make_case(32_768, LLAMA_3B, K, torch.bfloat16, DEVICE)
    found = {}
    for chunk, logits_rows, hidden_rows in (
        (3072, None, None),
        (3072, None, 1536),
        (2944, None, None),
        (3072, None, None),
        (3072, None, 1536),
    ):
        product_settings.LOGITS_ROWS, product_settings.GRAD_HIDDEN_ROWS = logits_rows, hidden_rows
        result = measure("fused", fused(chunk), case, 8)
        found[f"{chunk} {logits_rows} {hidden_rows}"] = result
        say(f"chunk {chunk}, logits by {logits_rows}, dH by {hidden_rows}: {result[0]:.1f} ms, {result[1]:.3f} GiB")
    product_settings.LOGITS_ROWS = product_settings.GRAD_HIDDEN_ROWS = None
    return found


def power() -> Any:
    """What the GPU says of its clock and power while the fused loss runs."""
    case = make_case(32_768, LLAMA_3B, K, torch.bfloat16, DEVICE)
    method = methods()["fused"]
    fields = "clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.sw_power_cap,clocks_event_reasons.hw_slowdown"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-lms", "150"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sampler:
        for _ in range(12):
            method(case).backward()
            case.hidden.grad = case.head_weight.grad = None
            torch.cuda.synchronize()
        sampler.terminate()
        lines = (sampler.stdout.read() if sampler.stdout else "").splitlines()
    say(fields)
    for line in lines[-6:]:
        say(line)
    return lines


def blas_libraries() -> Any:
    """The same products through cuBLAS and cuBLASLt."""
    found = {}
    for library in ("cublas", "cublaslt"):
        torch.backends.cuda.preferred_blas_library(library)
        case = make_case(32_768, LLAMA_3B, K, torch.bfloat16, DEVICE)
        found[library] = measure(library, fused(2816), case, 3)[:2]
        say(library, found[library])
    torch.backends.cuda.preferred_blas_library("default")
    return found


def chunks() -> Any:
    """The whole loss at 32,768 rows by chunk, between two measurements of both closed forms."""
    case = make_case(32_768, LLAMA_3B, K, torch.bfloat16, DEVICE)
    found: dict[Any, Any] = {}

    def closed(when: str) -> None:
        for name in ("closed_form", "closed_form_lean"):
            found[f"{name}, {when}"] = result = measure(name, methods()[name], case, 5)
            say(f"{name}, {when}: {result[0]:.1f} ms, {result[1]:.3f} GiB")

    closed("before")
    for chunk in (2048, 3072, 4096, 3072, 4096):
        found[chunk] = result = measure("fused", fused(chunk), case, 8)
        say(f"fused chunk {chunk}: {result[0]:.1f} ms, {result[1]:.3f} GiB")
    closed("after")
    return found


def cheaper_row_kernel() -> Any:
    """What is left to gain in the row kernel: replaced by nothing, and by one pass that reads and writes each element.

    The results are garbage and the values differ from a gradient's, which moves power and so the clock by a little.
    """
    case = make_case(32_768, LLAMA_3B, K, torch.bfloat16, DEVICE)
    real = row_triton.loss_and_grad_in_place

    def nothing(logits: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.empty(logits.shape[0], device=DEVICE)

    def one_pass(logits: torch.Tensor, *_: Any) -> torch.Tensor:
        logits.sigmoid_()
        return torch.empty(logits.shape[0], device=DEVICE)

    found = {}
    try:
        for name, kernel in (
            ("nothing", nothing),
            ("one pass", one_pass),
            ("real", real),
            ("one pass again", one_pass),
        ):
            row_triton.loss_and_grad_in_place = kernel
            found[name] = measure(name, fused(3072), case, 8)
            say(f"row kernel = {name}: {found[name][0]:.1f} ms")
    finally:
        row_triton.loss_and_grad_in_place = real
    return found


def single_chunk() -> Any:
    """4,096 rows at d = 4,096."""
    case = make_case(4096, HEADS["llama-3.1-8b"], K, torch.bfloat16, DEVICE)
    found = {}
    for chunk in (4096, 2048):
        found[chunk] = measure("fused", fused(chunk), case, 20)
        say(f"4,096 rows, d = 4,096, chunk {chunk}: {found[chunk][0]:.2f} ms, {found[chunk][1]:.3f} GiB")
    return found


def long() -> Any:
    """262,144 and 1,048,576 rows."""
    found: dict[Any, Any] = {}
    for n, names in ((262_144, ("fused", "closed_form")), (1_048_576, ("fused",))):
        case = make_case(n, LLAMA_3B, K, torch.bfloat16, DEVICE)
        for name in names:
            found[f"{n} {name}"] = result = measure(name, methods()[name], case, 2)
            say(f"{n:,} rows {name}: {result[0]} ms, {result[1]} GiB {result[2]}")
        del case
    return found


def all_methods() -> Any:
    """Every method and installed peer at 4,096 and 32,768 rows, with errors."""
    names = list(methods())
    results = run_benchmark(
        ["llama-3.2-3b"],
        [4096, 32_768],
        names,
        topk=K,
        dtype=torch.bfloat16,
        device=DEVICE,
        repeats=5,
        report=lambda r: say(r.rows, r.method, r.time_ms, r.extra_gib, r.error_hidden, r.error_weight, r.note),
    )
    return [vars(r) for r in results]


def whole_logits() -> Any:
    """The methods that hold whole logits, beside fused and the closed form, at 32,768 rows."""
    results = run_benchmark(
        ["llama-3.2-3b"],
        [32_768],
        ["closed_form", "fused", "forward_chunked", "dense"],
        topk=K,
        dtype=torch.bfloat16,
        device=DEVICE,
        repeats=4,
        report=lambda r: say(r.rows, r.method, r.time_ms, r.extra_gib, r.note),
    )
    return [vars(r) for r in results]


def heads() -> Any:
    """The fused loss on the heads of other models at 32,768 rows."""
    found = {}
    for name in ("llama-3.1-8b", "gpt-oss", "qwen3-4b", "gemma-3-1b"):
        case = make_case(32_768, HEADS[name], K, torch.bfloat16, DEVICE)
        found[name] = result = measure("fused", methods()["fused"], case, 3)
        flop = 6 * 32_768 * HEADS[name].hidden_size * HEADS[name].vocab_size
        say(f"{name}: {result[0]:.1f} ms, {flop / result[0] / 1e9:.0f} TFLOP/s, {result[1]:.3f} GiB")
        del case
    return found


def profile() -> Any:
    """Device time by kernel of one call at 32,768 rows."""
    case = make_case(32_768, LLAMA_3B, K, torch.bfloat16, DEVICE)
    method = methods()["fused"]
    method(case).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        method(case).backward()
        torch.cuda.synchronize()
    found = {}
    for event in sorted(trace.key_averages(), key=lambda e: -e.self_device_time_total)[:12]:
        found[event.key[:110]] = (event.count, event.self_device_time_total / 1e3)
        say(f"{event.self_device_time_total / 1e3:9.2f} ms {event.count:4d}x {event.key[:110]}")
    return found


def overlap() -> Any:
    """Idea: the row kernel of one chunk on a second stream while the next chunk's products run."""
    case = make_case(32_768, LLAMA_3B, K, torch.bfloat16, DEVICE)
    hidden, head, rows = case.hidden.detach(), case.head_weight.detach(), case.rows
    n, v, options = hidden.shape[0], head.shape[0], LossOptions()
    scale = torch.full((n,), 1.0 / n, device=DEVICE)
    side = torch.cuda.Stream()
    found = {}

    def run(chunk: int) -> None:
        buffers = [torch.empty(chunk, v, device=DEVICE, dtype=hidden.dtype) for _ in range(2)]
        acc = torch.empty(v, hidden.shape[1], device=DEVICE)
        grad_hidden = torch.empty_like(hidden)
        main = torch.cuda.current_stream()
        parts = [slice(s, min(s + chunk, n)) for s in range(0, n, chunk)]
        ready: list[Any] = []

        def logits_and_rows(i: int) -> None:
            part = parts[i]
            buffer = buffers[i % 2][: part.stop - part.start]
            torch.mm(hidden[part], head.t(), out=buffer)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                row_triton.loss_and_grad_in_place(
                    buffer,
                    None,
                    rows.topk_ids[part],
                    rows.topk_logprobs[part],
                    rows.tail_logprob[part],
                    None,
                    scale[part],
                    options,
                    True,
                )
                ready.append(side.record_event())

        logits_and_rows(0)
        for i, part in enumerate(parts):
            if i + 1 < len(parts):
                logits_and_rows(i + 1)
            main.wait_event(ready[i])
            buffer = buffers[i % 2][: part.stop - part.start]
            torch.mm(buffer, head, out=grad_hidden[part])
            weight_grad(buffer, hidden[part], acc, accumulate=i > 0)

    for chunk in (1408, 2048, 2816):
        found[chunk] = bench(lambda chunk=chunk: run(chunk), 4)
        say(f"two streams, two buffers of {chunk}: {found[chunk]:.1f} ms (without the final conversion of dW)")
    return found


SECTIONS: dict[str, Callable[[], Any]] = {
    f.__name__: f
    for f in (
        row_kernel,
        row_kernel_in_loss,
        products,
        slices,
        power,
        chunks,
        cheaper_row_kernel,
        single_chunk,
        overlap,
        profile,
        blas_libraries,
        all_methods,
        whole_logits,
        heads,
        long,
    )
}


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"machine": machine(DEVICE)}
    say(document["machine"])
    for name in sys.argv[2:] or list(SECTIONS):
        began = time.perf_counter()
        say(f"--- {name}")
        try:
            document[name] = SECTIONS[name]()
        except Exception:  # one section must not cost the others their measurements
            document[name] = {"failed": traceback.format_exc()}
            say(traceback.format_exc()[-1500:])
        torch.cuda.empty_cache()
        say(f"({time.perf_counter() - began:.1f} s)")
        (out / "loss_h200.json").write_text(json.dumps(document, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
