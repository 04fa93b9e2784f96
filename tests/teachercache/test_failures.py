"""What a store's errors mean, and how long an outage is waited out."""

from __future__ import annotations

import errno
import threading

import pytest

from teachercache.errors import CorruptFile, Exists, MissingObject, StoreDenied, StoreUnavailable, TeacherCacheError
from teachercache.store.failures import classify, explain, outages_explained, retry_while_unavailable
from teachercache.store.store import Store
from tests.teachercache.faultfs import ClientError, FaultFS


def test_a_head_that_is_answered_with_400_is_a_matter_of_credentials():
    """An expired token: a HEAD's answer has no body to say so."""
    fs = FaultFS()

    def refused(path, **kwargs):
        raise OSError(errno.EINVAL, "Bad Request") from ClientError("400")

    fs.info = refused
    with pytest.raises(StoreDenied, match="credentials"):
        Store(fs, "bucket/cache", "s3://bucket/cache").head("spec.json")


def botocore_error(code: str) -> Exception:
    """What s3fs makes of an answer with this code."""
    error = OSError(errno.EIO, "translated")
    error.__cause__ = ClientError(code)
    return error


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileExistsError("x"), "exists"),
        (botocore_error("PreconditionFailed"), "exists"),
        (Exists("x"), "exists"),
        (FileNotFoundError("x"), "missing"),
        (MissingObject("x"), "missing"),
        (PermissionError("x"), "denied"),
        (botocore_error("ExpiredToken"), "denied"),
        (type("NoCredentialsError", (Exception,), {})(), "denied"),
        (botocore_error("SlowDown"), "transient"),
        (ConnectionRefusedError("x"), "transient"),
        (TimeoutError(), "transient"),
        (OSError(errno.EIO, "s3fs does not know it"), "transient"),
        (type("EndpointConnectionError", (Exception,), {})(), "transient"),
        (type("ClientConnectionError", (Exception,), {})(), "transient"),
        (StoreUnavailable("x"), "transient"),
        (raised_from(RuntimeError("of a library"), ConnectionResetError("x")), "transient"),
        (raised_from(CorruptFile("what it says"), ConnectionResetError("x")), "other"),
        (botocore_error("InvalidArgument"), "other"),
        (OSError(errno.ENOSPC, "disk full"), "other"),
        (ValueError("x"), "other"),
    ],
)
def test_an_error_means_one_thing(error, kind):
    assert classify(error) == kind


def test_an_explanation_never_repeats_what_the_server_said(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://key:hidden@localhost:9000?token=hidden")
    for error in (botocore_error("SlowDown"), botocore_error("AccessDenied"), botocore_error("InvalidArgument")):
        said = explain(error, "s3://bucket/cache", "spec.json")
        assert isinstance(said, TeacherCacheError)
        assert "hidden" not in str(said)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:9000")
    assert "http://localhost:9000" in str(explain(botocore_error("SlowDown"), "s3://bucket/cache"))


def test_an_outage_is_waited_out_and_nothing_else_is():
    waits, answers = [], iter([ConnectionResetError("x"), StoreUnavailable("y"), None])

    def action() -> str:
        error = next(answers)
        if error is not None:
            raise error
        return "done"

    def note(error: Exception, wait_s: float) -> None:
        waits.append((type(error).__name__, wait_s))

    assert retry_while_unavailable(action, patience_s=60, on_retry=note, first_wait_s=0.001) == "done"
    assert waits == [("ConnectionResetError", 0.001), ("StoreUnavailable", 0.002)]
    answers = iter([ValueError("a bug")])
    with pytest.raises(ValueError, match="a bug"):
        retry_while_unavailable(action, patience_s=60)


def test_waiting_ends_with_patience_and_with_a_stop():
    def away() -> None:
        raise StoreUnavailable("away")

    with pytest.raises(StoreUnavailable):
        retry_while_unavailable(away, patience_s=0)
    stop = threading.Event()
    with pytest.raises(StoreUnavailable):
        retry_while_unavailable(away, patience_s=3600, stop=stop, on_retry=lambda *_: stop.set(), first_wait_s=60)


def test_what_other_libraries_raise_about_a_store_becomes_ours():
    for raised, becomes in ((ConnectionResetError("x"), StoreUnavailable), (PermissionError("x"), StoreDenied)):
        with pytest.raises(becomes), outages_explained("s3://bucket/x"):
            raise raised
    with pytest.raises(FileNotFoundError), outages_explained("s3://bucket/x"):
        raise FileNotFoundError("about a file")
