"""What an object store's errors mean: classify them, explain them, wait until an outage is over. The only such place.

s3fs, botocore, aiohttp, the Hub's client and operating systems say "not now", "not you" and "not there" in a hundred ways. Their
classes are known by name here: none of the libraries is imported for a local path. Vendors differ in the code, and
gateways answer in HTML or with nothing: where the body has no code that is known, the HTTP status says what is meant.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from teachercache.errors import (
    Exists,
    MissingObject,
    NotACache,
    StaleParent,
    StoreDenied,
    StoreUnavailable,
    StoreUnsafe,
    TeacherCacheError,
    UsageError,
)
from teachercache.urls import hide_credentials

T = TypeVar("T")
Kind = Literal["exists", "missing", "denied", "transient", "unsupported", "checksum", "other"]
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
    "409",
    "ConditionalRequestConflict",
    "OperationAborted",
    "500",
    "InternalError",
    "502",
    "503",
    "ServiceUnavailable",
    "SlowDown",
    "504",
    "RequestTimeout",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "429",
    "NoSuchUpload",
    "IncompleteBody",
    "BadDigest",
}
_UNSUPPORTED_CODES = {"NotImplemented", "MethodNotAllowed", "501", "405"}
_CHECKSUM_CODES = {"XAmzContentSHA256Mismatch", "MissingContentLength", "411"}  # of a body that ends in a checksum
_BY_STATUS: dict[int, Kind] = {
    401: "denied",
    403: "denied",
    404: "missing",
    405: "unsupported",
    408: "transient",
    409: "transient",
    411: "checksum",
    412: "exists",
    425: "transient",
    429: "transient",
    501: "unsupported",
}
_ABOUT_CHECKSUMS = re.compile(r"x-amz-(sdk-)?checksum|aws-chunked|unsigned-payload-trailer", re.IGNORECASE)
_ABOUT_THE_CONDITION = re.compile(r"if-?none-?match|precondition|conditional", re.IGNORECASE)  # fmt: skip
_TRANSIENT_NAMES = {
    "EndpointConnectionError", "ConnectionClosedError", "ConnectTimeoutError", "ReadTimeoutError", "IncompleteReadError",
    "ResponseStreamingError", "HTTPClientError", "ClientPayloadError", "ServerDisconnectedError", "ClientOSError",
    "FSTimeoutError", "IncompleteRead", "ClientConnectorError", "ClientConnectionError", "ProxyConnectionError",
    "SSLError",
    # of the Hub's client
    "ConnectError", "ConnectTimeout", "PoolTimeout", "ReadError", "ReadTimeout", "RemoteProtocolError", "WriteError",
    "WriteTimeout",
}  # fmt: skip
_TRANSIENT_ERRNO = {
    errno.EBUSY, errno.EREMOTEIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE,
}  # fmt: skip


def classify(error: BaseException) -> Kind:
    """Return what an error means.

    exists, missing, denied; transient: it may pass by itself; unsupported: the store does not do this at all; checksum:
    it takes no request with the checksums that newer S3 clients add; other. An error that was raised from a transient
    one is transient too, unless it is one of ours, which says what it means.
    """
    if isinstance(error, TeacherCacheError):
        return next((kind for known, kind in _OURS.items() if isinstance(error, known)), "other")
    code, status, name = error_code(error), http_status(error), type(error).__name__
    if name == "OfflineModeIsEnabled":
        return "other"
    if isinstance(error, FileExistsError) or code in _EXISTS_CODES:
        return "exists"
    if code in _TRANSIENT_CODES:
        return "transient"
    if code is not None and (code in _CHECKSUM_CODES or _ABOUT_CHECKSUMS.search(_said(error))):
        return "checksum"
    if code in _UNSUPPORTED_CODES or (status == 400 and _ABOUT_THE_CONDITION.search(_said(error))):
        return "unsupported"
    if isinstance(error, FileNotFoundError):
        return "missing"
    if isinstance(error, PermissionError) or code in _DENIED_CODES or name in _DENIED_NAMES:
        return "denied"
    if status is not None and status >= 400:
        return _BY_STATUS.get(status, "transient" if status >= 500 else "other")
    if name in _TRANSIENT_NAMES or isinstance(error, (TimeoutError, asyncio.TimeoutError, ConnectionError)):
        return "transient"
    # s3fs makes EIO of a failure that it does not know; with an answer, repeating does not change it.
    if isinstance(error, OSError) and (error.errno in _TRANSIENT_ERRNO or (error.errno == errno.EIO and code is None)):
        return "transient"
    return "transient" if error.__cause__ is not None and classify(error.__cause__) == "transient" else "other"


def error_code(error: BaseException | None) -> str | None:
    """Return the S3 error code of a botocore error, or of the one that s3fs translated; None where there is none.

    An answer whose body names no code gives its HTTP status as text.
    """
    response = _answer(error)
    if response is None:
        return None
    code = response.get("Error", {}).get("Code")
    if code in (None, "", "Unknown"):
        code = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return None if code is None else str(code)


def http_status(error: BaseException | None) -> int | None:
    """Return the HTTP status of the answer that an error was made of; None where nothing answered."""
    status = (_answer(error) or {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return None if status is None else int(status)


def _answer(error: BaseException | None) -> dict[str, Any] | None:
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return response
        if isinstance(status := getattr(response, "status_code", None), int):
            return {"ResponseMetadata": {"HTTPStatusCode": status}}
        error = error.__cause__
    return None


def _said(error: BaseException) -> str:
    """Return what the server said, to look words up in; it is never shown, since it may quote the request."""
    return " ".join(map(str, (_answer(error) or {}).get("Error", {}).values()))


def endpoint_of(fs: object) -> str:
    """Return where a file system sends its requests, without credentials: "http://host:9000" or "the default endpoint"."""
    if getattr(fs, "protocol", None) == "hf":
        return hide_credentials(str(getattr(fs, "endpoint", "")))
    asked = getattr(fs, "endpoint_url", None) or (getattr(fs, "client_kwargs", None) or {}).get("endpoint_url")
    asked = asked or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return hide_credentials(asked) if asked else "the default endpoint"


def explain(
    error: Exception,
    url: str,
    path: str = "",
    *,
    local: bool = False,
    endpoint: str | None = None,
    creating: bool = False,
) -> Exception:
    """Return the user's error for a file system's one, or the error itself where it says nothing about the store.

    `url` is the store's, `path` the object's below it, `endpoint` what was asked (`endpoint_of`); `creating` says that
    the request was a conditional create. Server messages are left out: they may quote the request.
    """
    if isinstance(error, TeacherCacheError):
        return error
    kind, code = classify(error), error_code(error) or type(error).__name__
    name = f"{url}/{path}" if path else url
    where = "" if local else f" at {endpoint or endpoint_of(None)}"
    if url.startswith("hf://"):
        return _explain_hub(error, kind, code, url, name, where)
    if code == "NoSuchBucket":
        return UsageError(
            f"the bucket s3://{urlsplit(url).netloc} does not exist{where}; create it or correct the URL."
        )
    if kind == "checksum" or (creating and code == "SignatureDoesNotMatch"):
        return UsageError(
            f"{url}{where} refuses the checksums that the S3 client adds to a request ({code}); set "
            "AWS_REQUEST_CHECKSUM_CALCULATION=when_required and AWS_RESPONSE_CHECKSUM_VALIDATION=when_required."
        )
    if kind == "unsupported" and creating:
        return StoreUnsafe(
            f"{url}{where} refuses conditional creates (If-None-Match: *) with {code}, so writers would overwrite each "
            "other; use a store that honours them (AWS S3, MinIO, Ceph, R2)."
        )
    if kind == "unsupported":
        return UsageError(
            f"{url}{where} does not support this request ({code}); expected an S3 store: check the endpoint."
        )
    if kind == "missing":
        return MissingObject(f"{name} does not exist{where}.")
    if kind == "denied" and local:
        return StoreDenied(f"{name}: permission denied; check the rights of this user on the folder.")
    if kind == "denied":
        return StoreDenied(
            f"{url}{where} refused access ({code}); check the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or "
            "the profile) and their rights on this URL."
        )
    if kind == "transient":
        if local and isinstance(error, OSError):
            code = error.strerror or code
        return StoreUnavailable(f"{url}{where} does not answer ({code}); check the endpoint, or try again later.")
    if isinstance(error, OSError):
        return StoreUnavailable(f"{name}{where}: {code if _answer(error) else error.strerror or code}.")
    if type(error).__module__.startswith("botocore.") or str(error).startswith("Invalid endpoint"):
        # Raised before any request: a profile, region, bucket's name or endpoint.
        said = hide_credentials(" ".join(word for word in str(error).split() if "@" not in word))[:200]
        return UsageError(
            f"{url} cannot be reached with these settings ({type(error).__name__}: {said}); check AWS_PROFILE, "
            "AWS_ENDPOINT_URL (http://host:port) and the bucket's name."
        )
    return error


def _explain_hub(error: Exception, kind: Kind, code: str, url: str, name: str, where: str) -> Exception:
    """Return the user's error for one of the Hub's client, or the error itself where it says nothing about the Hub."""
    causes, cause = set(), error.__cause__
    while cause is not None:
        causes.add(type(cause).__name__)
        cause = cause.__cause__
    causes.add(type(error).__name__)
    if "GatedRepoError" in causes:
        return StoreDenied(f"{url}{where} is gated: accept its terms on its page and set HF_TOKEN.")
    if "RepositoryNotFoundError" in causes:
        return NotACache(
            f"{url}{where} does not exist, or it is private; check the name, and set HF_TOKEN to a token that may read it."
        )
    if "RevisionNotFoundError" in causes:
        return NotACache(f"{url}{where} has no such revision; expected a branch, a tag or a commit.")
    if "OfflineModeIsEnabled" in causes:
        return UsageError(f"{url} cannot be reached: HF_HUB_OFFLINE is set.")
    if kind == "exists":
        return StaleParent(
            f"{url} got another commit while this ran; nothing of this push is visible, so run it again."
        )
    if kind == "denied" and code != "400":
        return StoreDenied(
            f"{url}{where} refused access ({code}); set HF_TOKEN to a valid token with the right to read, or to write "
            "for a push."
        )
    if kind == "missing":
        return MissingObject(f"{name} does not exist{where}.")
    if kind == "transient":
        return StoreUnavailable(f"{url}{where} does not answer ({code}); check HF_ENDPOINT, or try again later.")
    if _answer(error) is not None:
        return UsageError(f"{url}{where} refused the request ({code}).")
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
