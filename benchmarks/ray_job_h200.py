"""The distributed job on GPUs: `ray job submit`, an actor a GPU, one cache on S3; an actor and a driver are killed.

    python benchmarks/ray_job_h200.py [--gpus 2]        8B Llama shape, dummy weights, documents of 4,096 tokens
    python benchmarks/ray_job_h200.py --smoke MODEL     the same steps with a small real model on a CPU, without vLLM
    python benchmarks/ray_job_h200.py --demo 1          the steps of `make demo` on this machine, on its GPU if it has one

Starts a Ray head and an S3 server (localbucket) here. Runs, of top-100 rows with a float32 head:
    one      one actor: committed tokens/s
    all      an actor on every GPU: the same, as a multiple of `one`
    killed   an actor on every GPU; SIGKILL of one actor, later of the driver; the same command again; then the cache is
             verified, and every document must be there once
A rate counts whole shards, between the commits after each actor's first two and before its last two, so that start-up
and the end, where actors wait, weigh nothing. Results: benchmarks/results/ray_job_<device>.json.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from demo_services import BIN, ray_head
from safetensors.numpy import save_file

import teachercache
from benchmarks.report import RESULTS, ROOT, host, parser, write
from benchmarks.teacher_rows_h200 import dummy_model, s3_server
from teachercache import Store


def write_corpus(folder: Path, files: int, documents: int, length: int, vocab: int) -> set[str]:
    """Write Parquet files of random token ids, one for each shard; return the documents' ids."""
    rng, ids = np.random.default_rng(0), []
    for i in range(files):
        names = [f"{i}-{j}" for j in range(documents)]
        tokens = pa.array([rng.integers(0, vocab, length).tolist() for _ in names], pa.list_(pa.int32()))
        pq.write_table(pa.table({"id": names, "ids": tokens}), folder / f"docs{i:04}.parquet")
        ids += names
    return set(ids)


def mine(named: Callable[[list[str]], bool]) -> list[psutil.Process]:
    """Return the processes below this one whose command line is named so."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if named(process.cmdline()):
                found.append(process)
    return found


def actors() -> list[psutil.Process]:
    """Return the teachers' processes."""
    return mine(lambda command: bool(command) and command[0].startswith("ray::TeacherActor"))


def drivers() -> list[psutil.Process]:
    """Return the job's own process, not the shell that Ray runs it in."""
    return mine(lambda command: command[1:4] == ["-m", "pipeline", "run"])


class Job:
    """One job file against one Ray head; every submission is the same command."""

    def __init__(self, address: str, env: dict[str, str], tree: dict[str, Any], folder: Path) -> None:
        self.cache, self.file, self.env = tree["cache"], folder / f"{Path(tree['cache']).name}.yaml", env
        self.file.write_text(json.dumps(tree))  # JSON is YAML
        self.command = [str(BIN / "ray"), "job", "submit", "--address", address, "--working-dir", str(ROOT), "--"]
        self.command += ["python", "-m", "pipeline", "run", str(self.file)]

    def run(self, at_commits: dict[int, Callable[[], list[psutil.Process]]]) -> tuple[int, list[float]]:
        """Submit and wait: the exit status, and when each commit was seen. At a number of commits, kill a process."""
        print("$", *self.command, flush=True)
        log = self.file.with_suffix(".log")
        store, seen, pending = Store.open(self.cache), [], dict(sorted(at_commits.items()))
        with log.open("ab") as output:
            process = subprocess.Popen(self.command, env=self.env, stdout=output, stderr=subprocess.STDOUT)
            while process.poll() is None:
                count = sum(1 for entry in store.list("commits/") if entry.path.endswith(".json"))
                seen += [time.monotonic()] * (count - len(seen))
                due = next((number for number in pending if count >= number), None)
                if due is not None and (victims := pending[due]()):
                    victim = victims[0]
                    del pending[due]
                    print(f"   {count} commits: SIGKILL of {' '.join(victim.cmdline())[:80]}", flush=True)
                    victim.kill()
                time.sleep(0.1)
        if process.returncode and not at_commits:
            print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
            raise SystemExit(f"the job ended with {process.returncode}; its log is above")
        return process.returncode, seen


def rate(seen: list[float], tokens: int, actor_count: int) -> float:
    """Return committed tokens/s from when each commit was seen, without both ends."""
    ends = 2 * actor_count
    if len(seen) < 2 * ends + 2:
        raise SystemExit(f"{len(seen)} shards are too few for a rate over {actor_count} actors: raise --shards")
    return (len(seen) - 1 - 2 * ends) * tokens / (seen[-1 - ends] - seen[ends])


