"""What surrounds a cache: odd paths, wrong settings, strangers' objects, other processes, file systems of less than POSIX."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import threading
from datetime import timedelta

import pytest
from rich.console import Console

import teachercache
from teachercache.doctor import check_gpu, check_store
from teachercache.errors import (
    MissingObject,
    StoreDenied,
    StoreUnsafe,
    UsageError,
)
from teachercache.parquet.datafile import DataFile
from teachercache.store.store import Store
from teachercache.testing import synthetic_records, synthetic_spec
from teachercache.upkeep.gc import collect
from teachercache.upkeep.verify import verify
from teachercache.views.export import export
from teachercache.views.show import head_table
from tests.teachercache.faultfs import ClientError, FaultFS

SPEC = synthetic_spec()


def make(url, count: int = 5, **options) -> teachercache.Cache:
    writer = teachercache.CacheWriter(teachercache.create(url, SPEC, probe=False).store, SPEC, **options)
    writer.commit("s", synthetic_records(SPEC, count))
    writer.publish()
    return teachercache.open(url)


# ---- paths and settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["two words", "100%25", "a#b", "é", "a::b"])
def test_a_local_path_is_the_folder_of_that_very_name(tmp_path, name):
    cache = make(tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert os.path.exists(cache.file_url(cache.files()[0]))
    assert len(list(teachercache.open(cache.url).records())) == 5


@pytest.mark.parametrize(
    ("url", "variable", "value", "said"),
    [
        ("s3://bucket/x", "AWS_PROFILE", "typo", "profile"),
        ("s3://bucket/x", "AWS_ENDPOINT_URL", "localhost:9000", "endpoint"),
        ("s3://Bad_Bucket!/x", "AWS_PROFILE", None, "bucket"),
    ],
)
def test_wrong_settings_are_one_sentence_and_no_traceback(url, variable, value, said, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    if value is not None:
        monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match=said):
        teachercache.open(url)


def test_a_bucket_that_does_not_exist_is_said_also_without_writing(s3_url):
    (finding,) = check_store("s3://no-such-bucket-of-ours/cache", write=False)
    assert finding.status == "fail"
    assert "does not exist" in finding.found
    with pytest.raises(UsageError, match="bucket s3://no-such-bucket-of-ours does not exist"):
        teachercache.open("s3://no-such-bucket-of-ours/cache")


def test_a_head_that_is_answered_with_400_is_a_matter_of_credentials():
    """An expired token: a HEAD's answer has no body to say so."""
    fs = FaultFS()

    def refused(path, **kwargs):
        raise OSError(errno.EINVAL, "Bad Request") from ClientError("400")

    fs.info = refused
    with pytest.raises(StoreDenied, match="credentials"):
        Store(fs, "bucket/cache", "s3://bucket/cache").head("spec.json")


