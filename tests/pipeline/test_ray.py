"""The same job on a real local Ray: actors die, the job does not."""

from __future__ import annotations

import json
import signal
import subprocess

import psutil
import pytest

from tests.pipeline.conftest import check_complete, command, documents, environment, pipeline, poison_id, write_jsonl
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(240)


def teacher_processes(driver: int) -> list[psutil.Process]:
    """Actor processes that this driver's Ray started."""
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::TeacherActor"):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.slow
def test_sigkill_of_a_teacher_actor_while_it_works(job_file, tmp_path):
    files = [
        write_jsonl(tmp_path / f"{i}.jsonl", [d | {"id": f"{i}-{d['id']}"} for d in documents(40)]) for i in range(3)
    ]
    job = job_file(
        tmp_path / "cache", files, teacher={"engine_args": {"delay_s": 0.3}}, run={"executor": "ray", "actors": 2}
    )
    process = subprocess.Popen(
        command("run", job, "--json"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    commits = tmp_path / "cache" / "commits"
    wait_for(lambda: list(commits.glob("*.json")), what="the first commit")
    victims = teacher_processes(process.pid)
    assert victims
    victims[0].send_signal(signal.SIGKILL)
    said, _ = process.communicate(timeout=150)
    report = json.loads(said.splitlines()[-1])
    assert process.returncode == 0, said
    assert report["complete"]
    check_complete(tmp_path / "cache", {f"{i}-doc{k}" for i in range(3) for k in range(40)})


@pytest.mark.slow
def test_document_that_kills_the_whole_process_costs_only_itself(job_file, tmp_path):
    docs = documents(30)
    docs[11]["text"] = "a poisonous \x7f document"
    path = write_jsonl(tmp_path / "a.jsonl", docs)
    faults = {"poison": poison_id(tmp_path), "poison_kills": True}
    job = job_file(
        tmp_path / "cache", [path], teacher={"engine_args": faults}, run={"executor": "ray", "shard_bytes": 10**6}
    )
    result = pipeline("run", job, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    check_complete(tmp_path / "cache", {f"doc{k}" for k in range(30) if k != 11})
    assert json.loads(pipeline("status", job, "--json").stdout)["drops"] == {"kills_engine": 1}
