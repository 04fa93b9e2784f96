"""What a cache and its students cost against online distillation, and from how many students on the cache is cheaper.

    python benchmarks/break_even.py                     print the tables of docs/RESULTS.md
    python benchmarks/break_even.py --measure OUT       measure one pair on this machine (one GPU, some ten minutes)
    python benchmarks/break_even.py --measure OUT --smoke           the same on a CPU, three small steps

Computed, for teachers and rates of benchmarks/sizing.py. With a cache, the teacher scores each token once, at the rate of
committed rows; online, it runs again for each student, at the rate of plain prefill (of vLLM: an online teacher inside
a trainer is slower, and needs the student's GPU to hold both). A second pass over the data counts as a second student.

Measured: SmolLM2-135M and a student of every second layer, 500 steps of 2,048 tokens. The product's own commands run:
a job writes the cache, `fit` trains once from it and once with the live teacher (full vocabulary) on the same batches,
`eval` measures held-out full-vocabulary KL of both. Times are of work: shards, and steps after the first tenth, which
compile; loading is left out on both sides. What is in OUT already is not done again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import RESULTS, ROOT, write
from benchmarks.sizing import BYTES_PER_ROW, MEASURED, MEASURED_PARAMETERS, MEASURED_RATE, TEACHERS

MEASURED_FILE = RESULTS / "break_even_h200.json"
PLAIN_RATE = float(MEASURED["rates_tokens_per_s"]["plain"])  # tokens/s of prefill, the shape of MEASURED_RATE
TOKENS = 1e9
STUDENTS = (1, 3, 10)
GPU_HOUR, GB_MONTH = 4.0, 0.023  # dollars, as in sizing.py
Row = list[str]


def markdown(header: Row, rows: list[Row]) -> str:
    """Return a table whose columns but the first are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def lines(name: str, once: float, storage: str, again: float, student: float) -> list[Row]:
    """Return a pair's lines: GPU-seconds of the teacher for a cache and, online, for a student; of a student's steps."""
    rows = []
    for count in STUDENTS:
        cached, online = once + count * student, count * (again + student)
        cells = (once, count * again, count * student, cached, online)
        rows.append(
            [
                name,
                str(count),
                storage,
                *(f"{cell:,.0f}" if cell >= 100 else f"{cell:.1f}" for cell in cells),
                f"{cached / online:.2f}",
            ]
        )
    return rows


HEADER = [
    *("teacher", "students", "storage", "teacher, cache", "teacher, online", "students' steps"),
    *("all, cache", "all, online", "cache / online"),
]


def computed() -> str:
    """Return the table of GPU-seconds for a billion tokens and students of the measured 3.2B shape, and the break-even."""
    steps = json.loads((RESULTS / "step_h200_rate_documents.json").read_text(encoding="utf-8"))["rows"]
    rate = max(row["tokens_per_s"] for row in steps if row["group"] == "bf16")
    rows, even = [], []
    bytes_a_row = BYTES_PER_ROW["open"]
    for name, active, share in TEACHERS:
        scale = MEASURED_PARAMETERS / active * share
        once, again = TOKENS / (MEASURED_RATE * scale), TOKENS / (PLAIN_RATE * scale)
        rows += lines(name, once, f"{TOKENS * bytes_a_row / 1e9:,.0f} GB", again, TOKENS / rate)
        month = TOKENS * bytes_a_row / 1e9 * GB_MONTH / GPU_HOUR * 3600
        even.append(
            f"- {name}: {once / again:.2f}; with a month of storage, as GPU time, {(once + month) / again:.2f}\n"
        )
    return markdown(HEADER, rows) + f"\nBreak-even, in students:\n\n{''.join(even)}"


def measured() -> str:
    """Return the table of the measured pair and its quality, or a line that says how to measure it."""
    if not MEASURED_FILE.exists():
        return "Not measured yet: `python benchmarks/break_even.py --measure OUT` on an H200.\n"
    return pair(json.loads(MEASURED_FILE.read_text(encoding="utf-8")))


def pair(report: dict[str, Any]) -> str:
    """Return what a report of `measure` says."""
    cache, online, cached = (report["parts"][name] for name in ("cache", "online", "cached"))
    again = max(online["gpu_seconds"] - cached["gpu_seconds"], 0.0)
    name = f"{report['settings']['teacher']}, {report['settings']['rows']}"
    table = markdown(
        HEADER, lines(name, cache["gpu_seconds"], f"{cache['bytes'] / 1e6:,.1f} MB", again, cached["gpu_seconds"])
    )
    even = "never (the live teacher cost no time)"
    if again:
        even = f"{cache['gpu_seconds'] / again:.1f}; with the start of the cache's engine "
        even += f"{cache['wall_seconds'] / again:.1f}"
    where = report["machine"].get("gpu") or "a CPU"
    return table + (
        f"\nMeasured on {where}, {report['machine']['date']}; {online['steps']} steps over the same "
        f"{online['tokens']:,} tokens:\n\n"
        f"- Break-even, in students: {even}\n"
        f"- Held-out full-vocabulary KL: {online['heldout_kl']:.4f} online, {cached['heldout_kl']:.4f} from the cache "
        f"({cached['heldout_kl'] / online['heldout_kl'] - 1:+.1%})\n"
        f"- A step: {online['step_ms']:.0f} ms online, {cached['step_ms']:.0f} ms from the cache\n"
        f"- The cache's job took {cache['wall_seconds']:.0f} s, of which {cache['gpu_seconds']:.0f} s score tokens. The "
        "rest is start-up, which does not grow with the corpus\n"
    )


