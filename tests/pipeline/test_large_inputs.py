"""Inputs as large corpora have them: compressed files cut into ranges, wide Parquet, object stores; and what is read."""

from __future__ import annotations

import collections
import gzip
import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import pipeline.corpus.readers as readers
import pipeline.planning.dedup
import pipeline.planning.ranges
import teachercache
from pipeline.config import CorpusConfig, load_job, parse_job
from pipeline.corpus.encode import Encoder
from pipeline.corpus.inputs import fingerprint
from pipeline.corpus.readers import OPEN_END, read_documents
from pipeline.planning.plan import make_plan
from pipeline.planning.sample import shape_of, take_sample
from pipeline.running.job import run_job
from teachercache.errors import UsageError
from tests.pipeline.conftest import documents, write_jsonl

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
    monkeypatch.setattr(pipeline.planning.ranges, "CUT_COMPRESSED_ABOVE", 0)
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


@pytest.mark.parametrize("kind", ["gz", "parquet"])
def test_corpus_wide_deduplication_reads_a_cut_file_once(job_file, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(pipeline.planning.ranges, "CUT_COMPRESSED_ABOVE", 0)
    docs = [{"id": f"d{i}", "text": f"text {i % 150} " * 5} for i in range(200)]
    path = tmp_path / f"a.{'jsonl.gz' if kind == 'gz' else kind}"
    if kind == "gz":
        path.write_bytes(gzip.compress("".join(json.dumps(d) + "\n" for d in docs).encode()))
    else:
        pq.write_table(pa.Table.from_pylist(docs), path, row_group_size=30)
    opened: list[tuple[int, int]] = []
    read = pipeline.planning.dedup.read_documents
    monkeypatch.setattr(pipeline.planning.dedup, "read_documents", lambda *a: opened.append(a[2:4]) or read(*a))
    recipe = {"filters": {"dedup": "corpus"}}
    result = run_job(load_job(job_file(tmp_path / "cache", [path], recipe=recipe, run={"shard_bytes": 1000})))
    assert len(opened) == 1
    assert result.outcome.tally.committed > 3
    assert result.manifest.drops == {"duplicate": 50}
    found = {r.doc_id for r in teachercache.open(str(tmp_path / "cache")).records()}
    assert found == {f"d{i}" for i in range(150)}


def test_a_cut_has_few_enough_ranges_to_be_worth_decompressing_up_to_each(job_file, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline.planning.ranges, "CUT_COMPRESSED_ABOVE", 0)
    job = load_job(job_file(tmp_path / "cache", [compressed(tmp_path, "gz")], run={"shard_bytes": 1}))
    assert len(make_plan(job, Encoder(job, job.teacher.model), "0" * 64).plan.shards) <= 65


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
    monkeypatch.setattr(readers, "open_binary", lambda url, read_ahead=0: Counted(url))
    monkeypatch.setattr(readers, "PARQUET_BUFFER", 1 << 16)
    corpus = CorpusConfig(files=[str(path)], fields={"input_ids": "ids"})
    Counted.read_bytes = 0
    found = list(read_documents(str(path), corpus, 100, 400, "rows"))
    assert [d.ordinal for d in found] == list(range(100, 400))
    np.testing.assert_array_equal(found[0].value["ids"], ids[100].as_py())
    assert Counted.read_bytes < 600_000, f"{path.stat().st_size} bytes in all"


def test_documents_longer_than_the_sample_are_counted_over_their_whole_length(tmp_path, tokenizer_folder):
    """A sample is 32 KiB; lines of 600 KB must not make a token a byte look like twenty."""
    job = parse_job(
        {
            "cache": "c",
            "teacher": {"model": str(tokenizer_folder), "engine": "noop", "max_model_len": 512},
            "corpora": [{"files": ["x"], "fields": {"input_ids": "ids"}}],
        }
    )
    path = write_jsonl(tmp_path / "a.jsonl", [{"ids": [7] * 200_000}] * 3)
    file = fingerprint(str(path))
    found = take_sample(file, shape_of(file, job.corpora[0]), job.corpora[0], job, Encoder(job, tokenizer_folder))
    assert found.units == path.stat().st_size // 3
    assert found.tokens / found.units < 1.0


def test_an_unusable_beginning_does_not_make_one_shard_of_a_large_file(job_file, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("not json\n" * 20_000 + "".join(json.dumps(d) + "\n" for d in documents(2000)))
    job = load_job(job_file(tmp_path / "cache", [path], run={"shard_bytes": None, "shard_tokens": 10_000}))
    planned = make_plan(job, Encoder(job, job.teacher.model), "0" * 64)
    assert len(planned.plan.shards) > 5
    assert "nothing of the sample can be used" in planned.warnings[0]


def put(url: str, data: bytes) -> str:
    import s3fs

    s3fs.S3FileSystem().pipe(url, data)
    return url


@pytest.mark.parametrize("split", [False, True])
def test_every_form_of_input_is_read_from_a_store(job_file, tmp_path, s3_url, monkeypatch, split):
    """Plain, gz and zst lines, text and Parquet with list columns; whole and cut."""
    if split:
        monkeypatch.setattr(pipeline.planning.ranges, "CUT_COMPRESSED_ABOVE", 0)
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
    assert busy.outcome.tally.retries == 1
    assert busy.manifest is not None
    other = job.model_copy(update={"cache": str(tmp_path / "other")})
    with pytest.raises(UsageError, match="check credentials"):
        run_job(other, on_planned=lambda prepared: errors.append(PermissionError("ExpiredToken")))
