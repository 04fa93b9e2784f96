"""Everything about the loss that needs a GPU, in one call: kernel variants, whole losses, a profile.

    python benchmarks/loss_h200.py OUT [section ...]

Sections run one after another and a failing one does not stop the others; OUT/loss_h200.json holds what they found.
A figure of a whole loss is [milliseconds, extra GiB, note].
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.bench.loss import LossFigures, Method, fused, make_inputs, measure, methods, run_benchmark
from trainer.bench.measure import kernels, machine, release_memory, save, time_ms
from trainer.bench.shapes import HEADS
from trainer.losses import row_triton
from trainer.losses.options import LossOptions

DEVICE = torch.device("cuda")
LLAMA_3B = HEADS["llama-3.2-3b"]
K = 100
# Launch configurations of the row kernel: columns, warps, programs a multiprocessor, loads in flight, store policy.
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


say = partial(print, flush=True)


def whole(rows: int, head: str, calls: dict[str, Method], repeats: int) -> dict[str, Any]:
    """Measure whole losses on one set of inputs, in the order of `calls`."""
    inputs = make_inputs(rows, HEADS[head], K, torch.bfloat16, DEVICE)
    found = {}
    for name, method in calls.items():
        found[name] = ms, gib, note = measure(method, inputs, repeats)
        rate = f"{6 * rows * HEADS[head].hidden_size * HEADS[head].vocab_size / ms / 1e9:.0f} TFLOP/s" if ms else ""
        say(f"{rows:,} rows, {head}, {name}: {ms} ms, {gib} GiB {rate} {note}")
    return found


def compared(lengths: list[int], names: list[str], repeats: int) -> list[dict[str, Any]]:
    """Measure methods and installed peers as `bench-loss` does."""

    def report(r: LossFigures) -> None:
        say(r.rows, r.method, r.time_ms, r.extra_gib, r.error_hidden, r.error_weight, r.note)

    call = {"top_k": K, "dtype": torch.bfloat16, "device": DEVICE, "repeats": repeats, "report": report}
    return [vars(r) for r in run_benchmark(["llama-3.2-3b"], lengths, names, **call)]


def row_kernel() -> Any:
    """Time the row kernel alone over 2,816 rows of 128,256 bf16 logits, by launch configuration, in ms."""
    n, v = 2816, LLAMA_3B.vocab_size
    rows = make_inputs(n, LLAMA_3B, K, torch.bfloat16, DEVICE).rows
    source = torch.randn(n, v, device=DEVICE).bfloat16()
    logits, scale = source.clone(), torch.full((n,), 1.0, device=DEVICE)
    calls: dict[str, Callable[[], Any]] = {"copy": lambda: logits.copy_(source)}
    kernel = partial(row_triton.loss_and_grad_in_place, logits, None, rows, None, scale, LossOptions(), True)
    for numbers in CONFIGS:
        calls["/".join(map(str, numbers))] = partial(kernel, row_triton.LaunchConfig(*numbers))
    found = {}
    for name, call in calls.items():
        logits.copy_(source)
        found[name] = ms = time_ms(call, DEVICE, 12)
        say(f"{name:>28}: {ms:.3f} ms, {2 * n * v * 2 / ms / 1e9:.2f} TB/s of read + write")
    return found


def chunks() -> Any:
    """Measure the whole loss at 32,768 rows by chunk, between two measurements of both closed forms."""
    closed = {name: methods()[name] for name in ("closed_form", "closed_form_lean")}
    calls: dict[str, Method] = {f"{name}, before": call for name, call in closed.items()}
    calls |= {str(chunk): fused(chunk) for chunk in (2048, 3072, 4096)}
    return whole(32_768, "llama-3.2-3b", calls | {f"{name}, after": call for name, call in closed.items()}, 8)


def long() -> Any:
    """Measure 262,144 and 1,048,576 rows."""
    found = {}
    for rows, names in ((262_144, ("fused", "closed_form")), (1_048_576, ("fused",))):
        figures = whole(rows, "llama-3.2-3b", {name: methods()[name] for name in names}, 2)
        found |= {f"{rows} {name}": value for name, value in figures.items()}
    return found


def heads() -> Any:
    """Measure the fused loss on the heads of other models at 32,768 rows."""
    names = ("llama-3.1-8b", "gpt-oss", "qwen3-4b", "gemma-3-1b")
    return {name: whole(32_768, name, {"fused": fused()}, 3)["fused"] for name in names}


def profile() -> Any:
    """Measure the device time by kernel of one call at 32,768 rows."""
    inputs = make_inputs(32_768, LLAMA_3B, K, torch.bfloat16, DEVICE)
    fused()(inputs).backward()
    return kernels(lambda: fused()(inputs).backward())


SECTIONS: dict[str, Callable[[], Any]] = {
    "row_kernel": row_kernel,
    "chunks": chunks,
    # d = 4,096, whole and in two chunks
    "single_chunk": lambda: whole(4096, "llama-3.1-8b", {str(chunk): fused(chunk) for chunk in (4096, 2048)}, 20),
    "profile": profile,
    "all_methods": lambda: compared([4096, 32_768], list(methods()), 5),
    "whole_logits": lambda: compared([32_768], ["closed_form", "fused", "forward_chunked", "dense"], 4),
    "heads": heads,
    "long": long,
}


def main() -> None:
    """Run the sections that the command line names, or all."""
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= SECTIONS.keys():
        raise SystemExit(f"{__doc__}\nSections: {', '.join(SECTIONS)}")
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
        release_memory(DEVICE)
        say(f"({time.perf_counter() - began:.1f} s)")
        save(Path(sys.argv[1]), "loss_h200.json", document)


if __name__ == "__main__":
    main()