def run(*arguments: object) -> str:
    """Run one of the product's commands and return what it printed."""
    command = [sys.executable, "-m", *map(str, arguments)]
    print("$", *command[1:], flush=True)
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def make_cache(out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Let a job score the corpus into OUT/cache."""
    from benchmarks.parity import real_documents

    corpus, left = out / "corpus.jsonl", options.tokens * 4  # characters
    with corpus.open("w", encoding="utf-8") as file:
        for index, text in real_documents():
            text = text[: options.seq_len * 4]
            file.write(json.dumps({"id": f"{index}", "text": text}) + "\n")
            left -= len(text)
            if left < 0:
                break
    engine = {"model": str(options.teacher), "engine": options.engine, "max_model_len": options.seq_len + 1}
    splits = {"train": 1 - options.heldout, "heldout": options.heldout}
    source = {"source": "python", "files": [str(corpus)], "fields": {"text": "text", "id": "id"}, "splits": splits}
    job = {
        "cache": str(out / "cache"),
        "teacher": engine | {"name": options.teacher.name, "canary": options.engine == "vllm"},
        "rows": {"kind": "sampled", "entries": options.entries},
        "corpora": [source],
        "run": {"executor": "inline", "shards_per_actor": 1, "log_every_s": 5},
    }
    (out / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")
    began = time.monotonic()
    run("pipeline", "run", out / "job.yaml")
    wall = time.monotonic() - began
    commits = [json.loads(path.read_text(encoding="utf-8")) for path in (out / "cache/commits").glob("*.json")]
    files = [entry for commit in commits for entry in commit["files"]]
    return {
        "gpu_seconds": sum(commit["provenance"]["shard_seconds"] for commit in commits),
        "wall_seconds": wall,
        "bytes": sum(entry["size"] for entry in files),
        **{name: sum(commit[name] for commit in commits) for name in ("rows", "tokens")},
    }


def train(out: Path, name: str, loss: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Train a student with that loss and measure it."""
    config = {
        "cache": str(out / "cache"),
        "student": str(out / "student"),
        "teacher": str(options.teacher),
        "output": str(out / name),
        "data": {"seq_len": options.seq_len},
        "loss": loss,
        "optim": {"lr": 1e-3, "warmup_steps": 10},
        "train": {"max_steps": options.steps},
        "checkpoint": {"every_steps": max(options.steps // 5, 1)},
        "log": {"tensorboard": False},
    }
    path = out / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    run("trainer", "fit", path)
    logged = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in logged if line["kind"] == "train"]
    assert len(steps) == options.steps, f"{name} took {len(steps)} steps of {options.steps}"
    warm = steps[math.ceil(options.steps / 10) :]
    median = statistics.median(line["seconds"] + line["data_wait_s"] for line in warm)
    found = json.loads(run("trainer", "eval", path, f"student={out / name}", "--json"))
    return {
        "gpu_seconds": median * options.steps,
        "step_ms": median * 1e3,
        "steps": len(steps),
        "tokens": sum(line["tokens"] for line in steps),
        "rows": sum(rows := [line["rows"] for line in steps]),
        "batches": hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16],
        "peak_gib": warm[-1].get("memory_gib"),
        "heldout_kl": found["heldout_kl_full_vocabulary"],
        "top1_agreement": found["top1_agreement"],
        "perplexity": found["perplexity"],
    }


def measure(options: argparse.Namespace) -> None:
    """Do what is not in OUT/break_even_h200.json yet, part by part, and print the table."""
    import torch

    from trainer.bench.measure import machine

    out = options.measure.resolve()
    out.mkdir(parents=True, exist_ok=True)
    file = out / MEASURED_FILE.name
    settings = {
        "teacher": options.teacher.name,
        "rows": f"{options.entries} sampled entries",
        **{name: getattr(options, name) for name in ("steps", "seq_len", "tokens", "heldout", "engine")},
    }
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"parts": {}}
    if report.setdefault("settings", settings) != settings:
        raise SystemExit(f"{file} has other settings: {report['settings']}; give another OUT")
    report["machine"] = machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if not (out / "student").exists():
        run("trainer", "init-student", "--teacher", options.teacher, "--layers", "every-2", "--out", out / "student")
    parts = {
        "cache": lambda: make_cache(out, options),
        "cached": lambda: train(out, "cached", {"method": "fused"}, options),
        "online": lambda: train(out, "online", {"method": "online", "tail": None}, options),
    }
    for name, part in parts.items():
        if name not in report["parts"]:
            report["parts"][name] = part()
            write(file, report)
    assert report["parts"]["online"]["batches"] == report["parts"]["cached"]["batches"], (
        "the runs saw different batches"
    )
    print(pair(report), end="")


def main() -> None:
    """Print the tables, or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, metavar="OUT", help="measure on this machine into a folder")
    parser.add_argument(
        "--teacher", type=Path, default=ROOT / "build/models/smollm2-135m", help="a Hugging Face folder"
    )
    parser.add_argument("--engine", default="vllm", help="vllm, or hf: transformers in float32")
    parser.add_argument("--entries", type=int, default=24, help="of a sampled row")
    for name, default in {"steps": 500, "seq-len": 2048, "tokens": 1_200_000}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--heldout", type=float, default=0.05, help="share of the documents")
    parser.add_argument("--smoke", action="store_true", help="three steps of 128 tokens, the engine hf")
    options = parser.parse_args()
    if options.smoke:
        options.engine, options.steps, options.seq_len, options.tokens, options.heldout = "hf", 3, 128, 2_000, 0.3
    if options.measure:
        measure(options)
    else:
        print(computed() + "\n" + measured(), end="")


if __name__ == "__main__":
    main()
