"""Store: conditional creates, listings, settings, credentials, file systems of less than POSIX."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

import teachercache
from teachercache.doctor import check_store
from teachercache.errors import Exists, MissingObject, StoreDenied, StoreUnsafe, UsageError
from teachercache.store.store import Store
from teachercache.testing import synthetic_spec
from teachercache.upkeep.gc import collect
from teachercache.upkeep.verify import verify
from tests.teachercache.caches import make

SPEC = synthetic_spec()


def test_16_writers_of_one_object_have_one_winner(any_url):
    store = Store.open(any_url)

    def attempt(i: int) -> bool:
        try:
            store.create("commits/race.json", f"writer {i}".encode())
        except Exists:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        outcomes = list(pool.map(attempt, range(16)))
    assert outcomes.count(True) == 1
    assert store.read("commits/race.json") == f"writer {outcomes.index(True)}".encode()


@pytest.mark.slow
def test_a_large_file_goes_up_in_parts_and_whole(any_s3_url, tmp_path):
    """Above 100 MB an upload is a multipart one; until it is completed, nothing is there."""
    data = tmp_path / "large"
    data.write_bytes(b"0123456789abcdef" * (105 * 2**20 // 16))
    store = Store.open(any_s3_url)
    store.create("data/large", data)
    assert store.head("data/large").size == data.stat().st_size
    store.create("data/large", data)  # the same content again is a lost acknowledgement
    with pytest.raises(MissingObject):
        store.head("data/other")


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


def test_a_listings_cache_is_not_to_be_had():
    store = Store.open("s3://bucket/x", {"use_listings_cache": True, "key": "x", "secret": "y"})
    assert store.fs.storage_options["use_listings_cache"] is False


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


def test_folder_markers_and_foreign_files_disturb_no_one(s3_url, monkeypatch):
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


def test_a_store_that_ignores_conditional_writes_is_refused(unsafe_s3_url):
    with pytest.raises(StoreUnsafe, match="ignores conditional writes"):
        teachercache.create(unsafe_s3_url + "/cache", SPEC)


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


@pytest.mark.slow
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


@pytest.fixture
def cache(tmp_path):
    make(tmp_path / "cache")
    return tmp_path / "cache"


def test_a_folder_that_is_not_there_is_one_line_and_no_traceback(cache, tmp_path):
    done = cli("report", str(cache), "--to", str(tmp_path / "nowhere" / "report.html"))
    assert done.returncode == 1
    assert "No such file or directory" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("large", [False, True])
def test_replace_overwrites_whole_objects(any_url, tmp_path, large):
    store = Store.open(any_url)
    for content in (b"first", b"second, and longer"):
        source = tmp_path / "source"
        source.write_bytes(content)
        store.replace("run/index.json", source if large else content)
        assert store.read("run/index.json") == content
    assert [o.path for o in store.list("run/")] == ["run/index.json"]


def test_a_small_local_object_is_read_in_little_memory_and_a_pipe_is_none(tmp_path):
    """Reading "at most 512 MiB" allocated 512 MiB, in each of sixteen threads."""
    (tmp_path / "small").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")
    store = Store.open(tmp_path)
    tracemalloc.start()
    try:
        assert store.read("small") == b"x"
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
    with pytest.raises(MissingObject):
        store.read("pipe")
