"""Ids that repeat: named by plan, left out before rows are computed, and one command publishes a cache that has them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import teachercache
from pipeline.config import load_job
from pipeline.planning import plan as planning
from pipeline.running.job import prepare, run_job
from teachercache.errors import DuplicateDocument, UsageError
from tests.pipeline.conftest import ROOT, documents, environment, verify, write_jsonl


def repeating() -> list[dict]:
    """200 documents, of which the last three have the ids of the first three, with other texts."""
    docs = documents(200)
    return docs[:197] + [{"id": f"doc{i}", "text": f"another text {i}"} for i in range(3)]


@pytest.mark.parametrize("cut", [10**7, 3000])
def test_one_shard_and_many_end_alike_and_the_first_copy_is_kept(job_file, tmp_path, cut):
    path = write_jsonl(tmp_path / "a.jsonl", repeating())
    job = load_job(job_file(tmp_path / "cache", [path], run={"shard_bytes": cut}))
    assert any("3 of 200 documents have an id that an earlier one has" in w for w in prepare(job).planned.warnings)
    result = run_job(job)
    assert (len(prepare(job).planned.plan.shards) > 1) == (cut < 10**6)
    assert result.manifest.drops == {"duplicate_id": 3}
    assert result.manifest.documents == 197
    kept = {r.doc_id: len(r.input_ids) for r in teachercache.open(str(tmp_path / "cache")).records()}
    assert kept["doc0"] == len(repeating()[0]["text"]) + 1
    again = run_job(job)
    assert (again.published, again.manifest.number) == (False, 1)
    assert prepare(job).planned.plan.digest in again.manifest.plans


def test_a_large_corpus_is_likely_to_repeat_and_the_run_is_exact(job_file, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "EXACT_BYTES", 0)
    others = [d | {"id": f"other {d['id']}"} for d in documents(12)]
    files = [write_jsonl(tmp_path / "a.jsonl", documents(12)), write_jsonl(tmp_path / "b.jsonl", documents(2) + others)]
    job = load_job(job_file(tmp_path / "cache", files))
    assert any(w.startswith("likely: ") and "id_scope=file" in w for w in prepare(job).planned.warnings)
    assert run_job(job).manifest.drops == {"duplicate_id": 2}


def test_files_that_all_count_from_0_are_refused_and_scoped_by_their_names(job_file, tmp_path):
    files = [
        write_jsonl(tmp_path / f"part-{i}.jsonl", [{"id": n, "text": f"text {n} of {i}"} for n in range(40)])
        for i in range(2)
    ]
    with pytest.raises(UsageError, match=r"40 of 80 documents have an id .*id_scope=file"):
        prepare(load_job(job_file(tmp_path / "cache", files)))
    job = load_job(job_file(tmp_path / "cache", files, corpus={"id_scope": "file"}))
    assert not prepare(job).planned.warnings
    assert run_job(job).manifest.documents == 80
    ids = {r.doc_id for r in teachercache.open(str(tmp_path / "cache")).records()}
    assert {"part-0/0", "part-1/39"} <= ids


def test_a_number_and_its_digits_as_text_are_one_id_and_the_plan_says_so(job_file, tmp_path):
    docs = [{"id": 1, "text": "a number"}, {"id": "1", "text": "its digits"}, {"id": 2, "text": "another"}]
    job = load_job(job_file(tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", docs)]))
    assert any(
        "1 of 3" in w and "a number and the same digits as text are one id" in w for w in prepare(job).planned.warnings
    )
    assert run_job(job).manifest.drops == {"duplicate_id": 1}


def without_repeats(url: str | Path) -> subprocess.CompletedProcess[str]:
    code = "from teachercache.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "optimize", str(url), "--without-repeats"],
        capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment(), check=False,
    )  # fmt: skip


def test_one_command_publishes_a_cache_that_has_repeats_without_a_teacher(job_file, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", repeating())
    run = {"shard_bytes": 3000, "check_ids": False}
    job = load_job(job_file(tmp_path / "cache", [path], run=run))
    with pytest.raises(DuplicateDocument, match=r"3 records are committed twice.*--without-repeats"):
        run_job(job)
    done = without_repeats(tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert "3 copies of documents left out, 197 documents" in done.stdout
    manifest = teachercache.open(str(tmp_path / "cache")).manifest
    assert (manifest.complete, manifest.documents, manifest.drops) == (True, 197, {"duplicate_id": 3})
    assert verify(tmp_path / "cache").returncode == 0
    assert "0 copies" in without_repeats(tmp_path / "cache").stdout
    assert run_job(job).manifest.number == manifest.number
