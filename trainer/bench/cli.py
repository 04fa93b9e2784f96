"""The commands `bench-loss` and `bench-step`: options and output. Imports torch when one of them runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from teachercache.console import text_console
from trainer.bench.shapes import HEADS, LENGTHS, METHODS, SHAPES

Device = Annotated[str, typer.Option(help="cuda or cpu. Default: cuda if there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _check_known(kind: str, given: list[str], known: object) -> None:
    names = list(known)  # type: ignore[call-overload]
    for name in given:
        if name not in names:
            raise typer.BadParameter(f"{name!r} is not a {kind}; expected one of {', '.join(names)}")


def bench_loss(
    rows: Annotated[
        list[int] | None, typer.Option(help="Rows (tokens) to measure at; repeat. Default 4,096 up.")
    ] = None,
    head: Annotated[list[str] | None, typer.Option(help=f"Heads, of {', '.join(HEADS)}; repeat.")] = None,
    method: Annotated[list[str] | None, typer.Option(help=f"Methods, of {', '.join(METHODS)}; repeat.")] = None,
    top_k: Annotated[int, typer.Option("--top-k", "--topk", help="Cached entries a row.")] = 100,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32. Default bfloat16 on CUDA.")] = "",
    device: Device = "",
    repeats: Annotated[int, typer.Option(help="Timed repetitions; the median is reported.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Folder for loss.json and its plots, loss.svg.")] = None,
    cpu_ratio_only: Annotated[
        bool, typer.Option("--cpu-ratio", help="Only the CPU bar: fused against forward_chunked; exit 1 if missed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure the losses: time, extra memory beyond inputs (gradients included), error against float64.

    Without a GPU the defaults are one small head and 2,048 rows. A method that runs out of memory is a row that says so.

    Example: teachercache bench-loss --rows 2048 --method fused --out build/bench
    """
    import torch

    from trainer.bench import loss
    from trainer.bench.measure import machine, save

    if cpu_ratio_only:
        ratio = loss.cpu_ratio(repeats)
        text = (
            "CPU, 2,048 rows x 576 x 49,152, float32: fused / forward_chunked time {time_ratio:.2f} (at most "
            "{max_time_ratio}), extra memory {memory_ratio:.2f} (at most {max_memory_ratio}); fused {fused_ms:.0f} ms, "
            "{fused_extra_mib:.0f} MiB; forward_chunked {forward_chunked_ms:.0f} ms, {forward_chunked_extra_mib:.0f} MiB"
        )
        print(json.dumps(ratio | {"machine": machine(torch.device("cpu"))}) if as_json else text.format(**ratio))
        raise typer.Exit(0 if ratio["holds"] else 1)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = where.type == "cuda"
    heads = head or (["llama-3.2-3b"] if on_gpu else ["smollm2-135m"])
    names = method or list(METHODS)
    number = dtype or ("bfloat16" if on_gpu else "float32")
    _check_known("head", heads, HEADS)
    _check_known("method", names, METHODS)
    _check_known("dtype", [number], ("bfloat16", "float16", "float32"))
    console = text_console()

    def report(result: loss.LossFigures) -> None:
        if not as_json:
            shown = result.note or f"{result.time_ms:.1f} ms, {result.extra_gib:.3f} GiB"
            console.print(f"{result.head} {result.rows:,} rows {result.method}: {shown}")

    results = loss.run_benchmark(
        heads,
        rows or (list(LENGTHS) if on_gpu else [2048]),
        names,
        top_k=top_k,
        dtype=getattr(torch, number),
        device=where,
        repeats=repeats,
        report=report,
    )
    document = {"machine": machine(where), "results": [asdict(result) for result in results]}
    save(out, "loss.json", document)
    if out is not None:
        loss.plots(results, out / "loss.svg")
    if as_json:
        print(json.dumps(document))
    else:
        console.print(loss.table(results))


def bench_step(
    shape: Annotated[str, typer.Option(help=f"Model shape, of {', '.join(SHAPES)}.")] = "llama-3.2b",
    tokens: Annotated[list[int] | None, typer.Option(help="Sequence lengths; repeat. Default 8,192 to 32,768.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Checkpointing policies; repeat. Default all.")] = None,
    attention_kind: Annotated[str, typer.Option("--attention", help="mixed, documents, flex or plain.")] = "auto",
    documents: Annotated[int, typer.Option(help="Equal documents in the sequence.")] = 1,
    device: Device = "",
    repeats: Annotated[int, typer.Option(help="Timed steps; the fastest counts.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Folder for step.json and its plots, step.png.")] = None,
    as_json: Json = False,
) -> None:
    """Measure steps of a named shape: time, tokens/s, TFLOP/s of model work and memory by length and policy.

    Example: teachercache bench-step --shape llama-3.2b --tokens 32768 --policy none --policy keep-attention
    """
    _check_known("shape", [shape], SHAPES)
    import torch

    from trainer.bench import step
    from trainer.bench.measure import machine, save
    from trainer.model import activation, attention

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind = attention.choose_kind(where, attention_kind)
    bench = step.StepBench(shape, where, torch.bfloat16 if where.type == "cuda" else torch.float32)
    results = [
        bench.run(step.StepCase(length, name, kind, documents), repeats=repeats)
        for length in tokens or [8_192, 16_384, 32_768]
        for name in policy or activation.POLICIES
    ]
    report = {"machine": machine(where), "shape": shape, "results": [asdict(result) for result in results]}
    save(out, "step.json", report)
    if out is not None:
        step.plots(results, out / "step.png")
    if as_json:
        print(json.dumps(report))
    else:
        text_console().print(step.table(results, f"{shape} on {report['machine']}"))
