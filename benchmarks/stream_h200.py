"""Training steps fed from a cache on an object store: does the GPU ever wait for data?

    python benchmarks/stream_h200.py --cache s3://bucket/synthetic [--steps 8] [--policy none] [--out FOLDER]
    python benchmarks/stream_h200.py --cache /tmp/cache --device cpu --tiny          # a smoke test

Makes the cache if it is not there: synthetic teacher rows of K = 100 over the shape's vocabulary, in documents of
log-normal length, written and published as any cache is. Then a student of a named shape takes optimiser steps over
packed sequences of 32,768 tokens that PackedCache streams, packs and prefetches, as `fit` does, and every step is
timed with the wait for its data. Rows are decoded from Parquet on the fly: nothing is kept in memory beforehand.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import teachercache
from teachercache.synthetic import synthetic_record, synthetic_spec
from trainer import activation
from trainer.attention import choose_kind
from trainer.bench.loss import machine
from trainer.bench.step import SHAPES, Bench
from trainer.data import PackedCache, Prefetcher
from trainer.flops import step_flops
from trainer.step import Step


def make_cache(url: str, vocab_size: int, top_k: int, tokens: int, longest: int, seed: int = 0) -> None:
    """Publish documents of log-normal length (median an eighth of `longest`) until `tokens` rows are there."""
    spec = synthetic_spec(vocab_size=vocab_size, top_k=top_k)
    writer = teachercache.create(url, spec)
    rng = np.random.default_rng(seed)
    shard = made = 0
    while made < tokens:
        records, size = [], 0
        while size < min(tokens, 100_000):
            length = int(np.clip(rng.lognormal(np.log(longest / 8), 1.0), 16, longest))
            records.append(synthetic_record(rng, spec, f"doc-{shard}-{len(records)}", length=length))
            size += length
        writer.commit(f"shard-{shard}", records)
        made, shard = made + size, shard + 1
    writer.publish(allow_partial=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", required=True, help="URL of the cache; made if it is not there")
    parser.add_argument("--shape", default="llama-3.2b", choices=sorted(SHAPES))
    parser.add_argument("--seq-len", type=int, default=32_768)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--policy", default="keep-matmuls", choices=activation.POLICIES)
    parser.add_argument("--moments", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.shape, arguments.seq_len = "tiny", 256
    device = torch.device(arguments.device)
    vocab_size = SHAPES[arguments.shape]["vocab_size"]
    started = time.monotonic()
    try:
        cache = teachercache.open(arguments.cache)
    except teachercache.errors.TeacherCacheError as error:
        print(f"making the cache ({error})", flush=True)
        wanted = (arguments.steps + 2) * arguments.seq_len
        make_cache(arguments.cache, vocab_size, min(100, vocab_size // 4), wanted, arguments.seq_len)
        cache = teachercache.open(arguments.cache)
    print(f"{cache.url}: {cache.manifest.rows:,} rows, ready after {time.monotonic() - started:.0f} s", flush=True)
    kind = choose_kind(device)
    bench = Bench(arguments.shape, device, torch.bfloat16, optim={"state": arguments.moments})
    activation.apply_policy(bench.model, bench.layers, arguments.policy)
    step = Step(bench.model, bench.optimizer, bench.config, attention_kind=kind, vocab_size=vocab_size)
    dataset = PackedCache(cache, seq_len=arguments.seq_len, epochs=None, pad=device.type == "cuda", block_sequences=2)
    prefetcher = Prefetcher(dataset, depth=3, pin=device.type == "cuda")
    rows: list[dict[str, Any]] = []
    for number in range(arguments.steps):
        before = time.perf_counter()
        sequence, _state = next(prefetcher)
        ready = time.perf_counter()
        result = step.run([sequence], lr=1e-5)  # reads the loss, so the GPU has finished
        done = time.perf_counter()
        lengths = sequence.document_lengths[: len(sequence.documents)]
        flops = step_flops(bench.model.config, bench.parameters, lengths)
        rows.append(
            {
                "loss": result.loss, "rows": result.rows, "tokens": result.tokens, "documents": len(lengths),
                "seconds": done - before, "wait_s": ready - before, "tflops": flops / (done - before) / 1e12,
                "linear_tflops": 6.0 * bench.parameters * result.tokens / (done - before) / 1e12,
            }
        )  # fmt: skip
        print(
            f"step {number + 1}: {rows[-1]['seconds']:.3f} s, waited {1e3 * rows[-1]['wait_s']:.1f} ms, {len(lengths)} "
            f"documents, {rows[-1]['tflops']:.0f} TFLOP/s of model work, loss {result.loss:.4f}",
            flush=True,
        )
    prefetcher.close()
    warm = rows[2:] or rows
    seconds, waited = (sum(row[key] for row in warm) for key in ("seconds", "wait_s"))
    work = sum(row["tflops"] * row["seconds"] for row in warm)
    print(f"after warm-up: {work / seconds:.1f} TFLOP/s of model work, data wait {waited / seconds:.2%} of the time")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        report = {"machine": machine(device), "shape": arguments.shape, "policy": arguments.policy, "steps": rows}
        (arguments.out / "stream_h200.json").write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
