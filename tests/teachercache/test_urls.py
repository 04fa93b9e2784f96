"""A URL that is misspelt or holds credentials is refused before anything is opened, and credentials are never repeated."""

from __future__ import annotations

import pytest

from teachercache.errors import UsageError
from teachercache.store.failures import explain
from teachercache.store.store import Store
from teachercache.urls import check_url, hide_credentials, refuse_credentials

HELD = [
    "s3://key:hidden@bucket/cache",
    "s3://key:hid/den@bucket/cache",
    "s3://hidden@bucket/cache",
    "s3a://key%3Ahidden%40bucket/cache",
    "s3:/key:hidden@bucket/cache",
    "S3://key:hidden@bucket/cache",
    "simplecache::s3://key:hidden@bucket/x",
    "zip://a.csv::https://user:hidden@host/a.zip",
    "https://user:hidden@host/model",
    "https://hidden@github.com/org/name",
    "http://user:hidden@[::1]:9000/x",
    "sftp://user:hidden@host/x",
    "gs://bucket/x?access_token=hidden",
    "https://host/x?X-Amz-Signature=hidden",
    "https://account.blob.core.windows.net/c/x?sv=2024&sig=hidden",
    "https://host/x?hidden",
    "https://host/x#access_token=hidden",
    "s3://bkt/run?sig=hidden",
    "s3://bkt/run?x=hidden",
    "user:hidden@host:9000",
]
PLAIN = [
    "/a/path?key=1", "s3://bucket/part-?.jsonl", "s3://bucket/part-?/date=1/x.jsonl", "hf://datasets/org/name@main",
    "s3://arn:aws:s3:eu:1:accesspoint/x", "http://localhost:9000/x", "http://[::1]:9000/x", "s3://bucket/a@b:c",
    "abfs://container@account.dfs.core.windows.net/x", "sftp://me@host/x", "org/model", "git@host:x", "C:/a@b", "~/a:b/c@d",
    "Answer as on https://example.org?page=1, user: me@example.org", "",
]  # fmt: skip


@pytest.mark.parametrize("url", HELD)
def test_credentials_are_refused_in_every_url_and_never_repeated(url):
    for refuse in (refuse_credentials, Store.open) if "://" in url else (refuse_credentials,):
        with pytest.raises(UsageError) as caught:
            refuse(url)
        assert "hid" not in str(caught.value)
    assert "hid" not in hide_credentials(f"Invalid endpoint: {url!r}")


@pytest.mark.parametrize("url", PLAIN)
def test_what_holds_none_is_not_refused(url):
    refuse_credentials(url)
    assert hide_credentials(url) == url or " " in url


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize("endpoint", ["user:hidden@nohost", "http://user:hidden@nohost", "hidden@nohost"])
def test_an_endpoint_with_a_password_is_refused_by_the_name_of_its_setting(monkeypatch, name, endpoint):
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setenv(name, endpoint)
    with pytest.raises(UsageError, match=f"^{name}: ") as caught:
        Store.open("s3://bucket/cache")
    assert "hidden" not in str(caught.value)
    said = explain(ValueError(f"Invalid endpoint: {endpoint}"), "s3://bucket/cache")  # one of a profile
    assert "hidden" not in str(said)


MISSPELT = {
    "s3:/team/x": "s3://", "s3:team/x": "s3://", "s3//team/x": "s3://", "S3://team/x": "s3://", "s3;//team/x": "s3://",
    "s://team/x": "s3://", "s3:\\\\team\\x": "s3://", "s3:///team/x": "no bucket", "s3://": "no bucket",
    "gs:/b/x": "gs://", "hf:/datasets/o/n": "hf://", "hf:datasets/o/n": "hf://", "http:/host/x": "http://",
    "https//host/x": "https://", "htps://host/x": "https://", "file:/tmp/x": "file://", "file://tmp/x": "file:///tmp/x",
    "file://./x": "a plain path", " s3://team/x": "blanks",
}  # fmt: skip


@pytest.mark.parametrize("url", MISSPELT)
def test_a_misspelt_url_is_refused_with_the_right_spelling_and_no_folder_is_made(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=MISSPELT[url]):
        Store.open(url)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["s3://team/x", "file:///tmp/x", "/tmp/x", "./s3:/x", "x/s3:/y", "s3", "data"])
def test_a_url_or_path_of_a_right_spelling_is_taken(url):
    check_url(url)
