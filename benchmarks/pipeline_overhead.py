"""What the pipeline costs next to the engine: its tokens/s against a bare loop of `LLM.generate`, pairs of runs.

    python benchmarks/pipeline_overhead.py [--model build/models/smollm2-135m] [--pairs 7] [--tokens 16000]

One engine (bf16, K = 100, float32 head) serves both sides over the same documents. The bare loop gets ready token ids
and throws its public flat log-probabilities away; the pipeline reads jsonl, tokenises, keeps rows, encodes, uploads to a
local S3 server and commits, through the shard function without Ray, two shards overlapping. The order of the two sides
alternates. Prints and stores each pair and the median ratio: benchmarks/results/pipeline_overhead_<device>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def write_corpus(folder: Path, tokens: int) -> Path:
    """Write topics of Python's reference, cut to 1,500 characters, about `tokens` tokens in all."""
    from pydoc_data.topics import topics

    path = folder / "corpus.jsonl"
    left = tokens * 4
    with path.open("w", encoding="utf-8") as file:
        for name in sorted(topics):
            text = topics[name].strip()[:1500]
            file.write(json.dumps({"id": name, "text": text}) + "\n")
            left -= len(text)
            if left <= 0:
                break
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(ROOT / "build/models/smollm2-135m"))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=16_000, help="about this many tokens a run")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    import teachercache
    from benchmarks.teacher_rows_h200 import run_overlapping, s3_server
    from pipeline.config import parse_job
    from pipeline.planning.identity import build_spec
    from pipeline.planning.plan import make_plan
    from pipeline.running.shard_run import ShardRun
    from pipeline.running.tasks import ShardTask
    from pipeline.running.worker import ShardWorker
    from pipeline.teachers.vllm_teacher import VllmTeacher

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = write_corpus(folder, options.tokens)
        with s3_server(folder / "s3") as bucket:
            job = parse_job(
                {
                    "cache": f"{bucket}/cache",
                    "teacher": {"model": options.model, "max_model_len": 1024, "canary": False},
                    "corpora": [{"files": [str(corpus)], "fields": {"text": "text", "id": "id"}}],
                    "run": {"shard_bytes": corpus.stat().st_size // 4},
                }
            )
            model = Path(options.model)
            spec = build_spec(job, model)
            teacher = VllmTeacher(job.teacher, str(model), spec.tokenizer.vocab_size)
            worker = ShardWorker(job, model, spec, start=lambda: teacher)
            plan = make_plan(job, worker.encoder, spec.digest).plan
            runs = [ShardRun(ShardTask(s), job, worker.encoder, worker.loop) for s in plan.shards]
            windows = [window for run in runs for window in run.windows()]
            prompts = [{"prompt_token_ids": w.input_ids.tolist()} for w in windows]
            total = sum(len(w.input_ids) for w in windows)

            def bare() -> float:
                def generate(_: Any) -> float:
                    began = time.perf_counter()
                    teacher.llm.generate(prompts, teacher._public_sampling, use_tqdm=False)
                    return time.perf_counter() - began

                return total / worker.loop.call(generate)

            def pipeline(serial: int) -> float:
                worker.writer = teachercache.create(f"{bucket}/cache{serial}", spec)
                began = time.perf_counter()
                receipts = run_overlapping(worker, [ShardTask(s) for s in plan.shards])
                seconds = time.perf_counter() - began
                assert sum(receipt.tokens for receipt in receipts) == total
                return total / seconds

            print(f"{len(windows)} documents, {total} tokens, {len(plan.shards)} shards; warming up", flush=True)
            bare()
            pairs = []
            for i in range(options.pairs):
                if i % 2:
                    ours, theirs = pipeline(i), bare()
                else:
                    theirs, ours = bare(), pipeline(i)
                pairs.append({"bare": round(theirs, 1), "pipeline": round(ours, 1), "ratio": round(ours / theirs, 4)})
                print(pairs[-1], flush=True)
            worker.close()
    median = statistics.median(p["ratio"] for p in pairs)
    report = {
        "median_ratio": median,
        "pairs": pairs,
        "tokens": total,
        "documents": len(windows),
        "provenance": teacher.provenance,
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "date": time.strftime("%Y-%m-%d"),
    }
    print(f"median ratio pipeline / bare LLM.generate: {median:.3f}")
    device = "cpu" if teacher.provenance["device"] == "cpu" else "gpu"
    out = options.out or ROOT / "benchmarks" / "results" / f"pipeline_overhead_{device}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
