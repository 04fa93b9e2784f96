"""Stores of other vendors: every way of saying "exists", "not supported" and "not these headers"; dead endpoints."""

from __future__ import annotations

import socket
from functools import partial

import pytest

import teachercache
from teachercache.doctor import FAIL, check_store
from teachercache.errors import (
    MissingObject,
    StoreUnavailable,
    StoreUnsafe,
    TeacherCacheError,
    UnsafeManifest,
    UsageError,
)
from teachercache.store.store import Store
from teachercache.testing import synthetic_records
from teachercache.views.catalog import find_caches
from tests.pipeline.faulty_s3 import Answer, FaultyProxy
from tests.teachercache.caches import SPEC

HTML = b"<html><head><title>Refused</title></head><body><h1>No</h1></body></html>"


def xml(code: str, message: str = "said") -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


@pytest.fixture
def vendor(s3_server, monkeypatch):
    """A bucket behind a proxy that can answer as another vendor would: (proxy, URL)."""
    server = s3_server("moto")
    bucket = server.new_bucket()
    proxy = FaultyProxy(server.endpoint)
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_REQUEST_CHECKSUM_CALCULATION"):
        monkeypatch.delenv(name, raising=False)
    yield proxy, f"{bucket}/cache"
    proxy.close()


def run_a_job(url: str) -> int:
    writer = teachercache.create(url, SPEC)
    writer.commit("s", synthetic_records(SPEC, 2))
    return writer.publish().number


@pytest.mark.parametrize(
    "answer",
    [
        Answer(412),
        Answer(412, b"<Error><Message>no code</Message></Error>"),
        Answer(412, HTML, "text/html"),
        Answer(412, b"not XML <", "text/plain"),
        Answer(412, xml("AtLeastOnePreconditionFailed")),
    ],
    ids=["empty", "no-code", "html", "text", "other-code"],
)
def test_a_412_means_that_it_exists_whatever_its_body(vendor, answer):
    proxy, url = vendor
    proxy.change = lambda status: answer if status == 412 else None
    assert run_a_job(url) == 1


@pytest.mark.parametrize(("status", "body"), [(409, xml("Conflict")), (429, HTML), (503, b""), (500, xml("Made-up"))])
def test_an_answer_that_may_pass_is_asked_again(vendor, status, body):
    proxy, url = vendor
    refusals = iter([Answer(status, body)] * 2)
    proxy.refuse = lambda method, target, headers: next(refusals, None) if method == "PUT" else None
    Store.open(url).create("commits/x.json", b"x")
    assert Store.open(url).read("commits/x.json") == b"x"


def conditional(answer: Answer, method: str, target: str, headers: dict[str, str]) -> Answer | None:
    return answer if "if-none-match" in headers else None


def with_checksum(answer: Answer, method: str, target: str, headers: dict[str, str]) -> Answer | None:
    return answer if "x-amz-sdk-checksum-algorithm" in headers else None


@pytest.mark.parametrize(
    "answer",
    [
        Answer(501, xml("NotImplemented", "A header you provided implies functionality that is not implemented")),
        Answer(501, HTML, "text/html"),
        Answer(501),
        Answer(405, xml("MethodNotAllowed", "The specified method is not allowed against this resource.")),
        Answer(405, HTML, "text/html"),
        Answer(400, xml("InvalidArgument", "Invalid value for header If-None-Match")),
        Answer(400, xml("InvalidRequest", "conditional requests are not supported")),
    ],
    ids=["501", "501-html", "501-empty", "405", "405-html", "400-argument", "400-request"],
)
def test_a_store_that_refuses_conditional_creates_is_unsafe_at_once(vendor, answer):
    proxy, url = vendor
    proxy.refuse = partial(conditional, answer)
    with pytest.raises(StoreUnsafe, match="refuses conditional creates") as caught:
        run_a_job(url)
    assert proxy.endpoint in str(caught.value)
    puts = [target for target in proxy.targets if target.startswith("PUT")]
    assert len(puts) == 1, "nothing was asked twice"


@pytest.mark.parametrize(
    "answer",
    [
        Answer(
            400, xml("InvalidArgument", "Unsupported header 'x-amz-sdk-checksum-algorithm' received for this API call.")
        ),
        Answer(501, xml("NotImplemented", "Header 'x-amz-checksum-algorithm' with value 'CRC32' not implemented")),
        Answer(403, xml("SignatureDoesNotMatch", "The request signature we calculated does not match")),
        Answer(400, xml("XAmzContentSHA256Mismatch")),
    ],
    ids=["400", "501", "403", "sha256"],
)
def test_a_store_that_refuses_the_clients_checksums_is_told_how_to_be_used(vendor, answer, monkeypatch):
    proxy, url = vendor
    proxy.refuse = partial(with_checksum, answer)
    with pytest.raises(UsageError, match="AWS_REQUEST_CHECKSUM_CALCULATION=when_required") as caught:
        run_a_job(url)
    assert proxy.endpoint in str(caught.value)
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    monkeypatch.setenv("AWS_RESPONSE_CHECKSUM_VALIDATION", "when_required")
    Store.open(url).probe()


def test_the_doctor_fails_a_store_that_refuses_what_is_needed(vendor):
    proxy, url = vendor
    for refuse, answer, said in (
        (conditional, Answer(405, HTML), "TC-E202"),
        (with_checksum, Answer(403, xml("SignatureDoesNotMatch")), "AWS_REQUEST_CHECKSUM_CALCULATION=when_required"),
    ):
        proxy.refuse = partial(refuse, answer)
        finding = check_store(url)[-1]
        assert (finding.check, finding.status) == ("store: conditional writes", FAIL)
        assert said in finding.found


