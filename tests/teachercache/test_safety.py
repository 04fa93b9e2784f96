"""A manifest is input from others: what reaches outside the cache or beyond the bounds is refused in one line."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import teachercache
from teachercache.errors import (
    CorruptFile,
    TeacherCacheError,
    UnsafeManifest,
    UnsupportedFormat,
)
from teachercache.format import layout
from teachercache.format.objects import Manifest
from teachercache.format.sealed import seal, unseal
from teachercache.format.spec import canonical_json
from teachercache.testing import synthetic_records, synthetic_spec

SPEC = synthetic_spec()


@pytest.fixture
def cache(tmp_path):
    writer = teachercache.create(tmp_path / "cache", SPEC)
    writer.commit("s", synthetic_records(SPEC, 5))
    writer.publish()
    return tmp_path / "cache"


def craft(cache, change) -> None:
    """A manifest with a valid seal and whatever `change` does to its JSON."""
    path = cache / layout.manifest_path(1)
    value = json.loads(path.read_bytes())
    value.pop("seal")
    change(value)
    write(path, canonical_json(value))


def write(path, body: bytes) -> None:
    path.write_bytes(body[:-1] + b',"seal":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n')


def set_path(path):
    return lambda value: value["files"][0].update(path=path)


@pytest.mark.parametrize(
    "change",
    [
        set_path("/etc/passwd"),
        set_path("../other/data/codec=open/split=train/source=default/s-" + "0" * 32 + ".parquet"),
        set_path("data/codec=open/split=../source=default/s-" + "0" * 32 + ".parquet"),
        set_path("data/codec=open/split=train/source=default/../../s-" + "0" * 32 + ".parquet"),
        set_path("s3://other-bucket/data/codec=open/split=train/source=default/s-" + "0" * 32 + ".parquet"),
        set_path("data/codec=open/split=train/source=default/s-" + "0" * 32 + ".parquet\n"),
        set_path("data/codec=open/split=train/source=default/t-" + "0" * 32 + ".parquet"),
        lambda value: value["files"][0].update(size=10 * 2**40),
        lambda value: value["files"][0].update(rows=10**15),
        lambda value: value["files"][0].update(size=-1),
        lambda value: value.update(number=7),
        lambda value: value.update(spec_digest="0" * 64),
        lambda value: value.update(rows=value["rows"] + 1),
        lambda value: value["files"][0].update(row_groups=2**40),
        lambda value: value.update(surprise={"__reduce__": "os.system"}),
    ],
    ids=[
        "absolute", "parent", "dots-in-name", "dots-in-path", "another-bucket", "newline", "another-shard", "10-TB", "10^15-rows",
        "negative", "renumbered", "another-spec", "wrong-sum", "row-groups", "unknown-key",
    ],
)  # fmt: skip
def test_a_crafted_manifest_is_refused_with_one_line(cache, change):
    craft(cache, change)
    with pytest.raises(TeacherCacheError) as caught:
        list(teachercache.open(cache).records())
    assert isinstance(caught.value, (UnsafeManifest, CorruptFile))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_million_entries_of_one_file_are_refused(cache):
    path = cache / layout.manifest_path(1)
    value = json.loads(path.read_bytes())
    value.pop("seal")
    one = canonical_json(value["files"][0])
    write(path, canonical_json(value).replace(one, b",".join([one] * 1_000_000)))
    with pytest.raises(UnsafeManifest, match=r"1,000,00\d entries, limit 524,288"):
        teachercache.open(cache)
    write(path, canonical_json(value).replace(one, b",".join([one] * 2)))
    with pytest.raises(UnsafeManifest, match="twice"):
        teachercache.open(cache)


def test_a_huge_manifest_is_refused_before_it_is_read(cache, monkeypatch):
    monkeypatch.setattr("teachercache.format.sealed.MAX_JSON_BYTES", 100)
    with pytest.raises(TeacherCacheError, match="above the limit"):
        teachercache.Store.open(cache).read(layout.manifest_path(1), max_bytes=100)


def test_deeply_nested_json_is_refused(cache):
    (cache / layout.manifest_path(1)).write_bytes(b"[" * 100_000)
    with pytest.raises(CorruptFile, match="does not end in a seal"):
        teachercache.open(cache)
    write(cache / layout.manifest_path(1), b'{"files":' + b"[" * 100_000 + b"}")
    with pytest.raises(CorruptFile, match="ecursion"):
        teachercache.open(cache)


def test_a_newer_format_is_refused_by_number(cache):
    craft(cache, lambda value: value.update(format_version=2))
    with pytest.raises(UnsupportedFormat, match="format version 2"):
        teachercache.open(cache)


def test_a_footer_that_claims_gigabytes_is_refused(cache, monkeypatch):
    monkeypatch.setattr("teachercache.parquet.datafile.MAX_GROUP_BYTES", 1000)
    with pytest.raises(UnsafeManifest, match="row group 0 claims"):
        list(teachercache.open(cache).records())


def test_a_decompression_bomb_is_refused(cache, monkeypatch):
    """A file with the right name and size whose column expands ten thousand times; its footer gives it away."""
    monkeypatch.setattr("teachercache.parquet.datafile.MAX_GROUP_BYTES", 2**27)
    manifest = unseal(Manifest, (cache / layout.manifest_path(1)).read_bytes(), "")
    entry = manifest.files[0]
    path = cache / entry.path
    named = {k: v for k, v in pq.read_metadata(path).metadata.items() if k.startswith(b"teacher")}
    table = pa.table({"doc_id": pa.array([b"\0" * 2**20] * 160)}).replace_schema_metadata(named)
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", use_dictionary=False, write_statistics=False)
    path.write_bytes(sink.getvalue())
    assert path.stat().st_size < 2**20
    changed = entry.model_copy(update={"size": path.stat().st_size, "records": 160, "row_groups": 1})
    craft(cache, lambda value: value.update(files=[changed.model_dump(mode="json")], records=160))
    with pytest.raises(UnsafeManifest, match="row group 0 claims"):
        list(teachercache.open(cache).records())


def test_garbage_in_place_of_parquet_is_a_clear_error(cache):
    manifest = unseal(Manifest, (cache / layout.manifest_path(1)).read_bytes(), "")
    path = cache / manifest.files[0].path
    path.write_bytes(os.urandom(path.stat().st_size))
    with pytest.raises(CorruptFile, match="not readable as Parquet"):
        list(teachercache.open(cache).records())


def test_a_sealed_document_survives_its_own_round_trip(cache):
    manifest = unseal(Manifest, (cache / layout.manifest_path(1)).read_bytes(), "")
    assert unseal(Manifest, seal(manifest), "") == manifest


def cli(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "teachercache.cli", *args]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=120)


def test_wrong_credentials_are_one_clear_line_without_the_secret(s3_server, tmp_path):
    server = s3_server("nanio")  # it checks signatures
    bucket = server.new_bucket()
    secret = "wrongsecretwrongsecretwrong"
    done = cli("show", f"{bucket}/cache", **server.env() | {"AWS_SECRET_ACCESS_KEY": secret})
    assert done.returncode == 2
    assert "refused access" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert secret not in done.stderr + done.stdout


def test_nothing_is_written_with_wrong_credentials(s3_server, monkeypatch):
    server = s3_server("nanio")
    bucket = server.new_bucket()
    for name, value in (server.env() | {"AWS_SECRET_ACCESS_KEY": "wrongsecretwrongsecretwrong"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(teachercache.errors.StoreDenied):
        teachercache.create(f"{bucket}/cache", SPEC)
    listed = server.client().list_objects_v2(Bucket=bucket.removeprefix("s3://"))
    assert listed["KeyCount"] == 0


def test_a_store_that_does_not_answer_and_a_bucket_that_is_not_there_are_named(s3_server, monkeypatch):
    monkeypatch.setattr("teachercache.store.store.TRIES", 1)
    server = s3_server("moto")
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(teachercache.errors.UsageError, match="bucket s3://not-there-at-all does not exist"):
        teachercache.create("s3://not-there-at-all/cache", SPEC)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(teachercache.errors.StoreUnavailable, match="does not answer"):
        teachercache.open("s3://bucket/cache")


@pytest.mark.parametrize(
    "url", ["s3://AKIA:HUSHHUSH@bucket/cache", "s3://AKIA:HUSH/HUSH@bucket/cache", "s3://bucket/cache?secret=HUSHHUSH"]
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url):
    done = cli("show", url)
    assert done.returncode == 2
    assert "AWS_ACCESS_KEY_ID" in done.stderr
    assert "HUSH" not in done.stderr + done.stdout


def test_a_folder_that_is_not_there_is_one_line_and_no_traceback(cache, tmp_path):
    done = cli("report", str(cache), "--to", str(tmp_path / "nowhere" / "report.html"))
    assert done.returncode == 1
    assert "No such file or directory" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
