"""Rows that another plan of the cache has committed are copied, not computed again; nothing is taken on trust."""

from __future__ import annotations

import numpy as np
import pytest

import pipeline.running.shard_run as shard_run
import teachercache
import teachercache.write.reuse
from pipeline.config import load_job
from pipeline.running.job import run_job
from pipeline.watching.status import read_status
from tests.pipeline.conftest import documents, write_jsonl


@pytest.fixture
def two_corpora(job_file, tmp_path):
    """A cache of ten documents, and a job for a second file that repeats five of them under other names."""
    cache = tmp_path / "cache"
    first = write_jsonl(tmp_path / "a.jsonl", documents(10))
    run_job(load_job(job_file(cache, [first])))
    renamed = [dict(d, id=f"again-{d['id']}") for d in documents(15)[5:]]
    second = write_jsonl(tmp_path / "b.jsonl", renamed)
    return str(cache), load_job(job_file(cache, [second], corpus={"source": "second"}))


def test_rows_of_committed_documents_are_copied_and_counted(two_corpora):
    cache, job = two_corpora
    outcome = run_job(job).outcome
    records = {(r.source, r.doc_id): r for r in teachercache.open(cache).records()}
    assert len(records) == 20
    copied_rows = 0
    for i in range(5, 10):
        ours, theirs = records["second", f"again-doc{i}"], records["s", f"doc{i}"]
        np.testing.assert_array_equal(ours.topk_ids, theirs.topk_ids)
        np.testing.assert_array_equal(ours.topk_logprobs, theirs.topk_logprobs)
        assert ours.content_key == theirs.content_key
        copied_rows += len(ours.row_pos)
    assert outcome.tally.reused_rows == copied_rows
    status = read_status(cache)
    assert status["reused_rows"] == copied_rows
    assert status["rows"] > copied_rows


def test_only_unknown_documents_reach_the_teacher(two_corpora, monkeypatch):
    _, job = two_corpora
    seen: list[str] = []
    original = shard_run.record_of
    monkeypatch.setattr(
        shard_run, "record_of", lambda window, scored: seen.append(window.doc_id) or original(window, scored)
    )
    run_job(job)
    assert sorted(seen) == sorted(f"again-doc{i}" for i in range(10, 15))


def test_off_computes_everything(two_corpora):
    cache, job = two_corpora
    job = job.model_copy(update={"run": job.run.model_copy(update={"reuse": "off"})})
    assert run_job(job).outcome.tally.reused_rows == 0
    assert read_status(cache)["reused_rows"] == 0


def test_a_file_collected_meanwhile_costs_computing_not_the_document(two_corpora, monkeypatch):
    cache, job = two_corpora
    monkeypatch.setattr(teachercache.write.reuse.ReuseIndex, "get", lambda self, key: None)
    outcome = run_job(job).outcome
    assert outcome.tally.reused_rows == 0
    assert sum(1 for _ in teachercache.open(cache).records(source="second")) == 10


def test_a_plan_does_not_read_its_own_commits_back(job_file, tmp_path, monkeypatch):
    cache, files = tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", documents(10))]
    run_job(load_job(job_file(cache, files)))

    def never(self):
        raise AssertionError("the index was built although no other plan committed anything")

    monkeypatch.setattr(teachercache.CacheWriter, "reuse_index", never)
    assert run_job(load_job(job_file(cache, files))).outcome.tally.found > 0
