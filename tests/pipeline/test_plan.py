"""Plans are deterministic, cheap, and depend on inputs and recipe alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import load_job
from pipeline.corpus.encode import Encoder
from pipeline.planning.plan import make_plan
from pipeline.running.job import prepare
from teachercache.errors import UsageError
from tests.pipeline.conftest import ROOT, command, documents, environment, write_jsonl

# A child begins with the memory of whoever forks it as its peak, and pytest may be large: so a small parent forks the planner.
MEASURED = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def plan_of(path, *overrides: str):
    job = load_job(path, list(overrides))
    return make_plan(job, Encoder(job, job.teacher.model), "0" * 64).plan


def test_adding_a_file_adds_shards_and_changes_none(job_file, tmp_path):
    write_jsonl(tmp_path / "in" / "b.jsonl", documents(50))
    job = job_file(tmp_path / "cache", [tmp_path / "in" / "*.jsonl"])
    before = {s.shard_id for s in plan_of(job).shards}
    write_jsonl(tmp_path / "in" / "a.jsonl", [d | {"id": "x" + d["id"]} for d in documents(30)])
    after = {s.shard_id for s in plan_of(job).shards}
    assert len(before) > 2
    assert before < after


def test_actors_and_machines_change_nothing(job_file, tmp_path):
    job = job_file(tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", documents(50))])
    plans = [plan_of(job, o) for o in ("run.actors=1", "run.actors=64", "run.executor=ray", "teacher.threads=3")]
    assert len({p.digest for p in plans}) == 1


def test_equal_files_are_cached_once(job_file, tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", documents(10))
    b = write_jsonl(tmp_path / "b.jsonl", documents(10))
    job = load_job(job_file(tmp_path / "cache", [a, b]))
    planned = make_plan(job, Encoder(job, job.teacher.model), "0" * 64)
    assert {s.input for s in planned.plan.shards} == {str(a)}
    assert "same content" in planned.warnings[0]


def test_keys_without_effect_and_columns_that_no_document_has_are_warnings(job_file, tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", documents(10))
    job = load_job(
        job_file(tmp_path / "cache", [a], corpus={"meta": ["text", "licence"]}, recipe={"generate": {"top_k": 3}})
    )
    assert prepare(job).planned.warnings == [
        "recipe.generate.top_k has no effect: recipe.mode is score",
        "source 's': no document of a sample has the column licence; found: id, text",
    ]
    said = subprocess.run(
        command("run", tmp_path / "job.yaml"), capture_output=True, text=True, cwd=ROOT, env=environment(), check=True
    )
    assert "warning: recipe.generate.top_k has no effect" in said.stdout + said.stderr


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_million_short_documents_are_planned_from_a_sample_within_a_gibibyte(job_file, tmp_path, kind):
    path = tmp_path / f"million.{kind}"
    if kind == "jsonl":
        with path.open("w") as file:
            for i in range(1_000_000):
                file.write(f'{{"id": "{i}", "text": "short document number {i} of a million"}}\n')
    else:
        ids = [str(i) for i in range(1_000_000)]
        pq.write_table(pa.table({"id": ids, "text": [f"short document number {i} of a million" for i in ids]}), path)
    job = job_file(tmp_path / "cache", [path], run={"shard_bytes": 1_000_000})
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *command("plan", job, "--json")],
        capture_output=True, text=True, cwd=ROOT, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    peak = int(done.stderr.split()[-1]) / 2**20
    print(f"{kind}: children's peak {peak:.2f} GiB, {report['shards']} shards")
    assert peak < 1
    assert "estimated_tokens" in report["sources"][0]
    assert 0.9e6 <= report["sources"][0]["estimated_documents"] <= 1.1e6
    assert not (tmp_path / "cache").exists()


def test_a_relative_cache_in_rays_copy_of_a_folder_is_refused(job_file, tmp_path, monkeypatch):
    """`ray job submit --working-dir .` runs in such a copy: the cache would go with it."""
    job = load_job(
        job_file(tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", documents(3))]), ["cache=build/cache"]
    )
    copy = tmp_path / "_ray_pkg_0123456789abcdef"
    copy.mkdir()
    monkeypatch.chdir(copy)
    with pytest.raises(UsageError, match="found the relative path build/cache"):
        prepare(job)
