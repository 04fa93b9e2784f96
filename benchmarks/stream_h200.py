"""Training steps fed from a cache on an object store: does the GPU ever wait for data, or for new lengths?

    python benchmarks/stream_h200.py --cache s3://bucket/synthetic [--cases full:none:3,mixed:none:4] [--out FOLDER]
    python benchmarks/stream_h200.py --cache /tmp/cache --cases mixed:none:4 --profile [--before]
    python benchmarks/stream_h200.py --cache /tmp/cache --device cpu --tiny          # a smoke test

Makes two caches if they are not there, CACHE/full and CACHE/mixed: synthetic teacher rows of K = 100 over the shape's
vocabulary, in documents as long as a sequence and in documents of log-normal length (median an eighth of it), written
and published as any cache is. Then a student of a named shape takes optimiser steps over packed sequences of 32,768
tokens that PackedCache streams, packs and prefetches, as `fit` does, and every step is timed with the wait for its
data. Rows are decoded from Parquet on the fly: nothing is kept in memory beforehand.

A case is DOCUMENTS:POLICY:WARMUP. Its first WARMUP steps are reported and not counted: the first compiles the update,
and where documents of different lengths first meet cuDNN plans them. On a GPU a step before them compiles FlexAttention.
--profile prints, of one more step, where the host's and the device's time go. --before measures attention as it was:
each length planned where it is met, FlexAttention's mask by torch's create_block_mask, compiled.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import teachercache
from teachercache.format.record import Record
from teachercache.format.spec import CacheSpec
from teachercache.testing import synthetic_record, synthetic_spec
from trainer.bench.measure import GIB, machine, save
from trainer.bench.shapes import SHAPES
from trainer.bench.step import StepBench, synthetic_sequence
from trainer.data import PackedCache, Prefetcher
from trainer.flops import step_flops
from trainer.model import activation, attention
from trainer.model.attention import DocumentLayout, choose_kind
from trainer.step import Step


def write_shard(url: str, spec: CacheSpec, documents: str, longest: int, tokens: int, shard: int) -> None:
    """Commit one shard of about `tokens` rows, whose content depends on its number alone."""
    rng = np.random.default_rng([len(documents), shard])
    records: list[Record] = []
    while tokens > 0:
        length = longest
        if documents == "mixed":
            length = int(np.clip(rng.lognormal(np.log(longest / 8), 1.0), 16, longest))
        records.append(synthetic_record(rng, spec, f"{documents}-{shard}-{len(records)}", length=length))
        tokens -= length
    teachercache.create(url, spec).commit(f"shard-{shard}", records)


def open_or_make(url: str, documents: str, vocab_size: int, longest: int, tokens: int) -> teachercache.Cache:
    """Open the cache of one kind of documents, at least `tokens` rows of it, written by all cores if it is not there."""
    try:
        return teachercache.open(url)
    except teachercache.errors.TeacherCacheError as error:
        print(f"making {url} ({error})", flush=True)
    spec = synthetic_spec(vocab_size=vocab_size, top_k=min(100, vocab_size // 4))
    writer = teachercache.create(url, spec)
    per_shard = min(tokens, max(longest, 65_536))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 1) - 1), mp_context=context) as pool:
        shards = range(-(-tokens // per_shard))
        list(pool.map(partial(write_shard, url, spec, documents, longest, per_shard), shards))
    writer.publish(allow_partial=True)
    return teachercache.open(url)


def run_case(
    bench: StepBench, cache: teachercache.Cache, policy: str, warmup: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Take steps over one cache under one checkpointing policy; the summary leaves the warm-up out."""
    device, on_gpu = bench.device, bench.device.type == "cuda"
    activation.apply_policy(bench.model, bench.layers, policy)
    step = bench.step(choose_kind(device))
    if on_gpu:
        bench.step("flex").run([synthetic_sequence(arguments.seq_len, 8, bench.vocab_size)], lr=0.0)
    dataset = PackedCache(cache, seq_len=arguments.seq_len, epochs=None, pad=on_gpu, block_sequences=2)
    prefetcher = Prefetcher(dataset, depth=3, pin=on_gpu)
    rows: list[dict[str, Any]] = []
    for number in range(warmup + arguments.steps):
        before = time.perf_counter()
        sequence, _state = next(prefetcher)
        wait_s = time.perf_counter() - before
        result = step.run([sequence], lr=1e-5)  # reads the loss, so the GPU has finished
        seconds = time.perf_counter() - before
        lengths = sequence.document_lengths[: len(sequence.documents)]
        row = vars(result) | {"documents": len(lengths), "seconds": seconds, "wait_s": wait_s}
        row["tflops"] = step_flops(bench.model.config, bench.parameters, lengths) / seconds / 1e12
        row["attention"] = DocumentLayout(sequence.document_lengths, step.attention_kind, device).path(torch.bfloat16)
        rows.append(row | {"counted": number >= warmup})
        shown = "step {}: {seconds:.3f} s, waited {wait_s:.4f} s, {documents} documents ({attention}), "
        shown += "{tflops:.0f} TFLOP/s of model work, loss {loss:.4f}"
        print(shown.format(number + 1, **row), flush=True)
    if arguments.profile:
        profile(step, prefetcher, device)
    prefetcher.close()
    counted = [row for row in rows if row["counted"]]
    seconds, waited = (sum(row[key] for row in counted) for key in ("seconds", "wait_s"))
    return {
        "policy": policy,
        "tflops": sum(row["tflops"] * row["seconds"] for row in counted) / seconds,
        "data_wait": waited / seconds,
        "peak_gib": torch.cuda.max_memory_allocated(device) / GIB if on_gpu else None,
        "steps": rows,
    }


