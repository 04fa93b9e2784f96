"""Training steps fed from a cache on an object store: does the GPU ever wait for data?

    python benchmarks/stream_h200.py --cache s3://bucket/synthetic [--cases full:none:3,mixed:keep-matmuls:24] [--out FOLDER]
    python benchmarks/stream_h200.py --cache /tmp/cache --device cpu --tiny          # a smoke test

Makes two caches if they are not there, CACHE/full and CACHE/mixed: synthetic teacher rows of K = 100 over the shape's
vocabulary, in documents as long as a sequence and in documents of log-normal length (median an eighth of it), written
and published as any cache is. Then a student of a named shape takes optimiser steps over packed sequences of 32,768
tokens that PackedCache streams, packs and prefetches, as `fit` does, and every step is timed with the wait for its
data. Rows are decoded from Parquet on the fly: nothing is kept in memory beforehand.

A case is DOCUMENTS:POLICY:WARMUP. Its first WARMUP steps are reported and not counted: the first compiles the update,
and cuDNN plans a kernel whenever a document has a length that it has not met (lengths are rounded up to sixteen an
octave, so that ends).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import teachercache
from teachercache.format.record import Record
from teachercache.format.spec import CacheSpec
from teachercache.testing import synthetic_record, synthetic_spec
from trainer.bench.measure import GIB, machine, save
from trainer.bench.shapes import SHAPES
from trainer.bench.step import StepBench
from trainer.data import PackedCache, Prefetcher
from trainer.flops import step_flops
from trainer.model import activation
from trainer.model.attention import DocumentLayout, choose_kind


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


def main() -> None:
    """Run the cases that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", required=True, help="URL below which the caches are, or will be made")
    parser.add_argument("--cases", default="full:none:3,mixed:keep-matmuls:24", help="DOCUMENTS:POLICY:WARMUP, …")
    parser.add_argument("--shape", default="llama-3.2b", choices=sorted(SHAPES))
    parser.add_argument("--seq-len", type=int, default=32_768)
    parser.add_argument("--steps", type=int, default=8, help="counted steps of each case")
    parser.add_argument("--moments", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
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
