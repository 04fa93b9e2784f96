"""`ray job submit` from another folder, with credentials in the runtime environment; Ctrl-C, `ray job stop`, again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pipeline.conftest import ROOT, documents, environment, write_jsonl
from tests.pipeline.test_failures import check_complete
from tests.servers import serve

sys.path.insert(0, str(ROOT / "scripts"))
from demo_services import ray_head

RAY = str(Path(sys.executable).with_name("ray"))


class Cluster:
    """The `ray` command against one head."""

    def __init__(self, address: str, env: dict[str, str], cwd: Path) -> None:
        self.address, self.env, self.cwd = address, env, cwd

    def job(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [RAY, "job", verb, "--address", self.address, *arguments]
        return subprocess.run(
            command, env=self.env, cwd=self.cwd, capture_output=True, text=True, timeout=200, check=False
        )

    def submit_arguments(self, name: str, job: Path, runtime_env: dict, *overrides: str) -> list[str]:
        return [
            "--submission-id", name, "--working-dir", str(ROOT), "--runtime-env-json", json.dumps(runtime_env),
            "--", "python", "-m", "pipeline", "run", str(job), *overrides,
        ]  # fmt: skip

    def status(self, name: str) -> str:
        """What Ray says of a job, from the line `Status for job 'name': STATUS`."""
        said = self.job("status", name)
        found = re.search(
            r"(SUCCEEDED|FAILED|STOPPED|RUNNING|PENDING)|job '\w+' (succeeded|failed|was stopped)", said.stdout
        )
        return found[0] if found else said.stdout + said.stderr


def wait_for(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds} s"
        time.sleep(0.2)


@pytest.mark.timeout(290)
def test_submit_interrupt_stop_and_resume(job_file, tmp_path, monkeypatch):
    with serve("moto", tmp_path / "s3") as server:
        bucket = server.new_bucket()
        files = [
            write_jsonl(tmp_path / f"{i}.jsonl", [d | {"id": f"{i}-{d['id']}"} for d in documents(40)])
            for i in range(3)
        ]
        job = job_file(
            f"{bucket}/cache",
            files,
            teacher={"engine_args": {"delay_s": 3.0}},
            run={"executor": "ray", "shard_bytes": 1000},
        )
        clean = {k: v for k, v in environment().items() if not k.startswith("AWS_") and k != "PYTHONPATH"}
        clean["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{clean['PATH']}"
        runtime_env = {"env_vars": server.env()}  # the only place where the credentials are
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        with ray_head(clean, tmp_path / "ray.log", num_cpus=2) as address:
            cluster = Cluster(address, clean, elsewhere)
            client = subprocess.Popen(
                [RAY, "job", "submit", "--address", address, *cluster.submit_arguments("one", job, runtime_env)],
                env=clean, cwd=elsewhere, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )  # fmt: skip
            for name, value in server.env().items():
                monkeypatch.setenv(name, value)
            from teachercache import Store

            store = Store.open(f"{bucket}/cache")
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

            again = cluster.job(
                "submit", *cluster.submit_arguments("two", job, runtime_env, "teacher.engine_args.delay_s=0")
            )
            assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-1000:]
            assert f"{half} found committed" in again.stdout
        check_complete(f"{bucket}/cache", {f"{i}-doc{k}" for i in range(3) for k in range(40)})
