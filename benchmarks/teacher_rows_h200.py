"""Teacher rows on one GPU or a few: every path's rate against plain prefill of the same engine, to committed rows.

    python benchmarks/teacher_rows_h200.py                      8B Llama shape, dummy weights, 4,096-token documents
    python benchmarks/teacher_rows_h200.py --tensor-parallel 2  the same teacher over two GPUs
    python benchmarks/teacher_rows_h200.py --smoke MODEL        the same steps on a CPU with a small real model

One process, one engine, top-100 and then sampled rows of 24 entries, float32 head. Paths:
    plain            prefill alone: no log-probabilities are requested
    dictionaries     vLLM's default prompt log-probabilities (fewer documents: it is ten times slower)
    flat             flat_logprobs, detokenize=False
    raw              the front end keeps the engine's tensors (pipeline/teachers/raw_tensors.py)
    raw + gathered   tensor-parallel only: the worker's rows from logits that vLLM has gathered on every rank
    raw + worker     the worker's rows as well (pipeline/teachers/topk.py; over several GPUs vocab_parallel.py)
    pipeline         the shard function without Ray: Parquet in, rows encoded, uploaded to a local S3 server, committed
    ... sampled      the same with sampled rows (pipeline/teachers/sampled_rows.py); `pipeline again` is top-100 once more
The rows' own time is taken by itself, over 1,024 rows of random logits: row_us, microseconds a row.
Rates are tokens of input per second of wall time from the first submission to the last result (pipeline: to the last
commit), after one warm-up round of each path. Over several GPUs a measurement takes as many times the documents, so that
its ends weigh the same (the pipeline: as many times the shards). Results: benchmarks/results/teacher_rows_<device>.json,
with _tp<N> for N GPUs.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, models

import teachercache
from benchmarks.report import RESULTS, ROOT, host, parser, write
from pipeline.config import parse_job
from pipeline.planning.plan import make_plan
from pipeline.running.tasks import ShardTask
from pipeline.running.worker import ShardWorker
from pipeline.teachers.base import RowsWanted
from pipeline.teachers.vllm_teacher import VllmTeacher, columns_of
from pipeline.teachers.worker_rows import RowsMaker
from teachercache import CacheSpec, TeacherSpec, fingerprint_config, fingerprint_tokenizer
from tests.pipeline.drift import largest_drift
from tests.servers import serve

# vLLM reads these when it is imported: by VllmTeacher, and in its workers
os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCAB = 128_256
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "hidden_act": "silu",
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    "vocab_size": VOCAB, "bos_token_id": 128_000, "eos_token_id": 128_001,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
}  # fmt: skip


def dummy_model(folder: Path) -> Path:
    """Make a model folder without weights: config.json, and a tokenizer whose size is right."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "t128000", "eos_token": "t128001"}))
    return folder


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Run a local S3 server (localbucket) with one bucket; yield the bucket's URL and set AWS_*."""
    with serve("localbucket", folder) as server:
        os.environ.update(server.env())
        yield server.new_bucket("bench")


