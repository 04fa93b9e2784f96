"""Inputs on an object store: every form is read; outages are waited out, refused access ends the job."""

from __future__ import annotations

import collections
import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import teachercache
from pipeline.config import load_job
from pipeline.corpus.encode import Encoder
from pipeline.planning import ranges
from pipeline.planning.plan import make_plan
from pipeline.running.job import run_job
from teachercache.errors import UsageError
from tests.pipeline.conftest import documents


def put(url: str, data: bytes) -> str:
    import s3fs

    s3fs.S3FileSystem().pipe(url, data)
    return url


@pytest.mark.parametrize("split", [False, True])
def test_every_form_of_input_is_read_from_a_store(job_file, tmp_path, s3_url, monkeypatch, split):
    """Plain, gz and zst lines, text and Parquet with list columns; whole and cut."""
    if split:
        monkeypatch.setattr(ranges, "CUT_COMPRESSED_ABOVE", 0)
    docs = documents(120)
    plain = ["".join(json.dumps(d) + "\n" for d in docs[i : i + 20]).encode() for i in range(0, 60, 20)]
    table = pa.table({"id": [d["id"] for d in docs[60:]], "ids": [list(d["text"].encode()) for d in docs[60:]]})
    sink = io.BytesIO()
    pq.write_table(table.cast(pa.schema({"id": pa.string(), "ids": pa.list_(pa.int32())})), sink, row_group_size=25)
    lines = [
        put(f"{s3_url}/in/a.jsonl", b"\xef\xbb\xbf" + plain[0]),  # as Windows writes it
        put(f"{s3_url}/in/b.jsonl.gz", gzip.compress(plain[1])),
        put(f"{s3_url}/in/c.jsonl.zst", zstandard.ZstdCompressor().compress(plain[2])),
    ]
    rows = put(f"{s3_url}/in/d.parquet", sink.getvalue())
    text = put(f"{s3_url}/in/e.txt", b"a whole file")
    fields = {"text": "text", "id": "id"}
    job = job_file(tmp_path / "cache", [], run={"shard_bytes": 600 if split else 10**6})
    config = load_job(job, ["corpora=" + json.dumps([
        {"source": "lines", "files": lines, "fields": fields},
        {"source": "rows", "files": [rows], "fields": {"input_ids": "ids", "id": "id"}},
        {"source": "text", "files": [text]},
    ])])  # fmt: skip
    result = run_job(config)
    assert (len(make_plan(config, Encoder(config, config.teacher.model), "0" * 64).plan.shards) > 5) == split
    assert not result.manifest.drops
    found = collections.Counter(r.source for r in teachercache.open(str(tmp_path / "cache")).records())
    assert found == {"lines": 60, "rows": 60, "text": 1}


def test_an_outage_of_the_inputs_store_is_waited_out_and_refused_access_ends_the_job(
    job_file, tmp_path, s3_url, monkeypatch
):
    import s3fs

    url = put(f"{s3_url}/in/a.jsonl", b"".join(json.dumps(d).encode() + b"\n" for d in documents(20)))
    job = load_job(job_file(tmp_path / "cache", [url], run={"max_retries": 0}))
    fetch, errors = s3fs.core.S3File._fetch_range, []

    def failing(self, start, end):
        if errors:
            raise errors.pop()
        return fetch(self, start, end)

    monkeypatch.setattr(s3fs.core.S3File, "_fetch_range", failing)
    # after planning, which reads a sample
    busy = run_job(job, on_planned=lambda prepared: errors.append(OSError(5, "SlowDown")))
    assert not errors
    assert busy.outcome.tally.retries <= 1  # the first document, which is scored before any shard, waits by itself
    assert busy.outcome.tally.committed == 2
    assert busy.manifest is not None
    other = job.model_copy(update={"cache": str(tmp_path / "other")})
    with pytest.raises(UsageError, match="check credentials"):
        run_job(other, on_planned=lambda prepared: errors.append(PermissionError("ExpiredToken")))
