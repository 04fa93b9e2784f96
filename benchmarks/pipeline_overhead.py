"""What the pipeline costs next to the engine: its tokens/s against a bare loop of `LLM.generate`, pairs of runs.

    python benchmarks/pipeline_overhead.py [--model build/models/smollm2-135m] [--pairs 7] [--tokens 16000]

One engine (bf16, K = 100, float32 head) serves both sides over the same documents. The bare loop gets ready token ids
and throws its public flat log-probabilities away; the pipeline reads jsonl, tokenises, keeps rows, encodes, uploads to a
local S3 server and commits, through the shard function without Ray, two shards overlapping. The order of the two sides
alternates. Prints and stores the seconds of the engine's start, each pair and the median ratio:
benchmarks/results/pipeline_overhead_<device>.json.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import teachercache
from benchmarks.report import RESULTS, ROOT, host, parser, write
from benchmarks.teacher_rows_h200 import run_overlapping, s3_server
from pipeline.config import parse_job
from pipeline.planning.identity import build_spec
from pipeline.planning.plan import make_plan
from pipeline.running.shard_run import ShardRun
from pipeline.running.tasks import ShardTask
from pipeline.running.worker import ShardWorker
from pipeline.teachers.base import RowsWanted
from pipeline.teachers.vllm_teacher import VllmTeacher

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def write_corpus(path: Path, tokens: int) -> Path:
    """Write topics of Python's reference, cut to 1,500 characters, about `tokens` tokens in all."""
    left = tokens * 4
    with path.open("w", encoding="utf-8") as file:
        for name in sorted(topics):
            text = topics[name].strip()[:1500]
            file.write(json.dumps({"id": name, "text": text}) + "\n")
            left -= len(text)
            if left <= 0:
                break
    return path


def main() -> None:
    tokens = (16_000, "about this many tokens a run")
    options = parser(__doc__, model=ROOT / "build/models/smollm2-135m", pairs=7, tokens=tokens, out=None).parse_args()
    with tempfile.TemporaryDirectory() as name, s3_server(Path(name) / "s3") as bucket:
        corpus = write_corpus(Path(name) / "corpus.jsonl", options.tokens)
        tree = {
            "cache": f"{bucket}/cache",
            "teacher": {"model": str(options.model), "max_model_len": 1024, "canary": False},
            "corpora": [{"files": [str(corpus)], "fields": {"text": "text", "id": "id"}}],
            "run": {"shard_bytes": corpus.stat().st_size // 4},
        }
        job = parse_job(tree)
        spec = build_spec(job, options.model)
        began = time.perf_counter()
        teacher = VllmTeacher(job.teacher, str(options.model), RowsWanted.of(spec))
        start_s = round(time.perf_counter() - began, 1)
        worker = ShardWorker(job, options.model, spec, start=lambda: teacher)
        tasks = [ShardTask(shard) for shard in make_plan(job, worker.encoder, spec.digest).plan.shards]
        windows = [w for task in tasks for w in ShardRun(task, job, worker.encoder, worker.loop).windows()]
        prompts = [{"prompt_token_ids": w.input_ids.tolist()} for w in windows]
        total = sum(len(w.input_ids) for w in windows)

        def bare() -> float:
            began = time.perf_counter()
            worker.loop.call(lambda _: teacher.llm.generate(prompts, teacher._public_sampling, use_tqdm=False))
            return total / (time.perf_counter() - began)

        def pipeline(serial: int) -> float:
            worker.writer = teachercache.create(f"{bucket}/cache{serial}", spec)
            began = time.perf_counter()
            receipts = run_overlapping(worker, tasks)
            seconds = time.perf_counter() - began
            assert sum(receipt.tokens for receipt in receipts) == total
            return total / seconds

        print(f"{len(windows)} documents, {total} tokens, {len(tasks)} shards; engine up after {start_s} s", flush=True)
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
    print(f"median ratio pipeline / bare LLM.generate: {median:.3f}")
    report = {"median_ratio": median, "pairs": pairs, "tokens": total, "documents": len(windows), "start_s": start_s}
    report |= {"provenance": teacher.provenance, "load_average": os.getloadavg(), **host()}
    device = "cpu" if teacher.provenance["device"] == "cpu" else "gpu"
    write(options.out or RESULTS / f"pipeline_overhead_{device}.json", report)


if __name__ == "__main__":
    main()