def test_a_driver_that_hangs_is_a_finding(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 100\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("teachercache.doctor.GPU_SECONDS", 0.2)
    assert check_gpu().status == "fail"


def test_a_listings_cache_is_not_to_be_had():
    store = Store.open("s3://bucket/x", {"use_listings_cache": True, "key": "x", "secret": "y"})
    assert store.fs.storage_options["use_listings_cache"] is False


# ---- file systems of less than POSIX ---------------------------------------------------------------------------


def test_a_file_system_without_hard_links_is_refused_by_name(tmp_path, monkeypatch):
    """A bucket mounted as a folder: what it lacks is no matter of credentials."""

    def no_links(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(StoreUnsafe, match="hard links"):
        teachercache.create(tmp_path / "cache", SPEC)


def test_a_local_folder_without_rights_is_not_blamed_on_aws(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(StoreDenied, match="rights of this user") as caught:
        Store.open(tmp_path).create("x", b"")
    assert "AWS" not in str(caught.value)


# ---- strangers' objects ----------------------------------------------------------------------------------------


def test_folder_markers_and_foreign_files_disturb_nobody(s3_url, monkeypatch):
    """The console's `Create folder` leaves empty objects called `data/`; Spark leaves _SUCCESS."""
    cache = make(f"{s3_url}/cache")
    store = cache.store
    for key in ("commits/", "data/", "manifests/", "plans/", "data/codec=open/", "data/_SUCCESS", "commits/README.txt"):
        store.fs.call_s3("put_object", Bucket=store.root.split("/")[0], Key=f"cache/{key}", Body=b"")
    assert verify(store, SPEC).problems == []
    later = store.now() + timedelta(days=30)
    monkeypatch.setattr(Store, "now", lambda _: later)
    assert [o.path for o in collect(store, SPEC, dry_run=False).objects if not o.path.startswith("probes/")] == []
    assert store.exists("data/_SUCCESS")
    assert len(list(teachercache.open(f"{s3_url}/cache").records())) == 5


def test_gc_tells_the_time_without_the_right_to_delete(tmp_path, monkeypatch):
    cache = make(tmp_path / "cache")

    def refused(self, path):
        raise StoreDenied("no")

    monkeypatch.setattr(Store, "delete", refused)
    assert collect(cache.store, SPEC).orphans == []


def test_refused_credentials_end_a_verification_instead_of_damning_every_file(tmp_path, monkeypatch):
    cache = make(tmp_path / "cache")

    def refused(*_):
        raise StoreDenied("the token expired")

    monkeypatch.setattr(Store, "download", refused)
    with pytest.raises(StoreDenied):
        verify(cache.store, SPEC)


def test_a_file_that_was_collected_is_said_to_be(tmp_path):
    cache = make(tmp_path / "cache")
    cache.store.delete(cache.files()[0].path)
    with pytest.raises(MissingObject, match="manifest expired and gc removed it"):
        list(cache.records())


def test_a_manifest_that_nobody_could_read_is_not_published(tmp_path, monkeypatch):
    """It would be the newest for ever: no reader, publisher or collector gets past it."""
    cache = make(tmp_path / "cache")
    writer = teachercache.create(tmp_path / "cache", SPEC)
    for i in range(4):
        writer.commit(f"t{i}", synthetic_records(SPEC, 1, seed=i + 5, prefix=f"t{i}"))
    monkeypatch.setattr("teachercache.format.sealed.MAX_OBJECTS", 6)
    with pytest.raises(UsageError, match="fewer, larger shards"):
        writer.publish()
    assert teachercache.open(tmp_path / "cache").manifest == cache.manifest


def test_an_empty_cache_is_exported_as_an_empty_data_set(tmp_path):
    assert export(make(tmp_path / "cache", 0), tmp_path / "folder") == []
    assert (tmp_path / "folder" / "README.md").exists()


def test_columns_given_as_one_string_are_refused_as_that(tmp_path):
    with pytest.raises(UsageError, match=r"\['doc_id'\]"):
        list(make(tmp_path / "cache").records(columns="doc_id"))


# ---- threads and processes -------------------------------------------------------------------------------------


def test_a_file_is_not_closed_while_a_row_group_is_read_ahead(tmp_path, monkeypatch):
    """Closing a memory-mapped file under a reading thread kills the process."""
    cache = make(tmp_path / "cache", 20, rows_per_group=50)
    real_read, real_close, reading, overlaps = DataFile.read_group, DataFile.close, set(), []

    def slow_read(self, i, columns=None):
        reading.add(i)
        if i:
            threading.Event().wait(0.05)
        try:
            return real_read(self, i, columns)
        finally:
            reading.discard(i)

    def close(self):
        overlaps.extend(reading)
        real_close(self)

    monkeypatch.setattr(DataFile, "read_group", slow_read)
    monkeypatch.setattr(DataFile, "close", close)
    assert len(list(cache.records(limit=1))) == 1
    records = cache.records()
    next(records)
    records.close()
    assert overlaps == []


def _in_a_fork(work):
    """What `work` returns, or its error, in a child that shares this process's memory, threads excepted."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        try:
            theirs.send(work())
        except Exception as error:
            theirs.send(error)

    process = context.Process(target=child)
    process.start()
    try:
        assert ours.poll(30), "the child hangs"
        return ours.recv()
    finally:
        process.kill()
        process.join()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_open_cache_is_read_in_a_forked_worker(s3_url):
    """What a torch DataLoader does with a data set that holds a cache."""
    cache = make(f"{s3_url}/cache")
    assert len(list(cache.records())) == 5  # the parent's connections are open
    assert _in_a_fork(lambda: len(list(cache.records()))) == 5
    assert len(list(cache.records())) == 5


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_stream_refuses_a_fork_instead_of_waiting_for_ever(tmp_path):
    with make(tmp_path / "cache").stream() as stream:
        next(stream)
        assert isinstance(_in_a_fork(lambda: [r.doc_id for _, r in zip(range(50), stream, strict=False)]), UsageError)


# ---- what is shown ---------------------------------------------------------------------------------------------


def test_representations_are_one_line(tmp_path):
    cache = make(tmp_path / "cache")
    record = next(cache.records(columns={"doc_id", "row_pos"}))
    assert f"tokens=None, rows={len(record.row_pos)}" in repr(record)
    assert f"manifest=1, records=5, rows={cache.manifest.rows:,}" in repr(cache)
    assert "path=" not in repr(cache.manifest)


def test_a_document_named_like_markup_is_shown_by_its_name():
    (record,) = synthetic_records(SPEC, 1, prefix="app/[id]/[/b]")
    console = Console(file=io.StringIO(), width=200)
    console.print(head_table(record, [], 3))
    assert "[id]/[/b]" in console.file.getvalue()


def test_a_state_of_an_older_manifest_says_which_one_to_open(tmp_path):
    cache = make(tmp_path / "cache")
    with cache.stream() as stream:
        next(stream)
        state = stream.state()
    writer = teachercache.create(tmp_path / "cache", SPEC)
    writer.commit("t", synthetic_records(SPEC, 2, prefix="more", seed=9))
    writer.publish()
    with pytest.raises(UsageError, match="manifest 1, where this is 2"):
        teachercache.open(tmp_path / "cache").stream(state=state)
    with teachercache.open(tmp_path / "cache", manifest=1).stream(state=state) as stream:
        next(stream)
