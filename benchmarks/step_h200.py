"""Whole optimiser steps of the 3.2 B Llama shape on one H200: rate, memory, documents kept apart, long contexts.

    python benchmarks/step_h200.py [--groups attention,rate,documents,lengths] [--budget-s 420] [--out FOLDER]
    python benchmarks/step_h200.py --device cpu --tiny          # a smoke test of the script

Groups, in this order; each row is printed as it is taken, an error becomes the row's text, and no row is started
after the budget is spent:
  attention  kernels alone (benchmarks/attention_h200.py)
  rate       32,768 tokens in one document, by checkpointing policy, float32 moments over split bf16 weights
  bf16       the same with bfloat16 moments, which leave room to recompute nothing
  documents  32,768 tokens as 8 documents of 4,096 and as 64 of 512, by attention path
  lengths    8,192 to 262,144 tokens, the policy that fits
  long       524,288 tokens, one step without a warm-up (minutes)
  compile    torch.compile of each layer
  profile    kernels of one step, by time
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

# Lengths change from row to row: segments that can grow keep the allocator from fragmenting. Before torch is loaded.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import attention_h200
from trainer.bench.measure import kernels, machine, release_memory, save
from trainer.bench.step import StepBench, StepCase, StepFigures, synthetic_sequence
from trainer.flops import measured_matmul_rate

GROUPS = ("attention", "rate", "bf16", "documents", "lengths", "long", "compile", "profile")
DEFAULT = "attention,rate,bf16,documents,lengths,profile"


def cases(group: str, on_gpu: bool) -> list[tuple[StepCase, int]]:
    """Return (case, timed repeats) of a group; long ones are timed once and not warmed up."""
    kind = "mixed" if on_gpu else "documents"
    case = StepCase(32_768, attention=kind)
    tiled = replace(case, policy="keep-attention", mlp_tile=32_768)
    paths = ("mixed", "varlen", "flex") if on_gpu else ("documents", "plain")
    grid: dict[str, list[tuple[StepCase, int]]] = {
        "rate": [(replace(case, policy=policy), 2) for policy in ("keep-matmuls", "keep-attention", "full", "none")],
        "bf16": [(replace(case, policy=policy), 2) for policy in ("none", "keep-matmuls")],
        "documents": [
            (replace(case, policy="keep-matmuls", documents=count, attention=path), 2)
            for count in (8, 64)
            for path in paths
        ],
        "lengths": [
            (replace(case, tokens=8_192), 2),
            (replace(case, tokens=16_384), 2),
            (replace(case, tokens=65_536, policy="keep-attention"), 1),
            (replace(tiled, tokens=131_072), 0),
            (replace(tiled, tokens=262_144), 0),
        ],
        "long": [(replace(tiled, tokens=524_288, policy="offload"), 0)],
        "compile": [(replace(case, compile=True), 2)],
    }
    return grid.get(group, [])


def report_row(result: StepFigures, group: str, peak: float | None) -> dict[str, Any]:
    """Print a row and return it for the report."""
    shown = result.error
    if result.tflops is not None:
        share = f" {result.tflops * 1e12 / peak:5.1%}" if peak else ""
        memory = f" | {result.memory_gib:6.1f} GiB" if result.memory_gib is not None else ""
        shown = (
            f"{result.seconds:8.3f} s | {result.tokens_per_s:8,.0f} tok/s | {result.tflops:6.1f} TFLOP/s{share}{memory}"
        )
        shown += f" | loss {result.loss:.4f}"
    print(f"{group:>10} | {result.case.label():<52} | {shown}", flush=True)
    return {"group": group, **asdict(result)}


def main() -> None:
    """Run the groups that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="llama-3.2b")
    parser.add_argument("--tiny", action="store_true", help="tiny shape and lengths: a smoke test of the script")
    parser.add_argument("--groups", default=DEFAULT, help=f"comma-separated, of {', '.join(GROUPS)}")
    parser.add_argument("--budget-s", type=float, default=420.0)
    parser.add_argument("--out", type=Path, help="folder for step_h200.json")
    arguments = parser.parse_args()
    wanted, began = arguments.groups.split(","), time.monotonic()
    if unknown := sorted(set(wanted) - set(GROUPS)):
        parser.error(f"unknown groups {', '.join(unknown)}; expected of {', '.join(GROUPS)}")
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    report: dict[str, Any] = {"machine": machine(device), "shape": arguments.shape, "rows": []}
    peak = measured_matmul_rate(device) if on_gpu else None
    report["matmul_tflops"] = peak and peak / 1e12
    print(report["machine"], f"bf16 matrix rate {peak / 1e12:.0f} TFLOP/s" if peak else "", flush=True)

    def left() -> float:
        return arguments.budget_s - (time.monotonic() - began)

    if "attention" in wanted:
        report["attention"] = attention_h200.run(device, tiny=arguments.tiny)
    bench: StepBench | None = None
    for group in [name for name in GROUPS if name in wanted and name != "attention"]:
        moments = "float32" if group == "rate" else "bfloat16"
        if bench is None or bench.config.optim.state != moments:
            bench = None  # one model at a time
            release_memory(device)
            shape = "tiny" if arguments.tiny else arguments.shape
            bench = StepBench(shape, device, torch.bfloat16, optim={"state": moments})
            liger = "on" if bench.uses_liger else "off"
            print(f"{bench.parameters / 1e9:.3f} B parameters, {moments} moments, liger {liger}", flush=True)
        if group == "profile" and on_gpu:
            case = StepCase(32_768)
            bench.run(case, repeats=0, warmup=1)
            step, sequence = bench.step(case.attention), synthetic_sequence(case.tokens, 1, bench.vocab_size)
            report["profile"] = kernels(partial(step.run, [sequence], lr=1e-5))
        for case, repeats in cases(group, on_gpu):
            if left() < 0:
                print(f"{group:>10} | {case.label()} | not started: the budget is spent", flush=True)
                continue
            if arguments.tiny:
                case = replace(case, tokens=case.tokens // 128, mlp_tile=case.mlp_tile and case.mlp_tile // 128)
            result = bench.run(case, repeats=max(repeats, 1), warmup=1 if repeats else 0)
            report["rows"].append(report_row(result, group, peak))
            if result.seconds is None and case.policy == "keep-attention" and left() > 0:
                case = replace(case, policy="full")
                report["rows"].append(report_row(bench.run(case, repeats=1, warmup=0), group, peak))
            save(arguments.out, "step_h200.json", report)
    save(arguments.out, "step_h200.json", report)
    print(f"done in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