def profile(step: Step, prefetcher: Prefetcher, device: torch.device) -> None:
    """Print the operators of one streamed step, by the host's time and by the device's, and how long each was busy."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    with torch.profiler.profile(activities=kinds) as recorded:
        began = time.perf_counter()
        sequence, _state = next(prefetcher)
        step.run([sequence], lr=1e-5)
        seconds = time.perf_counter() - began
    operators = recorded.key_averages()
    host, busy = (sum(getattr(o, f"self_{kind}_time_total") for o in operators) / 1e6 for kind in ("cpu", "device"))
    print(
        f"profiled step: {seconds:.3f} s, host {host:.3f} s, device {busy:.3f} s, documents {sequence.document_lengths}"
    )
    for key in ("self_cpu_time_total", "self_device_time_total"):
        print(operators.table(sort_by=key, row_limit=25, max_name_column_width=70), flush=True)


def as_before() -> None:
    """Plan each length where it is met, and let torch evaluate FlexAttention's masks."""
    compiled = torch.compile(create_block_mask, dynamic=False)

    def evaluated(lengths: Sequence[int], window: int | None, device: torch.device) -> BlockMask:
        seen, total = direct(lengths, window, device).mask_mod, sum(lengths)
        return (compiled if device.type == "cuda" else create_block_mask)(seen, None, None, total, total, device=device)

    direct = attention.document_block_mask
    attention.document_block_mask, attention.plan_lengths = evaluated, lambda *_heads: None


def main() -> None:
    """Run the cases that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", required=True, help="URL below which the caches are, or will be made")
    parser.add_argument("--cases", default="full:none:3,mixed:none:4", help="DOCUMENTS:POLICY:WARMUP, …")
    parser.add_argument("--shape", default="llama-3.2b", choices=sorted(SHAPES))
    parser.add_argument("--seq-len", type=int, default=32_768)
    parser.add_argument("--steps", type=int, default=8, help="counted steps of each case")
    parser.add_argument("--moments", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print where one more step's time goes")
    parser.add_argument("--before", action="store_true", help="attention without planned lengths and direct masks")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.before:
        as_before()
    if arguments.tiny:
        arguments.shape, arguments.seq_len, arguments.steps = "tiny", 256, 2
        arguments.cases = "full:none:1,mixed:keep-matmuls:1"
    device = torch.device(arguments.device)
    vocab_size = SHAPES[arguments.shape]["vocab_size"]
    cases = [case.split(":") for case in arguments.cases.split(",")]
    caches = {}
    for documents, _policy, warmup in cases:
        if documents not in caches:
            started = time.monotonic()
            tokens = (int(warmup) + arguments.steps + 2) * arguments.seq_len
            url = f"{arguments.cache.rstrip('/')}/{documents}"
            caches[documents] = cache = open_or_make(url, documents, vocab_size, arguments.seq_len, tokens)
            rows, took = cache.manifest.rows, time.monotonic() - started
            print(f"{url}: {rows:,} rows, ready after {took:.0f} s", flush=True)
    bench = StepBench(arguments.shape, device, torch.bfloat16, optim={"state": arguments.moments})
    report: dict[str, Any] = {"machine": machine(device), "shape": arguments.shape, "moments": arguments.moments}
    report["before"] = arguments.before
    report["cases"] = {}
    for documents, policy, warmup in cases:
        print(f"{documents} documents, {policy}:", flush=True)
        case = run_case(bench, caches[documents], policy, int(warmup), arguments)
        report["cases"][f"{documents}:{policy}"] = case
        shown = "{tflops:.1f} TFLOP/s of model work, data wait {data_wait:.2%} of the time"
        print(f"{documents}, {policy}: {shown.format(**case)} over {arguments.steps} steps", flush=True)
        save(arguments.out, "stream_h200.json", report)


if __name__ == "__main__":
    main()
