"""Students over the GPUs of one machine: `torchrun … -m trainer fit` on one GPU and on all, as teams run it.

    python benchmarks/step_ranks_h200.py [--gpus 2] [--runs rate,all,one] [--scratch /dev/shm]
    python benchmarks/step_ranks_h200.py --runs gpt-oss          20.9 B parameters: 42 GB of random weights in --scratch
    python benchmarks/step_ranks_h200.py --smoke 1               tiny shapes on a CPU, over gloo

Sequences of 32,768 tokens, one document each, from a synthetic cache of K = 100; bfloat16 moments, all parameters
trained. Runs:
    rate      the 3.2 B Llama shape on one GPU, one sequence a step
    all       the same over all GPUs, one sequence a GPU and step: TFLOP/s per GPU as a share of `rate`
    one       the batches of `all` on one GPU: the largest difference of the two loss curves
    gpt-oss   gpt-oss-20b's shape over all GPUs
Each prints the median TFLOP/s per GPU of model work (active parameters), the peak memory of the fullest GPU and what
`python -m trainer plan` predicts. A run ends with SIGKILL after its steps: nothing is saved.
Results: benchmarks/results/step_ranks_<device>.json, to which each call adds its runs.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig

import teachercache
from benchmarks.report import RESULTS, ROOT, host, parser, write
from benchmarks.stream_h200 import write_shard
from teachercache import fingerprint_tokenizer
from teachercache.testing import synthetic_spec
from trainer.bench.shapes import SHAPES
from trainer.config import TrainerConfig
from trainer.memory import plan

LLAMA = {"max_position_embeddings": 131_072, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
GPT_OSS_20B = {"num_hidden_layers": 24, "num_local_experts": 32, "dtype": "bfloat16"}
GPT_OSS_TINY = {
    "vocab_size": 1_000, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 4,
    "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16,
}  # fmt: skip


def make_student(folder: Path, config: Any) -> Path:
    """Write a folder of random bf16 weights, made on a GPU if there is one, and a tokenizer of the right size."""
    if folder.exists():
        return folder
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    words = {f"t{i}": i for i in range(config.vocab_size)}
    Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))
    return folder


def make_cache(url: Path, student: Path, vocab: int, length: int, documents: int) -> Path:
    """Write and publish documents as long as a sequence, four a shard."""
    if not url.exists():
        spec = synthetic_spec(vocab_size=vocab, top_k=min(100, vocab // 4))
        spec = spec.model_copy(update={"tokenizer": fingerprint_tokenizer(student)})
        for shard in range(-(-documents // 4)):
            write_shard(str(url), spec, "full", length, 4 * length, shard)
        teachercache.create(str(url), spec).publish(allow_partial=True)
    return url


def run(tree: dict[str, Any], gpus: int, steps: int, scratch: Path) -> list[dict[str, Any]]:
    """Train for some steps over `gpus` ranks, then kill them; return the steps' metrics."""
    output = Path(tempfile.mkdtemp(dir=scratch))
    (output / "train.yaml").write_text(json.dumps(tree | {"output": str(output / "run")}))  # JSON is YAML
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    command += ["-m", "trainer", "fit", str(output / "train.yaml")]
    print("$", *command, flush=True)
    log = output / "run.log"
    rows: list[dict[str, Any]] = []
    with log.open("wb") as said:
        process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
    metrics = output / "run" / "metrics.jsonl"
    try:
        while len(rows) < steps:
            if process.poll() is not None:
                raise SystemExit(f"{log.read_text(errors='replace')[-4000:]}\nended with {process.returncode}")
            time.sleep(0.5)
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            rows = [row for row in map(json.loads, lines) if "tflops" in row]
    finally:
        if process.poll() is None:
            for rank in psutil.Process(process.pid).children(recursive=True):  # torchrun starts each in a new session
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.kill()
            process.kill()
            process.wait()
    return rows[:steps]


def main() -> None:
    options = parser(
        __doc__,
        gpus=(2, "ranks of all but `rate` and `one`"),
        runs=("rate,all,one", "comma-separated; also gpt-oss"),
        steps=(50, "steps of `all` and `one`; a fifth of it for the others"),
        seq_len=32_768,
        scratch=(None, "folder for weights and caches; what a call made there, the next one uses"),
        smoke=(0, "1: tiny shapes"),
        out=None,
    ).parse_args()
    if options.smoke:
        options.seq_len, options.steps, options.runs = 256, 4, "rate,all,one,gpt-oss"
    scratch = options.scratch or Path(tempfile.mkdtemp(prefix="step-ranks-"))
    path = options.out or RESULTS / f"step_ranks_{'cpu_smoke' if options.smoke else 'h200'}.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    for name in options.runs.split(","):
        shape = "gpt-oss" if name == "gpt-oss" else "llama"
        llama = LlamaConfig(**SHAPES["tiny" if options.smoke else "llama-3.2b"], **LLAMA)
        model = GptOssConfig(**(GPT_OSS_TINY if options.smoke else GPT_OSS_20B)) if shape == "gpt-oss" else llama
        gpus = 1 if name in ("rate", "one") else options.gpus
        steps = options.steps if name in ("all", "one") else max(options.steps // 5, 3)
        student = make_student(scratch / shape, model)
        length, batch = options.seq_len, 1 if name == "rate" else options.gpus
        cache = make_cache(
            scratch / f"{shape}-cache", student, model.vocab_size, length, (options.steps + 4) * options.gpus
        )
        tree = {
            "cache": str(cache),
            "student": str(student),
            "data": {"seq_len": length, "batch_tokens": batch * length},
            "optim": {"lr": 1e-5, "state": "bfloat16"},
            "train": {"max_steps": 10_000, "dtype": "bfloat16"},
            "checkpoint": {"every_steps": None},
            "log": {"tensorboard": False},
        }
        rows = run(tree, gpus, steps, scratch)
        settled = rows[len(rows) // 3 :]
        found = {key: statistics.median(row[key] for row in settled) for key in ("seconds", "tflops")}
        predicted = plan(TrainerConfig.model_validate(tree), gpus, 141.0)["peak_gib"]
        found |= {"gpus": gpus, "memory_gib": max(row.get("memory_gib", 0.0) for row in rows), "planned_gib": predicted}
        report[name] = found | {"losses": [row["loss"] for row in rows]}
        shown = "{seconds:.3f} s a step, {tflops:.0f} TFLOP/s per GPU, {memory_gib:.1f} GiB, planned {planned_gib:.1f}"
        print(f"{name}: {gpus} GPUs, {shown.format(**found)}", flush=True)
        write(path, report | {"host": host()})
    if {"rate", "all"} <= report.keys():
        print(f"per GPU, all over one: {report['all']['tflops'] / max(report['rate']['tflops'], 1e-9):.3f}")
    if {"one", "all"} <= report.keys():
        pairs = list(zip(report["one"]["losses"], report["all"]["losses"], strict=False))
        worst = max(abs(a - b) / abs(a) for a, b in pairs)
        print(f"loss curves over {len(pairs)} steps differ by {worst:.2e} at most; bf16 rounds to {2.0**-8:.1e}")


if __name__ == "__main__":
    main()
