"""`ray job submit` from another folder, credentials in the runtime environment: Ctrl-C, `ray job stop`, a spent budget."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from teachercache import Store
from tests.pipeline.conftest import ROOT, check_complete, documents, environment, write_jsonl
from tests.servers import Server
from tests.waiting import wait_for

sys.path.insert(0, str(ROOT / "scripts"))
from demo_services import ray_head

RAY = str(Path(sys.executable).with_name("ray"))


class Cluster:
    """The `ray` command against one head."""

    def __init__(self, address: str, env: dict[str, str], cwd: Path, runtime_env: dict[str, Any]) -> None:
        self.address, self.env, self.cwd, self.runtime_env = address, env, cwd, runtime_env

    def job(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [RAY, "job", verb, "--address", self.address, *arguments]
        return subprocess.run(
            command, env=self.env, cwd=self.cwd, capture_output=True, text=True, timeout=200, check=False
        )

    def submit_arguments(self, name: str, job: Path, *overrides: str) -> list[str]:
        return [
            "--submission-id", name, "--working-dir", str(ROOT), "--runtime-env-json", json.dumps(self.runtime_env),
            "--", "python", "-m", "pipeline", "run", str(job), *overrides,
        ]  # fmt: skip

    def status(self, name: str) -> str:
        """What Ray says of a job, from the line `Status for job 'name': STATUS`."""
        said = self.job("status", name)
        found = re.search(
            r"(SUCCEEDED|FAILED|STOPPED|RUNNING|PENDING)|job '\w+' (succeeded|failed|was stopped)", said.stdout
        )
        return found[0] if found else said.stdout + said.stderr


@dataclass
class Job:
    path: Path
    cache: str
    ids: set[str]


@pytest.fixture(scope="module")
def server(s3_server) -> Server:
    return s3_server("moto")


@pytest.fixture(scope="module")
def cluster(server, tmp_path_factory) -> Iterator[Cluster]:
    """One head for all jobs of this file; the credentials are in the jobs' runtime environment and nowhere else."""
    folder = tmp_path_factory.mktemp("elsewhere")
    clean = {k: v for k, v in environment().items() if not k.startswith("AWS_") and k != "PYTHONPATH"}
    clean["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{clean['PATH']}"
    with ray_head(clean, folder / "ray.log", num_cpus=2) as address:
        yield Cluster(address, clean, folder, {"env_vars": server.env()})


@pytest.fixture
def job(server, job_file, tmp_path, monkeypatch) -> Job:
    """A job of 120 documents in about 18 shards, on a bucket that this process may read."""
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    cache = f"{server.new_bucket()}/cache"
    files = [
        write_jsonl(tmp_path / f"{i}.jsonl", [d | {"id": f"{i}-{d['id']}"} for d in documents(40)]) for i in range(3)
    ]
    path = job_file(
        cache, files, teacher={"engine_args": {"delay_s": 3.0}}, run={"executor": "ray", "shard_bytes": 1000}
    )
    return Job(path, cache, {f"{i}-doc{k}" for i in range(3) for k in range(40)})


@pytest.mark.slow
@pytest.mark.timeout(290)
def test_submit_interrupt_stop_budget_and_resume(cluster, job):
    client = subprocess.Popen(
        [RAY, "job", "submit", "--address", cluster.address, *cluster.submit_arguments("one", job.path)],
        env=cluster.env, cwd=cluster.cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    store = Store.open(job.cache)
    wait_for(lambda: store.list("commits/"), 90, "the first commit")

    # Ctrl-C on the submitting side
    os.killpg(client.pid, signal.SIGINT)
    client.wait(timeout=30)
    count = len(store.list("commits/"))
    assert cluster.status("one") == "RUNNING"
    wait_for(lambda: len(store.list("commits/")) > count, 60, "work after Ctrl-C")

    # `ray job stop` gives the shards back
    stopped = cluster.job("stop", "one")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert "STOPPED" in cluster.status("one") or "was stopped" in cluster.status("one")
    assert not store.list("leases/")
    half = len(store.list("commits/"))

    # a budget: 10.8 s of a teacher (without GPUs each counts as one), its start included
    poor = cluster.job("submit", *cluster.submit_arguments("poor", job.path, "run.budget_gpu_hours=0.003"))
    said = poor.stdout + poor.stderr
    assert poor.returncode != 0, said
    assert "exit code 1" in said
    assert "the budget of 0.003 GPU-hours is spent" in said
    committed = {o.path for o in store.list("commits/")}
    assert half < len(committed), "what was in progress when the budget was spent was not finished"
    assert not [o for kind in ("manifests/", "quarantine/", "leases/") for o in store.list(kind)]

    rich = cluster.job(
        "submit",
        *cluster.submit_arguments("rich", job.path, "run.budget_gpu_hours=1", "teacher.engine_args.delay_s=0"),
    )
    assert rich.returncode == 0, rich.stdout[-3000:] + rich.stderr[-1000:]
    assert f"{len(committed)} found committed" in rich.stdout
    assert committed < {o.path for o in store.list("commits/")}
    check_complete(job.cache, job.ids)
