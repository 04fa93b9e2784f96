"""Ranges of every format give each document once, and read little more than they need."""

from __future__ import annotations

import gzip
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import teachercache
from pipeline.config import CorpusConfig, load_job, parse_job
from pipeline.corpus import readers
from pipeline.corpus.encode import Encoder
from pipeline.corpus.readers import read_documents
from pipeline.planning.plan import make_plan
from tests.pipeline.conftest import documents, pipeline, write_jsonl

DOCUMENTS = [{"id": f"d{i}", "text": f"é{i} " * (i % 40 + 1)} for i in range(600)]


def test_zstd_files_packed_with_a_long_window_are_read(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    plain = b"".join(json.dumps(d).encode() + b"\n" for d in DOCUMENTS)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(packer.compress(plain) + packer.flush())
    found = list(read_documents(str(path), CorpusConfig(files=[str(path)]), 0, 0, "file"))
    assert [d.value for d in found] == DOCUMENTS


def test_a_shard_and_a_plan_read_little_more_than_they_need_from_a_store(job_file, tmp_path, s3_url, monkeypatch):
    """s3fs reads 50 MiB ahead by default: six times a shard, a thousand times a sample."""
    import s3fs

    fetched: list[int] = []
    plain = s3fs.core.S3File._fetch_range

    def count(self, start, end):
        fetched.append(end - start)
        return plain(self, start, end)

    monkeypatch.setattr(s3fs.core.S3File, "_fetch_range", count)
    url = f"{s3_url}/in/a.jsonl"
    line = json.dumps({"id": "x", "text": "word " * 2000}).encode() + b"\n"
    s3fs.S3FileSystem().pipe(url, line * 3000)  # 30 MB
    job = load_job(job_file(tmp_path / "cache", [url], run={"shard_bytes": 2_000_000}))
    shards = make_plan(job, Encoder(job, job.teacher.model), "0" * 64).plan.shards
    assert sum(fetched) < 1_000_000
    fetched.clear()
    shard = shards[4]
    read = list(read_documents(url, job.corpora[0], shard.start, shard.stop, shard.unit))
    assert len(read) == pytest.approx(200, abs=2)
    assert sum(fetched) < 2_000_000 + 3 * readers.READ_AHEAD


class Counted(io.FileIO):
    read_bytes = 0

    def read(self, size=-1):
        data = super().read(size)
        Counted.read_bytes += len(data)
        return data


def test_rows_of_a_huge_row_group_are_streamed_without_the_other_columns(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    rows = 20_000
    ids = pa.array(rng.integers(0, 200, (rows, 64)).tolist(), pa.list_(pa.int32()))
    wide = pa.array([rng.bytes(2000) for _ in range(rows)])
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"wide": wide, "ids": ids}), path, row_group_size=rows, data_page_size=1 << 16)
    monkeypatch.setattr(readers, "open_binary", lambda url, *_: Counted(url))
    monkeypatch.setattr(readers, "PARQUET_BUFFER", 1 << 16)
    corpus = CorpusConfig(files=[str(path)], fields={"input_ids": "ids"})
    Counted.read_bytes = 0
    found = list(read_documents(str(path), corpus, 100, 400, "rows"))
    assert [d.ordinal for d in found] == list(range(100, 400))
    np.testing.assert_array_equal(found[0].value["ids"], ids[100].as_py())
    assert Counted.read_bytes < 600_000, f"{path.stat().st_size} bytes in all"


@pytest.mark.parametrize("size", [1, 7, 50, 333, 10**6])
def test_byte_ranges_give_each_line_once(tmp_path, size):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "é" * (i % 13), "id": str(i)} for i in range(40)])
    corpus = parse_job(
        {"cache": "c", "teacher": {"model": "m", "engine": "noop"}, "corpora": [{"files": [str(path)]}]}
    ).corpora[0]
    total = path.stat().st_size
    ids = [
        raw.value["id"]
        for start in range(0, total, size)
        for raw in read_documents(str(path), corpus, start, min(start + size, total), "bytes")
    ]
    assert ids == [str(i) for i in range(40)]


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet", "txt", "jsonl"])
def test_every_format_gives_the_same_documents(job_file, tmp_path, kind):

    docs = documents(12)
    path = tmp_path / f"docs.{kind}"
    plain = "".join(json.dumps(d) + "\n" for d in docs).encode()
    corpus: dict = {}
    if kind == "jsonl.gz":
        path.write_bytes(gzip.compress(plain[:400]) + gzip.compress(plain[400:]))  # two members
    elif kind == "jsonl.zst":
        import zstandard

        path.write_bytes(zstandard.compress(plain[:400]) + zstandard.compress(plain[400:]))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(docs), path, row_group_size=5)
    elif kind == "txt":
        path.write_text("\n".join(d["text"] for d in docs))
        corpus = {"fields": {}, "text_unit": "line"}
    else:
        path.write_bytes(plain)
    job = job_file(tmp_path / "cache", [path], corpus=corpus, run={"shard_bytes": 500})
    result = pipeline("run", job)
    assert result.returncode == 0, result.stdout + result.stderr
    records = list(teachercache.open(str(tmp_path / "cache")).records())
    job_config = load_job(job)
    encoder = Encoder(job_config, job_config.teacher.model)
    texts = sorted(encoder.backend.decode(r.input_ids[:-1].tolist()) for r in records)
    assert texts == sorted(d["text"] for d in docs)
