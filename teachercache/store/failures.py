"""What an object store's errors mean: classify them, explain them, wait until an outage is over. The only such place.

s3fs, botocore, aiohttp and operating systems say "not now", "not you" and "not there" in a hundred ways. Their
classes are known by name here: none of the libraries is imported for a local path.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar
from urllib.parse import urlsplit

from teachercache.errors import Exists, MissingObject, StoreDenied, StoreUnavailable, TeacherCacheError, UsageError

T = TypeVar("T")
Kind = Literal["exists", "missing", "denied", "transient", "other"]
LONGEST_WAIT_S = 30.0

_OURS: dict[type[TeacherCacheError], Kind] = {
    Exists: "exists", MissingObject: "missing", StoreDenied: "denied", StoreUnavailable: "transient",
}  # fmt: skip
_EXISTS_CODES = {"PreconditionFailed", "412"}
_DENIED_CODES = {
    "AccessDenied", "403", "Forbidden", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken",
    "AllAccessDisabled", "AccountProblem", "RequestTimeTooSkewed", "AuthorizationHeaderMalformed", "InvalidSecurity",
    "400",  # of a HEAD, which has no body to say so: an expired token, or keys of another region
}  # fmt: skip
_DENIED_NAMES = {
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "NoAuthTokenError", "SSOTokenLoadError",
    "UnauthorizedSSOTokenError", "TokenRetrievalError",
}  # fmt: skip
_TRANSIENT_CODES = {
    "409", "ConditionalRequestConflict", "OperationAborted", "500", "InternalError", "502", "503", "ServiceUnavailable",
    "SlowDown", "504", "RequestTimeout", "Throttling", "ThrottlingException", "TooManyRequests", "429", "NoSuchUpload",
    "IncompleteBody",
}  # fmt: skip
_TRANSIENT_NAMES = {
    "EndpointConnectionError", "ConnectionClosedError", "ConnectTimeoutError", "ReadTimeoutError", "IncompleteReadError",
    "ResponseStreamingError", "HTTPClientError", "ClientPayloadError", "ServerDisconnectedError", "ClientOSError",
    "FSTimeoutError", "IncompleteRead", "ClientConnectorError", "ClientConnectionError", "ProxyConnectionError",
    "SSLError",
}  # fmt: skip
_TRANSIENT_ERRNO = {
    errno.EBUSY, errno.EREMOTEIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE,
}  # fmt: skip


def classify(error: BaseException) -> Kind:
    """Return what an error means: exists, missing, denied, transient (it may pass by itself) or other.

    An error that was raised from a transient one is transient too, unless it is one of ours, which says what it means.
    """
    if isinstance(error, TeacherCacheError):
        return next((kind for known, kind in _OURS.items() if isinstance(error, known)), "other")
    code, name = error_code(error), type(error).__name__
    if isinstance(error, FileExistsError) or code in _EXISTS_CODES:
        return "exists"
    if code in _TRANSIENT_CODES:
        return "transient"
    if isinstance(error, FileNotFoundError):
        return "missing"
    if isinstance(error, PermissionError) or code in _DENIED_CODES or name in _DENIED_NAMES:
        return "denied"
    if name in _TRANSIENT_NAMES or isinstance(error, (TimeoutError, asyncio.TimeoutError, ConnectionError)):
        return "transient"
    # s3fs makes EIO of a failure that it does not know; with an S3 code it is an answer, which repeating does not change.
    if isinstance(error, OSError) and (error.errno in _TRANSIENT_ERRNO or (error.errno == errno.EIO and code is None)):
        return "transient"
    return "transient" if error.__cause__ is not None and classify(error.__cause__) == "transient" else "other"


def error_code(error: BaseException | None) -> str | None:
    """Return the S3 error code of a botocore error, or of the one that s3fs translated; None where there is none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            code = response.get("Error", {}).get("Code")
            return None if code is None else str(code)
        error = error.__cause__
    return None


def explain(error: Exception, url: str, path: str = "", *, local: bool = False) -> Exception:
    """Return the user's error for a file system's one, or the error itself where it says nothing about the store.

    `url` is the store's, `path` the object's below it. Server messages are left out: they may quote the request.
    """
    if isinstance(error, TeacherCacheError):
        return error
    kind, code = classify(error), error_code(error) or type(error).__name__
    name = f"{url}/{path}" if path else url
    if code == "NoSuchBucket":
        return UsageError(f"the bucket s3://{urlsplit(url).netloc} does not exist; create it or correct the URL.")
    if kind == "missing":
        return MissingObject(f"{name} does not exist.")
    if kind == "denied" and local:
        return StoreDenied(f"{name}: permission denied; check the rights of this user on the folder.")
    if kind == "denied":
        return StoreDenied(
            f"{url} refused access ({code}); check the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or "
            "the profile) and their rights on this URL."
        )
    if kind == "transient":
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "the default endpoint"
        where = "" if local else f" at {_without_userinfo(endpoint)}"
        if local and isinstance(error, OSError):
            code = error.strerror or code
        return StoreUnavailable(f"{url}{where} does not answer ({code}); check the endpoint, or try again later.")
    if isinstance(error, OSError):
        return StoreUnavailable(f"{name}: {error.strerror or code}.")
    if type(error).__module__.startswith("botocore.") or str(error).startswith("Invalid endpoint"):
        # Raised before any request: a profile, region, bucket's name or endpoint.
        said = " ".join(str(error).split())[:200]
        return UsageError(
            f"{url} cannot be reached with these settings ({type(error).__name__}: {said}); check AWS_PROFILE, "
            "AWS_ENDPOINT_URL (http://host:port) and the bucket's name."
        )
    return error


@contextmanager
def outages_explained(url: str) -> Iterator[None]:
    """Raise StoreUnavailable for an outage of the store at `url` and StoreDenied for refused access.

    For code that reads through other libraries. Errors that are about a file (missing, damaged) pass unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, TeacherCacheError) or classify(error) not in ("transient", "denied"):
            raise
        raise explain(error, url) from error


def retry_while_unavailable(
    action: Callable[[], T],
    *,
    patience_s: float,
    on_retry: Callable[[Exception, float], None] | None = None,
    stop: threading.Event | None = None,
    first_wait_s: float = 0.5,
) -> T:
    """Return what `action` returns, repeating it after growing pauses (up to 30 s) while the store is away.

    Any error but an outage is raised at once; an outage is raised after `patience_s` seconds, or when `stop` is set.
    `on_retry(error, wait_s)` is called before each pause.
    """
    deadline, wait_s = time.monotonic() + patience_s, first_wait_s
    while True:
        try:
            return action()
        except Exception as error:
            stopped = stop is not None and stop.is_set()
            if classify(error) != "transient" or stopped or time.monotonic() + wait_s > deadline:
                raise
            if on_retry is not None:
                on_retry(error, wait_s)
        (time.sleep if stop is None else stop.wait)(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def _without_userinfo(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rsplit("@", 1)[-1], query="").geturl()
