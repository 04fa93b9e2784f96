"""Corpora in other places than the cache: web servers, a second endpoint, public buckets; and places that are away."""

from __future__ import annotations

import functools
import http.server
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs

import teachercache
from pipeline.config import StorageConfig, load_job
from pipeline.corpus.inputs import expand, fingerprint
from pipeline.running.job import run_job
from teachercache.errors import StoreUnavailable, UsageError
from tests.pipeline.conftest import documents, pipeline, write_jsonl
from tests.servers import free_port


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """A folder `web` served by Python's own server, which knows neither ranges nor ETags."""
    (tmp_path / "web").mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path / "web"))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("pattern", ["a.jsonl", "*.jsonl"])
def test_lines_of_a_web_server_are_planned_and_committed_in_cuts(job_file, tmp_path, web, pattern):
    write_jsonl(tmp_path / "web" / "a.jsonl", documents(40))
    job = load_job(job_file(tmp_path / "cache", [f"{web}/{pattern}"], run={"shard_bytes": 1500}))
    result = run_job(job)
    assert result.outcome.tally.committed > 2
    assert {r.doc_id for r in teachercache.open(str(tmp_path / "cache")).records()} == {f"doc{i}" for i in range(40)}


def test_parquet_of_a_server_without_ranges_and_missing_files_are_refused_in_one_sentence(job_file, tmp_path, web):
    (tmp_path / "web" / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match="gives no parts of a file"):
        run_job(load_job(job_file(tmp_path / "cache", [f"{web}/a.parquet"])))
    with pytest.raises(UsageError, match="found none"):
        run_job(load_job(job_file(tmp_path / "cache", [f"{web}/b.jsonl"])))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("pattern", ["http://{}/x.jsonl", "s3://bkt/x.jsonl", "s3://bkt/*.jsonl"])
def test_a_store_that_is_away_is_an_outage_with_its_endpoint(monkeypatch, pattern):
    at = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{at}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    with pytest.raises(StoreUnavailable, match=f"{at} does not answer"):
        expand([pattern.format(at)])


def test_an_outage_of_the_corpus_ends_the_command_with_one_line_and_status_1(job_file, tmp_path):
    at = f"http://127.0.0.1:{free_port()}"
    job = job_file(tmp_path / "cache", ["s3://bkt/x.jsonl"], corpus={"storage": {"endpoint": at, "anonymous": True}})
    result = pipeline("plan", job)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert at in line
    assert "TC-E109" in line


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert result.returncode == 2, result.stderr
    return line


def test_corpus_and_cache_at_two_endpoints(job_file, tmp_path, s3_server, s3_url, monkeypatch):
    """The environment is the cache's; without the key the message names the endpoint that was asked, and the key."""
    other = s3_server("localbucket")
    bucket = other.new_bucket()
    data = b"".join(json.dumps(d).encode() + b"\n" for d in documents(12))
    other.client().put_object(Bucket=bucket.removeprefix("s3://"), Key="in/a.jsonl", Body=data)
    plain = load_job(job_file(f"{s3_url}/cache", [f"{bucket}/in/a.jsonl"]))
    asked = s3_server("moto").endpoint
    with pytest.raises(UsageError, match=rf"no bucket .* at {asked}; .*corpora.N.storage"):
        run_job(plain)
    here = f"s3://{s3_url.removeprefix('s3://')}/in/a.jsonl"  # the bucket is there, the file is not
    with pytest.raises(UsageError, match=rf"found none at {asked}; .*corpora.N.storage"):
        expand([here])
    for pattern in ("in/a.jsonl", "in/*.jsonl"):
        parts = {"storage": {"endpoint": other.endpoint}}
        job = load_job(job_file(f"{s3_url}/cache", [f"{bucket}/{pattern}"], corpus=parts))
        assert run_job(job).manifest.documents == 12


def test_a_profile_reads_the_corpus_of_another_account(s3_server, s3_url, tmp_path, monkeypatch):
    other = s3_server("nanio")  # checks signatures
    bucket = other.new_bucket()
    other.client().put_object(Bucket=bucket.removeprefix("s3://"), Key="a.jsonl", Body=b"{}\n")
    env = other.env()
    (tmp_path / "config").write_text("[profile corpus]\nregion = us-east-1\n")
    (tmp_path / "credentials").write_text(
        f"[corpus]\naws_access_key_id = {env['AWS_ACCESS_KEY_ID']}\naws_secret_access_key = {env['AWS_SECRET_ACCESS_KEY']}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "cachekey")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "cachesecret")
    with pytest.raises(UsageError, match=r"refuses .*check credentials"):
        expand([f"{bucket}/*.jsonl"], StorageConfig(endpoint=other.endpoint))
    named = StorageConfig(endpoint=other.endpoint, profile="corpus")
    assert fingerprint(expand([f"{bucket}/*.jsonl"], named)[0], named).size == 3


def test_a_public_bucket_is_read_without_keys(s3_server, tmp_path, monkeypatch):
    server = s3_server("moto")
    bucket = server.new_bucket()
    name = bucket.removeprefix("s3://")
    server.client().put_object(Bucket=name, Key="a.jsonl", Body=b"{}\n", ACL="public-read")
    for name in server.env():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    s3fs.S3FileSystem.clear_instance_cache()  # one that still has the keys of the environment
    with pytest.raises(UsageError, match="anonymous=true"):
        expand([f"{bucket}/a.jsonl"], StorageConfig(endpoint=server.endpoint))
    public = StorageConfig(endpoint=server.endpoint, anonymous=True)
    assert expand([f"{bucket}/a.jsonl"], public) == [f"{bucket}/a.jsonl"]


SECRETS = {
    "s3://AKX:S3URLSECRET@corpus/x.jsonl": "S3URLSECRET",
    "http://user:PASSWORD@host/x.jsonl?X-Amz-Signature=SIG": "PASSWORD",
    "https://host/x.jsonl?X-Amz-Signature=SIGNED77": "SIGNED77",
    "s3:/AKX:SLASHSECRET@corpus/x.jsonl": "SLASHSECRET",
}


@pytest.mark.parametrize("url", SECRETS)
def test_secrets_in_a_url_of_the_corpus_are_refused_and_not_repeated(job_file, tmp_path, url):
    line = one_line(pipeline("plan", job_file(tmp_path / "cache", [url])))
    assert SECRETS[url] not in line
    assert "AKX" not in line


@pytest.mark.parametrize("place", ["cache", "corpus"])
def test_a_misspelt_scheme_is_refused_and_no_folder_is_made(job_file, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    good = write_jsonl(tmp_path / "a.jsonl", documents(3))
    cache, file = ("s3:/team/x", good) if place == "cache" else (tmp_path / "cache", "s3:/team/x.jsonl")
    before = sorted(tmp_path.iterdir())
    path = job_file(cache, [file])
    with pytest.raises(UsageError, match="did you mean s3://"):
        load_job(path)
    assert sorted(tmp_path.iterdir()) == sorted([*before, path])
