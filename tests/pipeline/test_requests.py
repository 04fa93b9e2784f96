"""Budgets of requests for a cache of 100 shards; `benchmarks/requests_scale.py` takes those of 1,000."""

from __future__ import annotations

import pytest

from pipeline.config import load_job
from tests.pipeline.conftest import documents, write_jsonl
from tests.pipeline.requests_of import measured


@pytest.mark.slow
def test_requests_grow_with_what_is_new_alone(job_file, tmp_path, s3_server, monkeypatch):
    server = s3_server("moto")
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)

    def corpus(first, count):
        docs = documents(first + count)[first:]
        return write_jsonl(tmp_path / f"corpus-{first}.jsonl", docs)

    def load(cache, files):
        run = {"executor": "inline", "shard_bytes": 150}
        return load_job(job_file(cache, files, run=run))

    counts = measured(
        load, corpus, tmp_path, server, 100, lambda endpoint: monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    )
    print(counts)
    assert counts["shards"] >= 90
    budgets = {
        "open": 8, "status": 15, "run, complete": 60, "gc, dry": 30, "run, 10 shards more": 250,
        "verify, a sample of 10": 100,
        "status, nothing published": 15 + counts["commits"],
    }  # fmt: skip
    assert {name: count for name, count in counts.items() if count > budgets.get(name, count)} == {}
