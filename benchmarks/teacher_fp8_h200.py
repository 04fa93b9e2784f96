"""Cheaper teachers: vLLM's fp8 weights and activations, and its fp8 KV cache, against bf16 in one run.

    python benchmarks/teacher_fp8_h200.py                   committed tokens/s: 8B Llama shape, dummy weights
    python benchmarks/teacher_fp8_h200.py --model FOLDER    rows of a real model over Python's library source

Three teachers, one after the other, each in a new process: bf16; `engine_args: {quantization: fp8}`; `engine_args:
{kv_cache_dtype: fp8}`. Speed is that of the shard function, as `pipeline` in teacher_rows_h200.py. Rows are compared by
KL(bf16 || other) over the ids that both have, and one outcome for the rest: a lower bound of the whole, close to it
where few ids are missing. Top-1 agreement is the share of rows with the same first id. The fp8 head stays float32.
Results: benchmarks/results/teacher_fp8_<speed or rows>.json.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from benchmarks.report import RESULTS, host, parser, write
from benchmarks.teacher_rows_h200 import dummy_model, run_pipeline, s3_server
from pipeline.config import parse_job
from pipeline.planning.identity import build_spec
from pipeline.teachers.base import EngineRows, RowsWanted
from pipeline.teachers.vllm_teacher import VllmTeacher

KINDS: dict[str, dict[str, str]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8"},
    "fp8 KV cache": {"kv_cache_dtype": "fp8"},
}


def job_of(model: Path, kind: str, cache: str, scratch: Path, options: Any) -> Any:
    """Return the job of one teacher."""
    engine: dict[str, Any] = {"enforce_eager": True, "max_num_batched_tokens": 8192} | KINDS[kind]
    if options.model is None:
        engine |= {"load_format": "dummy", "gpu_memory_utilization": 0.85}
    return parse_job(
        {
            "cache": cache,
            "teacher": {
                "model": str(model),
                "canary": False,
                "max_model_len": options.length + 16,
                "engine_args": engine,
            },
            "corpora": [{"files": [f"{scratch}/docs*.parquet"], "fields": {"input_ids": "ids", "id": "id"}}],
            "recipe": {"bos": "never", "eos": False},
            "run": {"shard_tokens": options.documents * options.length},
        }
    )


def speed(kind: str, options: Any) -> dict[str, Any]:
    """Return committed tokens/s of one teacher of the 8B shape."""
    with tempfile.TemporaryDirectory() as name, s3_server((scratch := Path(name)) / "s3") as bucket:
        model = dummy_model(scratch / "model")
        save_file({"none": np.zeros(1, np.float32)}, model / "model.safetensors")  # load_format dummy reads no weight
        job = job_of(model, kind, f"{bucket}/cache", scratch, options)
        spec = build_spec(job, model)
        teacher = VllmTeacher(job.teacher, str(model), RowsWanted.of(spec))
        teacher.accelerate()
        found = run_pipeline(teacher, job, scratch, spec, options.shards, options.documents, options.length)
        teacher.close()  # the process would wait for the engine's
        return found


def rows(kind: str, options: Any) -> list[EngineRows]:
    """Return the rows of one real teacher over the first documents of Python's library, cut to `length` tokens."""
    encode = Tokenizer.from_file(str(options.model / "tokenizer.json")).encode
    texts = (
        path.read_text(encoding="utf-8", errors="ignore")
        for path in sorted(Path(tempfile.__file__).parent.glob("*.py"))
    )
    encoded = (encode(text, add_special_tokens=False).ids[: options.length] for text in texts if len(text) > 2000)
    documents = [np.array(ids, np.int32) for ids, _ in zip(encoded, range(options.documents), strict=False)]
    job = job_of(options.model, kind, "/nowhere", Path("/nowhere"), options)
    teacher = VllmTeacher(job.teacher, str(options.model), RowsWanted.of(build_spec(job, options.model)))
    teacher.accelerate()
    found = [scored.rows for scored in teacher.score(documents)]
    teacher.close()  # the process would wait for the engine's
    return found


def compare(ours: list[EngineRows], theirs: list[EngineRows]) -> dict[str, float]:
    """Return mean and worst KL(ours || theirs) in nats, and top-1 agreement, of rows [R, K] over the same documents."""
    kl, same = [], []
    for a, b in zip(ours, theirs, strict=True):
        for ids, p, other, q in zip(a.topk_ids, a.topk_logprobs, b.topk_ids, b.topk_logprobs, strict=True):
            _, mine, its = np.intersect1d(ids, other, return_indices=True)
            p_in, q_in = np.exp(p[mine].astype(np.float64)), np.exp(q[its].astype(np.float64))
            p_out, q_out = max(1 - p_in.sum(), 1e-12), max(1 - q_in.sum(), 1e-12)
            kl.append(float((p_in * np.log(p_in / q_in)).sum() + p_out * np.log(p_out / q_out)))
            same.append(ids[0] == other[0])
    return {"mean_kl": float(np.mean(kl)), "worst_kl": max(kl), "top1_agreement": float(np.mean(same)), "rows": len(kl)}


def main() -> None:
    options = parser(
        __doc__,
        model=(None, "folder of a real model: compare rows"),
        documents=(96, "documents, of a shard where speed is measured"),
        length=(4096, "tokens of a document at most"),
        shards=4,
        kinds=(",".join(KINDS), "comma-separated, the first is the one to compare with"),
        out=None,
    ).parse_args()
    report: dict[str, Any] = {}
    first: list[EngineRows] = []
    for kind in options.kinds.split(","):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:  # frees the GPU
            if options.model is None:
                report[kind] = process.submit(speed, kind, options).result()
                print(f"{kind}: {report[kind]['tokens_per_s']:,.0f} committed tokens/s", flush=True)
                continue
            found = process.submit(rows, kind, options).result()
        first = first or found
        report[kind] = compare(first, found)
        shown = (
            "mean KL {mean_kl:.2e}, worst {worst_kl:.3f} nats, top-1 agreement {top1_agreement:.2%} of {rows:,} rows"
        )
        print(f"{kind}: {shown.format(**report[kind])}", flush=True)
    report |= {"settings": {k: str(v) for k, v in vars(options).items() if k != "out"}, "host": host()}
    write(options.out or RESULTS / f"teacher_fp8_{'rows' if options.model else 'speed'}.json", report)


if __name__ == "__main__":
    main()