def run_overlapping(worker: Any, tasks: list[Any], threads: int = 2) -> list[Any]:
    """Do shards through the function that Ray's actors call, `threads` at a time; return their receipts."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(worker.run, tasks))


def drive(teacher: Any, inputs: list[np.ndarray], sampling: Any, as_columns: bool) -> float:
    """Return the seconds from the first submission to the last result, as columns or not, of an engine kept full."""
    began = time.perf_counter()
    for key, ids in enumerate(inputs):
        teacher.engine.add_request(f"b{time.monotonic_ns()}-{key}", {"prompt_token_ids": ids.tolist()}, sampling)
    left = len(inputs)
    while left:
        for output in teacher.engine.step():
            if output.finished:
                left -= 1
                if as_columns:
                    columns_of(output, teacher._asked)
    return time.perf_counter() - began


def drive_worker(teacher: Any, inputs: list[np.ndarray]) -> float:
    """Return the seconds from the first submission to the last checked row of an engine kept full."""
    began = time.perf_counter()
    teacher.score(inputs)
    return time.perf_counter() - began


def row_times(vocab: int, kinds: dict[str, Any], rows: int) -> dict[str, float]:
    """Return microseconds a row of making rows from float32 and bf16 logits that lie ready: the median of 20 runs."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    rng = torch.Generator(device).manual_seed(0)
    logits = torch.randn(rows, vocab, generator=rng, device=device) * 3
    target = torch.randint(0, vocab, (rows,), generator=rng, device=device)
    u = torch.rand(rows, dtype=torch.float64, generator=rng, device=device)
    found: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        given = logits.to(dtype)
        for name, kind in kinds.items():
            make = RowsMaker(kind, vocab)
            times = []
            for _ in range(23 if device == "cuda" else 3):
                wait()
                began = time.perf_counter()
                make.of_logits(given, target, u)
                wait()
                times.append(time.perf_counter() - began)
            found[f"{name}, {str(dtype).removeprefix('torch.')}"] = round(
                sorted(times)[len(times) // 2] / rows * 1e6, 3
            )
            print(f"rows of {name}, {dtype}: {found[f'{name}, {str(dtype)[6:]}']} us a row", flush=True)
    return found


def measure(teacher: Any, inputs: list[np.ndarray], slow: int) -> dict[str, float]:
    """Return tokens/s of every path but the pipeline."""
    from vllm import SamplingParams

    sampling_of = partial(SamplingParams, temperature=0.0, max_tokens=1, detokenize=False)
    rows = {"prompt_logprobs": teacher._asked, "logprobs": teacher._asked}
    rates: dict[str, float] = {}

    def rate(name: str, sampling: Any, count: int = len(inputs)) -> None:
        chosen = inputs[:count]
        as_columns = not name.startswith(("plain", "dictionaries"))
        drive(teacher, chosen[: max(1, len(chosen) // 4)], sampling, as_columns)
        seconds = drive(teacher, chosen, sampling, as_columns)
        rates[name] = sum(map(len, chosen)) / seconds
        print(f"{name:<16}{rates[name]:>10,.0f} tokens/s", flush=True)

    rate("plain", sampling_of())
    rate("dictionaries", sampling_of(**rows), slow)
    rate("flat", sampling_of(**rows, flat_logprobs=True))
    rate("raw", teacher._sampling)
    if teacher.provenance["tensor_parallel"] > 1 and "worker_extension_cls" in teacher._arguments:
        asked = (teacher.wanted.rows.model_dump(), teacher.wanted.vocab_size, False)
        print("gathered:", teacher.llm.collective_rpc("teachercache_install", args=asked), flush=True)
        teacher._worker_rows = True
        rates["raw + gathered"] = worker_rate(teacher, inputs, "raw + gathered")
    teacher.accelerate()
    rates["raw + worker"] = worker_rate(teacher, inputs, "raw + worker")
    rate("plain again", sampling_of())
    return rates


def worker_rate(teacher: Any, inputs: list[np.ndarray], name: str) -> float:
    """Return tokens/s of rows made in the worker, after a warm-up."""
    print("worker rows:", teacher.provenance.get("worker_rows"), flush=True)
    drive_worker(teacher, inputs[: max(1, len(inputs) // 4)])
    rate = sum(map(len, inputs)) / drive_worker(teacher, inputs)
    print(f"{name:<20}{rate:>10,.0f} tokens/s", flush=True)
    return rate


def switch(teacher: Any, spec: Any) -> None:
    """Let a running engine make the rows of another spec."""
    teacher.wanted = RowsWanted.of(spec)
    teacher.accelerate()


def run_pipeline(
    teacher: Any, job: Any, folder: Path, spec: Any, shards: int, docs: int, length: int
) -> dict[str, Any]:
    """Measure Parquet in → committed rows on S3, two shards overlapping, through the function that Ray's actors call."""
    rng = np.random.default_rng(1)
    for i in range(shards + 1 if not any(folder.glob("docs*.parquet")) else 0):
        ids = [rng.integers(0, spec.tokenizer.vocab_size, length).tolist() for _ in range(docs)]
        table = pa.table({"id": [f"{i}-{j}" for j in range(docs)], "ids": pa.array(ids, pa.list_(pa.int32()))})
        pq.write_table(table, folder / f"docs{i}.parquet")
    inside = 32 * length * teacher.provenance["tensor_parallel"]
    close, teacher.close = teacher.close, lambda: None  # the engine outlives this worker
    worker = ShardWorker(job, job.teacher.model, spec, start=lambda: teacher, max_inflight_tokens=inside)
    plan = make_plan(job, worker.encoder, spec.digest).plan
    teachercache.create(job.cache, spec, tokenizer_files=Path(job.teacher.model)).put_plan(plan)
    queue = [ShardTask(s) for s in plan.shards]
    worker.run(queue.pop(0))  # warm-up
    busy, began = worker.loop.busy_s, time.perf_counter()
    receipts = run_overlapping(worker, queue)
    seconds = time.perf_counter() - began
    tokens, size = (sum(getattr(receipt, name) for receipt in receipts) for name in ("tokens", "bytes"))
    rate, busy = tokens / seconds, (worker.loop.busy_s - busy) / seconds
    worker.close()
    teacher.close = close
    print(f"pipeline of {spec.rows.kind:<8}{rate:>10,.0f} tokens/s, engine busy {busy:.1%}", flush=True)
    counts = {"bytes_per_row": size / max(tokens, 1), "shards": len(plan.shards) - 1, "tokens": tokens}
    return {"tokens_per_s": rate, "engine_busy": busy, **counts}


def main() -> None:
    options = parser(
        __doc__,
        smoke=(None, "small real model on a CPU"),
        tensor_parallel=(1, "GPUs of the one teacher"),
        documents=(96, "documents of each measurement, for each GPU"),
        slow_documents=(6, "documents for the dictionaries"),
        length=(4096, "tokens of a document"),
        shards=4,
        top_k=100,
        sampled=(24, "entries of the sampled rows"),
        head_dtype="float32",
        max_num_batched_tokens=8192,
        out=None,
    ).parse_args()
    if options.smoke:
        options.documents, options.length, options.shards, options.slow_documents = 6, 128, 2, 2
    per_shard = options.documents
    options.documents *= options.tensor_parallel
    options.shards *= options.tensor_parallel
    with tempfile.TemporaryDirectory() as name, s3_server((scratch := Path(name)) / "s3") as bucket:
        model = options.smoke or dummy_model(scratch / "model")
        engine_args: dict[str, Any] = {"enforce_eager": True, "max_num_batched_tokens": options.max_num_batched_tokens}
        if not options.smoke:
            engine_args |= {"load_format": "dummy", "gpu_memory_utilization": 0.85}
        asked = {name: getattr(options, name) for name in ("head_dtype", "tensor_parallel")}
        corpus = {"files": [f"{scratch}/docs*.parquet"], "fields": {"input_ids": "ids", "id": "id"}}
        tree: dict[str, Any] = {
            "cache": f"{bucket}/cache",
            "rows": {"entries": options.top_k},
            "teacher": {"model": str(model), **asked, "max_model_len": options.length + 16, "engine_args": engine_args},
            "corpora": [corpus],
            "recipe": {"bos": "never", "eos": False},
            "run": {"shard_tokens": per_shard * options.length},
        }
        job = parse_job(tree)
        tokenizer = fingerprint_tokenizer(model)
        identity = {"weights_digest": "0" * 64, "config_digest": fingerprint_config(model), "dtype": "bfloat16"}
        written = TeacherSpec(name="benchmark", engine="vllm", head_dtype=options.head_dtype, **identity)
        spec = CacheSpec(teacher=written, tokenizer=tokenizer, rows=job.rows.spec)
        other = parse_job(
            tree | {"cache": f"{bucket}/sampled", "rows": {"kind": "sampled", "entries": options.sampled}}
        )
        drawn = CacheSpec(teacher=written, tokenizer=tokenizer, rows=other.rows.spec)
        kinds = {f"top-{options.top_k}": spec.rows, f"sampled {options.sampled}": drawn.rows}
        began = time.perf_counter()
        teacher = VllmTeacher(job.teacher, str(model), RowsWanted.of(spec))
        print(f"engine started in {time.perf_counter() - began:.0f} s: {teacher.provenance}", flush=True)
        size = (options.documents, options.length)
        inputs = list(np.random.default_rng(0).integers(0, tokenizer.vocab_size, size, dtype=np.int32))
        before = teacher.score(inputs[:1])[0].rows
        rates = measure(teacher, inputs, options.slow_documents)
        after = teacher.score(inputs[:1])[0].rows  # by the worker's top-K
        both = zip(before.topk_ids, after.topk_ids, strict=True)
        shared = float(np.mean([len(np.intersect1d(a, b)) / len(a) for a, b in both]))
        check = {"shared_ids": shared, "largest_drift_nat": largest_drift(before, after, floor=0.0)}
        report: dict[str, Any] = {"worker_rows_check": check}
        sizes = (options.shards, per_shard, options.length)
        report["pipeline"] = run_pipeline(teacher, job, scratch, spec, *sizes)
        switch(teacher, drawn)
        rates["raw + worker, sampled"] = worker_rate(teacher, inputs, "raw + worker, sampled")
        report["pipeline, sampled"] = run_pipeline(teacher, other, scratch, drawn, *sizes)
        switch(teacher, spec)
        again = parse_job(tree | {"cache": f"{bucket}/again"})
        report["pipeline again"] = run_pipeline(teacher, again, scratch, spec, *sizes)
        rates |= {name: report[name]["tokens_per_s"] for name in ("pipeline", "pipeline, sampled", "pipeline again")}
        top = (rates["pipeline"] + rates["pipeline again"]) / 2
        report["sampled_over_top_k"] = round(rates["pipeline, sampled"] / top, 4)
        plain = max(rates["plain"], rates["plain again"])
        report |= {
            "rates_tokens_per_s": {k: round(v, 1) for k, v in rates.items()},
            "share_of_plain": {k: round(v / plain, 4) for k, v in rates.items()},
            "settings": {k: str(v) for k, v in vars(options).items() if k != "out"},
            "provenance": teacher.provenance,
            "host": host(),
        }
        teacher.close()
        report["row_us"] = row_times(tokenizer.vocab_size, kinds, 64 if options.smoke else 1024)
    print(f"\n{'path':<24}{'tokens/s':>12}{'of plain':>10}")
    for key, value in rates.items():
        print(f"{key:<24}{value:>12,.0f}{value / plain:>10.1%}")
    print("committed, sampled over top-K:", report["sampled_over_top_k"], "rows, us each:", report["row_us"])
    print("worker rows against vLLM's:", check)
    device = "cpu_smoke" if options.smoke else "h200"
    gpus = f"_tp{options.tensor_parallel}" if options.tensor_parallel > 1 else ""
    write(options.out or RESULTS / f"teacher_rows_{device}{gpus}.json", report)


if __name__ == "__main__":
    main()
