"""Teacher rows on one GPU or a few: every path's rate against plain prefill of the same engine, to committed rows.

    python benchmarks/teacher_rows_h200.py                      8B Llama shape, dummy weights, 4,096-token documents
    python benchmarks/teacher_rows_h200.py --tensor-parallel 2  the same teacher over two GPUs
    python benchmarks/teacher_rows_h200.py --smoke MODEL        the same steps on a CPU with a small real model

One process, one engine, K = 100, float32 head. Paths:
    plain            prefill alone: no log-probabilities are requested
    dictionaries     vLLM's default prompt log-probabilities (fewer documents: it is ten times slower)
    flat             flat_logprobs, detokenize=False
    raw              the front end keeps the engine's tensors (pipeline/teachers/raw_tensors.py)
    raw + gathered   tensor-parallel only: the worker's top-K over logits that vLLM has gathered on every rank
    raw + worker     the worker's top-K as well (pipeline/teachers/topk.py; over several GPUs vocab_parallel.py)
    pipeline         the shard function without Ray: Parquet in, rows encoded, uploaded to a local S3 server, committed
Rates are tokens of input per second of wall time from the first submission to the last result (pipeline: to the last
commit), after one warm-up round of each path. Over several GPUs a measurement takes as many times the documents, so that
its ends weigh the same (the pipeline: as many times the shards). Results: benchmarks/results/teacher_rows_<device>.json,
with _tp<N> for N GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np  # noqa: E402

VOCAB = 128_256
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCAB,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
    "torch_dtype": "bfloat16",
}


def dummy_model(folder: Path) -> Path:
    """Make a model folder without weights: config.json, and a tokenizer whose size is right."""
    from tokenizers import Tokenizer, models

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "t128000", "eos_token": "t128001"}))
    return folder


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Run a local S3 server (localbucket) with one bucket; yield the bucket's URL and set AWS_*."""
    import s3fs

    from tests.servers import serve

    with serve("localbucket", folder) as server:
        os.environ.update(server.env())
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bench")
        yield "s3://bench"


