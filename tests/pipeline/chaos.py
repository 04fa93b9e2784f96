"""One chaotic job on a real local cluster of several nodes: everything that can die, dies.

    python -m tests.pipeline.chaos SEED [SECONDS_OF_S3_ERRORS]

During one job and a second that races it: kills of actors, a whole node (and a new one), the driver (then the same
command again), S3 answering 503 for a while, slow S3. At the end every document is cached once, or quarantined with a
reason, and the cache verifies. The teacher is `noop`.
"""

from __future__ import annotations

import collections
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from teachercache.errors import StoreUnavailable
from tests.pipeline.conftest import ROOT, documents, environment, make_tokenizer, write_jsonl
from tests.pipeline.faulty_s3 import FaultyProxy
from tests.servers import serve

FILES, PER_FILE = 6, 60
PROMPT = "$ python -m pipeline run"
DEADLINE_S = 240


def _teachers(root: psutil.Process) -> list[psutil.Process]:
    found = []
    for process in root.children(recursive=True):
        try:
            if (process.cmdline() or [""])[0].startswith("ray::TeacherActor"):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _job(folder: Path, url: str, model: Path, kind: str) -> Path:
    for i in range(FILES):
        docs = [d | {"id": f"{i}-{d['id']}"} for d in documents(PER_FILE, 200)]
        docs[7]["text"] = f"blank follows {i}"
        docs[8]["text"] = "  "
        write_jsonl(folder / f"in{i}.jsonl", docs)
    job = {
        "cache": url,
        "teacher": {"model": str(model), "engine": "noop", "max_model_len": 512,
                    "engine_args": {"delay_s": 0.5}},
        "rows": {"kind": kind, "entries": 8},
        "corpora": [{"source": "s", "files": [f"{folder}/in*.jsonl"], "fields": {"text": "text", "id": "id"}}],
        "run": {"actors": 2, "shard_bytes": 1500, "log_every_s": 5, "shard_timeout_s": 60, "max_retries": 8},
    }  # fmt: skip
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


class _Run:
    """`python -m pipeline run`, given again where it could not begin because S3 was down: what a person would do."""

    def __init__(self, job: Path, env: dict[str, str], log: Path) -> None:
        self.job, self.env, self.log, self.restarts = job, env, log, 0
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "pipeline", "run", str(self.job)]
        with self.log.open("a") as out:
            out.write(f"{PROMPT}\n")
            out.flush()
            self.process = subprocess.Popen(command, env=self.env, cwd=ROOT, stdout=out, stderr=out)

    def running(self) -> bool:
        if self.process.poll() is None:
            return True
        last = self.log.read_text().rsplit(PROMPT, 1)[-1]
        if self.process.returncode == 1 and StoreUnavailable.code in last:
            self.restarts += 1
            self.start()
            return True
        return False

    def said(self) -> str:
        return self.log.read_text()[-3000:]


def chaos(seed: int, s3_errors_s: float = 8.0) -> dict[str, Any]:
    """Runs one seed; raises AssertionError where a promise is broken. Returns what was done."""
    import ray
    from ray.cluster_utils import Cluster

    rng = random.Random(seed)
    began = time.monotonic()
    done: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tokenizer(folder / "model")
        with serve("moto", folder / "s3") as server:
            bucket = server.new_bucket()
            proxy = FaultyProxy(server.endpoint)
            env = environment() | server.env() | {"AWS_ENDPOINT_URL": proxy.endpoint}
            job = _job(folder, f"{bucket}/cache", model, "top_k" if seed % 2 else "sampled")
            # heads first: nodes are separate raylets; the driver's own node takes no teacher
            os.environ.update({k: env[k] for k in ("PYTHONPATH",)})
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
            nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
            env["RAY_ADDRESS"] = cluster.address
            try:
                first, second = (_Run(job, env, folder / f"log{i}") for i in range(2))
                deadline = began + DEADLINE_S
                faults = ["actor", "actor", "node", "driver", "errors", "slow"]
                rng.shuffle(faults)
                next_fault = time.monotonic() + rng.uniform(6, 10)
                while first.running() or second.running():
                    assert time.monotonic() < deadline, f"no end in time:\n{first.said()}\n----\n{second.said()}"
                    time.sleep(0.2)
                    if not faults or time.monotonic() < next_fault:
                        continue
                    fault = faults.pop()
                    next_fault = time.monotonic() + rng.uniform(1, 4)
                    if fault == "actor":
                        # every raylet of this cluster is a child of this process
                        victims = _teachers(psutil.Process())
                        if victims:
                            rng.choice(victims).kill()
                            done[fault] += 1
                    elif fault == "node":
                        victim = nodes.pop(rng.randrange(len(nodes)))
                        cluster.remove_node(victim, allow_graceful=False)
                        nodes.append(cluster.add_node(num_cpus=2))
                        done[fault] += 1
                    elif fault == "driver" and first.running():
                        first.process.kill()
                        first.process.wait()
                        first.start()
                        done[fault] += 1
                    elif fault in ("errors", "slow"):
                        proxy.for_a_while("error" if fault == "errors" else "slow", s3_errors_s)
                        done[fault] += 1
                codes = [first.process.returncode, second.process.returncode]
                assert codes == [0, 0], f"exit codes {codes}\n{first.said()}\n----\n{second.said()}"
                done["restarts"] = first.restarts + second.restarts
            finally:
                for run in (first, second):
                    if run.process.poll() is None:
                        run.process.kill()
                if ray.is_initialized():
                    ray.shutdown()
                cluster.shutdown()
                proxy.mode = "pass"
            os.environ.update(server.env())
            _check(f"{bucket}/cache", env | {"AWS_ENDPOINT_URL": server.endpoint})
            proxy.close()
    return {"seed": seed, "seconds": round(time.monotonic() - began, 1), "faults": dict(done), "refused": proxy.refused}


def _check(url: str, env: dict[str, str]) -> None:
    import teachercache

    verify = subprocess.run(
        [sys.executable, "-c", "from teachercache.cli import main; main()", "verify", url],
        env=env, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert verify.returncode == 0, verify.stdout + verify.stderr
    cache = teachercache.open(url)
    counts = collections.Counter(r.doc_id for r in cache.records())
    expected = {f"{i}-doc{k}" for i in range(FILES) for k in range(PER_FILE) if k != 8}
    assert set(counts) == expected, (
        f"missing {sorted(expected - set(counts))[:5]}, extra {sorted(set(counts) - expected)[:5]}"
    )
    assert set(counts.values()) == {1}
    assert cache.manifest.complete
    assert cache.manifest.drops == {"blank": FILES}


if __name__ == "__main__":
    print(json.dumps(chaos(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 8.0)))
