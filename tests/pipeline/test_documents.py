"""Splits and samples are by content."""

from __future__ import annotations

import pytest

import teachercache
from tests.pipeline.conftest import documents, pipeline, write_jsonl


@pytest.mark.slow
def test_splits_are_by_the_text_and_stay_apart(job_file, tmp_path):
    import teachercache

    docs = documents(200, 40)
    path = write_jsonl(tmp_path / "a.jsonl", docs)
    job = job_file(tmp_path / "cache", [path], corpus={"splits": {"train": 0.8, "heldout": 0.2}})
    assert pipeline("run", job).returncode == 0
    cache = teachercache.open(str(tmp_path / "cache"))
    parts = {s: {r.doc_id for r in cache.records(split=s)} for s in ("train", "heldout")}
    assert not parts["train"] & parts["heldout"]
    assert len(parts["train"] | parts["heldout"]) == 200
    assert 20 <= len(parts["heldout"]) <= 60


@pytest.mark.slow
def test_sampling_takes_the_same_documents_each_time(job_file, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(200, 40))
    seen = []
    for name in ("one", "two"):
        job = job_file(tmp_path / name, [path], corpus={"sample": 0.3})
        assert pipeline("run", job).returncode == 0
        seen.append(sorted(r.doc_id for r in teachercache.open(str(tmp_path / name)).records()))
    assert seen[0] == seen[1]
    assert 30 <= len(seen[0]) <= 90