def run_overlapping(worker: Any, tasks: list[Any], threads: int = 2) -> list[Any]:
    """Do shards through the function that Ray's actors call, `threads` at a time; return their receipts."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(worker.run, tasks))


def drive(
    teacher: Any, inputs: list[np.ndarray], submit: Callable[[str, np.ndarray], None], take: Callable[[Any], None]
) -> float:
    """Return the seconds from the first submission to the last result of an engine kept full."""
    began = time.perf_counter()
    for key, ids in enumerate(inputs):
        submit(f"b{time.monotonic_ns()}-{key}", ids)
    left = len(inputs)
    while left:
        for output in teacher.engine.step():
            if output.finished:
                take(output)
                left -= 1
    return time.perf_counter() - began


def measure(teacher: Any, inputs: list[np.ndarray], slow: int) -> dict[str, float]:
    """Return tokens/s of every path but the pipeline."""
    from vllm import SamplingParams

    from pipeline.teachers.vllm_teacher import columns_of

    k = teacher.top_k
    base: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1, "detokenize": False}
    rows = {"prompt_logprobs": k, "logprobs": k}
    paths = {
        "plain": (SamplingParams(**base), len(inputs)),
        "dictionaries": (SamplingParams(**base, **rows), slow),
        "flat": (SamplingParams(**base, **rows, flat_logprobs=True), len(inputs)),
        "raw": (teacher._sampling, len(inputs)),
    }
    rates: dict[str, float] = {}

    def rate(name: str, sampling: Any, count: int) -> None:
        chosen = inputs[:count]

        def submit(key: str, ids: np.ndarray) -> None:
            teacher.engine.add_request(key, {"prompt_token_ids": ids.tolist()}, sampling)

        def take(output: Any) -> None:
            if not name.startswith(("plain", "dictionaries")):
                columns_of(output, teacher.top_k)

        drive(teacher, chosen[: max(1, len(chosen) // 4)], submit, take)
        seconds = drive(teacher, chosen, submit, take)
        rates[name] = sum(map(len, chosen)) / seconds
        print(f"{name:<16}{rates[name]:>10,.0f} tokens/s", flush=True)

    for name, (sampling, count) in paths.items():
        rate(name, sampling, count)
    if teacher.provenance["tensor_parallel"] > 1 and "worker_extension_cls" in teacher._arguments:
        print("gathered:", teacher.llm.collective_rpc("teachercache_install", args=(False,)), flush=True)
        rate("raw + gathered", teacher._sampling, len(inputs))
    teacher.accelerate()
    print("worker top-K:", teacher.provenance.get("worker_top_k"), flush=True)
    rate("raw + worker", teacher._sampling, len(inputs))
    rate("plain again", paths["plain"][0], len(inputs))
    return rates


def check_worker_rows(teacher: Any, ids: np.ndarray, before: Any) -> dict[str, float]:
    """Compare rows by the worker's top-K with vLLM's rows of the same document."""
    from tests.pipeline.drift import largest_drift

    after = teacher.score([ids])[0].rows
    shared = np.mean([len(np.intersect1d(a, b)) / len(a) for a, b in zip(before.topk_ids, after.topk_ids, strict=True)])
    return {"shared_ids": float(shared), "largest_drift_nat": largest_drift(before, after, floor=0.0)}


def run_pipeline(
    teacher: Any, job: Any, folder: Path, spec: Any, shards: int, docs: int, length: int
) -> dict[str, float]:
    """Measure Parquet in → committed rows on S3, two shards overlapping, through the function that Ray's actors call."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    import teachercache
    from pipeline.planning.plan import make_plan
    from pipeline.running.tasks import ShardTask
    from pipeline.running.worker import ShardWorker

    rng = np.random.default_rng(1)
    for i in range(shards + 1):
        ids = [rng.integers(0, spec.tokenizer.vocab_size, length).tolist() for _ in range(docs)]
        table = pa.table({"id": [f"{i}-{j}" for j in range(docs)], "ids": pa.array(ids, pa.list_(pa.int32()))})
        pq.write_table(table, folder / f"docs{i}.parquet")
    inside = 32 * length * teacher.provenance["tensor_parallel"]
    worker = ShardWorker(job, job.teacher.model, spec, start=lambda: teacher, max_inflight_tokens=inside)
    plan = make_plan(job, worker.encoder, spec.digest).plan
    writer = teachercache.create(job.cache, spec, tokenizer_files=Path(job.teacher.model))
    writer.put_plan(plan)
    queue = [ShardTask(s) for s in plan.shards]
    worker.run(queue.pop(0))  # warm-up
    busy, began = worker.loop.busy_s, time.perf_counter()
    receipts = run_overlapping(worker, queue)
    seconds = time.perf_counter() - began
    tokens, size = (sum(getattr(receipt, name) for receipt in receipts) for name in ("tokens", "bytes"))
    report = {
        "tokens_per_s": tokens / seconds,
        "engine_busy": (worker.loop.busy_s - busy) / seconds,
        "bytes_per_row": size / max(tokens, 1),
        "shards": len(plan.shards) - 1,
        "tokens": tokens,
    }
    print(
        f"{'pipeline':<16}{report['tokens_per_s']:>10,.0f} tokens/s, engine busy {report['engine_busy']:.1%}",
        flush=True,
    )
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", metavar="MODEL", help="small real model on a CPU")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="GPUS", help="GPUs of the one teacher")
    parser.add_argument("--documents", type=int, default=96, help="documents of each measurement, for each GPU")
    parser.add_argument("--slow-documents", type=int, default=6, help="documents for the dictionaries")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--top-k", type=int, default=100)
    parser.add_argument("--head-dtype", default="float32")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.smoke:
        options.documents, options.length, options.shards, options.slow_documents = 6, 128, 2, 2
    per_shard = options.documents
    options.documents *= options.tensor_parallel
    options.shards *= options.tensor_parallel

    from pipeline.config import parse_job
    from pipeline.teachers.vllm_teacher import VllmTeacher
    from teachercache import CacheSpec, TeacherSpec, fingerprint_config, fingerprint_tokenizer

    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        scratch = Path(name)
        model = Path(options.smoke) if options.smoke else dummy_model(scratch / "model")
        bucket = stack.enter_context(s3_server(scratch / "s3"))
        engine_args: dict[str, Any] = {"enforce_eager": True, "max_num_batched_tokens": options.max_num_batched_tokens}
        if not options.smoke:
            engine_args |= {"load_format": "dummy", "gpu_memory_utilization": 0.85}
        job = parse_job(
            {
                "cache": f"{bucket}/cache",
                "teacher": {
                    "model": str(model),
                    "top_k": options.top_k,
                    "head_dtype": options.head_dtype,
                    "tensor_parallel": options.tensor_parallel,
                    "max_model_len": options.length + 16,
                    "engine_args": engine_args,
                },
                "corpora": [{"files": [f"{scratch}/docs*.parquet"], "fields": {"input_ids": "ids", "id": "id"}}],
                "recipe": {"bos": "never", "eos": False},
                "run": {"shard_tokens": per_shard * options.length},
            }
        )
        tokenizer = fingerprint_tokenizer(model)
        spec = CacheSpec(
            teacher=TeacherSpec(
                name="benchmark",
                weights_digest="0" * 64,
                config_digest=fingerprint_config(model),
                dtype="bfloat16",
                engine="vllm",
                head_dtype=options.head_dtype,
            ),
            tokenizer=tokenizer,
            top_k=options.top_k,
        )
        began = time.perf_counter()
        teacher = VllmTeacher(job.teacher, str(model), tokenizer.vocab_size)
        print(f"engine started in {time.perf_counter() - began:.0f} s: {teacher.provenance}", flush=True)
        rng = np.random.default_rng(0)
        inputs = [
            rng.integers(0, tokenizer.vocab_size, options.length).astype(np.int32) for _ in range(options.documents)
        ]
        own = teacher.score(inputs[:1])[0].rows
        rates = measure(teacher, inputs, options.slow_documents)
        report: dict[str, Any] = {"worker_rows_check": check_worker_rows(teacher, inputs[0], own)}
        report["pipeline"] = run_pipeline(teacher, job, scratch, spec, options.shards, per_shard, options.length)
        rates["pipeline"] = report["pipeline"]["tokens_per_s"]
        plain = max(rates["plain"], rates["plain again"])
        report |= {
            "rates_tokens_per_s": {k: round(v, 1) for k, v in rates.items()},
            "share_of_plain": {k: round(v / plain, 4) for k, v in rates.items()},
            "settings": {k: str(v) for k, v in vars(options).items() if not isinstance(v, Path)},
            "provenance": teacher.provenance,
            "host": {"cpus": os.cpu_count(), "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")},
        }
        teacher.close()
    print(f"\n{'path':<18}{'tokens/s':>12}{'of plain':>10}")
    for key, value in rates.items():
        print(f"{key:<18}{value:>12,.0f}{value / plain:>10.1%}")
    print("worker rows against vLLM's:", report["worker_rows_check"])
    device = "cpu_smoke" if options.smoke else "h200"
    if options.tensor_parallel > 1:
        device += f"_tp{options.tensor_parallel}"
    out = options.out or ROOT / "benchmarks" / "results" / f"teacher_rows_{device}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2, default=str) + "\n")
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