def check(cache: str, env: dict[str, str], expected: set[str]) -> dict[str, Any]:
    """Verify a cache, and that it has each document once; raises SystemExit where it has not."""
    done = subprocess.run([str(BIN / "teachercache"), "verify", cache], env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    counts = collections.Counter(record.doc_id for record in teachercache.open(cache).records())
    twice, missing = [key for key, n in counts.items() if n > 1], expected - set(counts)
    print(f"verified: {len(counts):,} documents, {len(twice)} twice, {len(missing)} missing", flush=True)
    if twice or missing or set(counts) - expected:
        raise SystemExit(f"twice: {twice[:5]}, missing: {sorted(missing)[:5]}")
    return {"documents": len(counts), "twice": 0, "missing": 0}


def measure(options: Any, scratch: Path, bucket: str) -> dict[str, Any]:
    """Make the three runs and return their figures."""
    model = options.smoke.resolve() if options.smoke else dummy_model(scratch / "model")
    teacher = {"model": str(model), "canary": False, "max_model_len": options.length + 16, "engine": "hf"}
    if not options.smoke:
        save_file({"none": np.zeros(1, np.float32)}, model / "model.safetensors")  # load_format dummy reads no weight
        engine = {"enforce_eager": True, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.85}
        teacher |= {"engine": "vllm", "engine_args": engine | {"load_format": "dummy"}}
    tokens, vocab = options.documents * options.length, json.loads((model / "config.json").read_text())["vocab_size"]
    (corpus := scratch / "corpus").mkdir()
    files = options.shards * options.gpus
    ids = write_corpus(corpus, files, options.documents, options.length, vocab)
    env = dict(os.environ, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    report: dict[str, Any] = {}
    with ray_head(env, scratch / "ray.log", num_cpus=options.gpus + 2) as address, contextlib.ExitStack() as at_exit:
        at_exit.callback(lambda: [process.kill() for process in drivers()])  # Ray starts them in their own session
        for name in options.runs.split(","):
            count = 1 if name == "one" else options.gpus
            used = options.shards if name == "one" else files
            of_run = [str(path) for path in sorted(corpus.glob("*.parquet"))[:used]]
            tree = {
                "cache": f"{bucket}/{name}",
                "teacher": teacher,
                "corpora": [{"files": of_run, "fields": {"input_ids": "ids", "id": "id"}}],
                "recipe": {"bos": "never", "eos": False},
                "run": {"actors": count, "shard_tokens": tokens},
            }
            job = Job(address, env, tree, scratch)
            if name == "killed":
                status, _ = job.run({max(1, used // 4): actors, max(2, used // 2): drivers})
                print(f"   the killed job ended with {status}; the same command again", flush=True)
                job.run({})
                report[name] = check(job.cache, env, ids)
                continue
            began = time.monotonic()
            _, seen = job.run({})
            report[name] = {"actors": count, "tokens_per_s": rate(seen, tokens, count), "seconds": seen[-1] - began}
            print(f"{name}: {count} actors commit {report[name]['tokens_per_s']:,.0f} tokens/s", flush=True)
    if {"one", "all"} <= report.keys():
        report["speedup"] = report["all"]["tokens_per_s"] / report["one"]["tokens_per_s"]
        print(f"{options.gpus} actors over one: {report['speedup']:.2f}")
    return report


def demo() -> None:
    """Run `make demo`'s steps and print their wall time and held-out KL."""
    began = time.monotonic()
    subprocess.run([sys.executable, str(ROOT / "scripts" / "demo.py")], cwd=ROOT, check=True)
    found = json.loads((ROOT / "build" / "demo" / "report.json").read_text())
    before, after = (found[f"student.heldout_kl_{when}"] for when in ("before", "after"))
    print(f"demo: {time.monotonic() - began:.0f} s, held-out KL {before} nats before training, {after} after")


def main() -> None:
    options = parser(
        __doc__,
        smoke=(None, "folder of a small real model, on a CPU"),
        gpus=(2, "GPUs, and so actors of `all` and `killed`"),
        runs=("one,all,killed", "comma-separated, in this order"),
        shards=(30, "shards for each GPU"),
        documents=(24, "documents of a shard"),
        length=(4096, "tokens of a document"),
        demo=(0, "1: the steps of `make demo` alone"),
        out=None,
    ).parse_args()
    if options.demo:
        demo()
        return
    if options.smoke:
        options.shards, options.documents, options.length = 10, 2, 64
    with tempfile.TemporaryDirectory() as name, s3_server(Path(name) / "s3") as bucket:
        report = measure(options, Path(name), bucket)
    report |= {"settings": {k: str(v) for k, v in vars(options).items() if k != "out"}, "host": host()}
    write(options.out or RESULTS / f"ray_job_{'cpu_smoke' if options.smoke else 'h200'}.json", report)


if __name__ == "__main__":
    main()
