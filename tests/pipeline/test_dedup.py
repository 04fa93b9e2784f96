"""Corpus-wide de-duplication keeps the first copy, and reads a file once."""

from __future__ import annotations

import collections
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import teachercache
from pipeline.config import load_job
from pipeline.planning import dedup, ranges
from pipeline.running.job import run_job
from tests.pipeline.conftest import documents, pipeline, verify, write_jsonl


@pytest.mark.parametrize("kind", ["gz", "parquet"])
def test_corpus_wide_deduplication_reads_a_cut_file_once(job_file, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(ranges, "CUT_COMPRESSED_ABOVE", 0)
    docs = [{"id": f"d{i}", "text": f"text {i % 150} " * 5} for i in range(200)]
    path = tmp_path / f"a.{'jsonl.gz' if kind == 'gz' else kind}"
    if kind == "gz":
        path.write_bytes(gzip.compress("".join(json.dumps(d) + "\n" for d in docs).encode()))
    else:
        pq.write_table(pa.Table.from_pylist(docs), path, row_group_size=30)
    opened: list[tuple[int, int]] = []
    read = dedup.read_documents
    monkeypatch.setattr(dedup, "read_documents", lambda *a: opened.append(a[2:4]) or read(*a))
    recipe = {"filters": {"dedup": "corpus"}}
    result = run_job(load_job(job_file(tmp_path / "cache", [path], recipe=recipe, run={"shard_bytes": 1000})))
    assert len(opened) == 1
    assert result.outcome.tally.committed > 3
    assert result.manifest.drops == {"duplicate": 50}
    found = {r.doc_id for r in teachercache.open(str(tmp_path / "cache")).records()}
    assert found == {f"d{i}" for i in range(150)}


@pytest.mark.slow
def test_corpus_dedup_keeps_the_first_copy_and_never_one_that_is_cached_elsewhere(job_file, tmp_path):
    docs = documents(40)
    write_jsonl(tmp_path / "in" / "m.jsonl", [*docs, docs[3] | {"id": "copy-inside"}])
    recipe = {"filters": {"dedup": "corpus"}}
    job = job_file(tmp_path / "cache", [tmp_path / "in" / "*.jsonl"], recipe=recipe, run={"shard_bytes": 1000})
    assert pipeline("run", job).returncode == 0
    # a file that sorts before the cached one, with copies and one new document
    write_jsonl(
        tmp_path / "in" / "a.jsonl",
        [docs[5] | {"id": "late"}, docs[6] | {"id": "late2"}, {"id": "new", "text": "fresh"}],
    )
    result = pipeline("run", job)
    assert result.returncode == 0, result.stdout + result.stderr
    ids = collections.Counter(r.doc_id for r in teachercache.open(str(tmp_path / "cache")).records())
    assert set(ids) == {d["id"] for d in docs} | {"new"}
    assert verify(tmp_path / "cache").returncode == 0
    status = json.loads(pipeline("status", job, "--json").stdout)
    assert status["drops"] == {"duplicate": 3}
