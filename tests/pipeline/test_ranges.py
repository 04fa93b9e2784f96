"""How files are cut into shards."""

from __future__ import annotations

import collections
import gzip
import json
from pathlib import Path

import pytest
import zstandard

import teachercache
from pipeline.config import load_job
from pipeline.corpus.encode import Encoder
from pipeline.corpus.readers import OPEN_END
from pipeline.planning import ranges
from pipeline.planning.plan import make_plan
from pipeline.running.job import run_job
from tests.pipeline.conftest import documents

DOCUMENTS = [{"id": f"d{i}", "text": f"é{i} " * (i % 40 + 1)} for i in range(600)]


def compressed(folder: Path, kind: str) -> Path:
    """One file of several gzip members or zstd frames."""
    lines = [json.dumps(d).encode() + b"\n" for d in DOCUMENTS]
    parts = [b"".join(lines[i : i + 200]) for i in range(0, len(lines), 200)]
    pack = gzip.compress if kind == "gz" else zstandard.ZstdCompressor().compress
    path = folder / f"a.jsonl.{kind}"
    path.write_bytes(b"".join(map(pack, parts)))
    return path


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_large_compressed_files_are_cut_and_give_each_document_once(job_file, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(ranges, "CUT_COMPRESSED_ABOVE", 0)
    path = job_file(tmp_path / "cache", [compressed(tmp_path, kind)], run={"shard_bytes": 4000})
    job = load_job(path)
    shards = make_plan(job, Encoder(job, job.teacher.model), "0" * 64).plan.shards
    assert len(shards) > 5
    assert [s.start for s in shards[1:]] == [s.stop for s in shards[:-1]]
    assert shards[-1].stop == OPEN_END
    assert all(0 < s.estimated_tokens < 20_000 for s in shards)
    run_job(job)
    counts = collections.Counter(r.doc_id for r in teachercache.open(str(tmp_path / "cache")).records())
    assert counts == collections.Counter(d["id"] for d in DOCUMENTS)


def test_a_cut_has_few_enough_ranges_to_be_worth_decompressing_up_to_each(job_file, tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "CUT_COMPRESSED_ABOVE", 0)
    job = load_job(job_file(tmp_path / "cache", [compressed(tmp_path, "gz")], run={"shard_bytes": 1}))
    assert len(make_plan(job, Encoder(job, job.teacher.model), "0" * 64).plan.shards) <= 65


def test_an_unusable_beginning_does_not_make_one_shard_of_a_large_file(job_file, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("not json\n" * 20_000 + "".join(json.dumps(d) + "\n" for d in documents(2000)))
    job = load_job(
        job_file(tmp_path / "cache", [path], run={"shard_bytes": None, "shard_tokens": 10_000, "max_drop_share": 1})
    )
    planned = make_plan(job, Encoder(job, job.teacher.model), "0" * 64)
    assert len(planned.plan.shards) > 5
    assert "nothing of the sample can be used" in planned.warnings[0]