@pytest.mark.parametrize("answer", [Answer(403, HTML, "text/html"), Answer(401)], ids=["403-html", "401"])
def test_a_refusal_without_a_code_is_a_matter_of_credentials(vendor, answer):
    proxy, url = vendor
    proxy.refuse = lambda method, target, headers: answer
    with pytest.raises(teachercache.errors.StoreDenied, match="credentials") as caught:
        teachercache.open(url)
    assert proxy.endpoint in str(caught.value)


def test_a_store_that_cannot_list_is_one_sentence(vendor):
    proxy, url = vendor
    proxy.refuse = lambda method, target, headers: Answer(501, HTML, "text/html") if "list-type" in target else None
    with pytest.raises(UsageError, match="does not support this request"):
        Store.open(url).list("manifests/")


def test_a_missing_object_and_a_missing_bucket_name_the_endpoint(vendor):
    proxy, url = vendor
    for asked in (url, "s3://nowhere-at-all/cache"):
        with pytest.raises(TeacherCacheError) as caught:
            teachercache.open(asked)
        assert proxy.endpoint in str(caught.value)


def test_a_small_object_is_one_request_and_bounded(vendor):
    proxy, url = vendor
    store = Store.open(url)
    for name, content, requests in (("x", b"0123456789", 1), ("empty", b"", 2)):
        store.create(name, content)
        assert proxy.count(lambda name=name: store.read(name)) == requests
        assert store.read(name) == content
    assert store.read("x", max_bytes=10) == b"0123456789"
    with pytest.raises(UnsafeManifest, match="above the limit of 9"):
        store.read("x", max_bytes=9)
    with pytest.raises(MissingObject):
        store.read("y")


@pytest.mark.parametrize(
    "answer",
    [Answer(400, xml("InvalidArgument", "hushhush")), Answer(416, xml("InvalidRange")), Answer(416, HTML), Answer(400)],
)
def test_a_store_that_refuses_a_range_beyond_the_end_is_asked_for_the_size(vendor, answer):
    proxy, url = vendor
    store, content = Store.open(url), b"0123456789"
    store.create("x", content)
    store.create("empty", b"")

    def beyond(size):
        def refuse(method, target, headers):
            return answer if "range" in headers and int(headers["range"].split("-")[1]) >= size else None

        return refuse

    proxy.refuse = beyond(len(content))
    assert proxy.count(lambda: store.read("x")) == 3
    assert store.read("x") == content
    assert store.read("x", max_bytes=10) == content
    assert store.read("empty") == b""
    with pytest.raises(UnsafeManifest, match="above the limit of 9"):
        store.read("x", max_bytes=9)
    with pytest.raises(MissingObject):
        store.read("y")
    proxy.refuse = lambda method, target, headers: answer if method == "GET" else None
    with pytest.raises(TeacherCacheError) as caught:
        store.read("x")
    assert "hushhush" not in str(caught.value)
    assert proxy.endpoint in str(caught.value)
    proxy.refuse = beyond(100_000)
    assert run_a_job(url) == 1
    assert teachercache.open(url).manifest.documents == 2


@pytest.mark.parametrize("dead", ["refused", "no-such-host", "reset"])
def test_a_dead_endpoint_says_so_and_names_itself(dead, monkeypatch, vendor):
    """After FIRST_ANSWER_S, which is 10 s: here half a second, and one try of the client lasts up to 3 s."""
    monkeypatch.setattr("teachercache.store.store.FIRST_ANSWER_S", 0.5)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        endpoint = "http://no-such-host.invalid:9000" if dead == "no-such-host" else f"http://127.0.0.1:{port}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        calls = []
        real = Store._put

        def put(*args, **kwargs):
            calls.append(args)
            return real(*args, **kwargs)

        monkeypatch.setattr(Store, "_put", put)
        with pytest.raises(StoreUnavailable, match="does not answer") as caught:
            Store.open("s3://bucket/cache").create("x", b"x")
    assert endpoint in str(caught.value)
    assert len(calls) <= 3


@pytest.mark.parametrize("url", ["gs://bucket/x", "memory://x", "abfs://x/y", "https://host/x", "made-up://x"])
def test_any_other_url_is_refused_in_one_line(url):
    with pytest.raises(UsageError, match="is not supported; expected s3://") as caught:
        Store.open(url)
    assert "\n" not in str(caught.value)


def test_ls_asks_once_a_folder_and_looks_into_no_cache(vendor):
    proxy, url = vendor
    parent = url.removesuffix("/cache") + "/lake"
    store = Store.open(parent)
    for team in "abc":
        for folder in "xy":
            store.create(f"{team}/{folder}/notes.txt", b"x")
    teachercache.create(f"{parent}/b/cache", SPEC, probe=False)
    store.create("b/cache/deep/er/spec.json", b"not looked at")
    seen = []
    count = proxy.count(
        lambda: seen.extend(find_caches(Store.open(parent), 4, lambda done, total: seen.append((done, total))))
    )
    assert count == 1 + 3 + 7
    assert seen[-1].url == f"{parent}/b/cache"
    assert seen[-2] == (11, 11)
    assert find_caches(Store.open(parent), 1) == []
