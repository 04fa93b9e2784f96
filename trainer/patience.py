"""Waiting for an object store that does not answer: which errors are an outage, and how long to try again."""

from __future__ import annotations

import asyncio
import errno
import sys
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_OUTAGE_NAMES = {
    # Names, not imports: botocore and aiohttp are there only where s3fs is.
    "EndpointConnectionError",
    "ConnectionClosedError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "HTTPClientError",
    "ResponseStreamingError",
    "IncompleteReadError",
    "ClientConnectionError",
    "ClientConnectorError",
    "ClientOSError",
    "ClientPayloadError",
    "ServerDisconnectedError",
    "FSTimeoutError",
    "StoreUnavailable",
}
_OUTAGE_ERRNOS = {errno.EBUSY, errno.EIO, errno.ECONNREFUSED, errno.ECONNRESET, errno.ETIMEDOUT, errno.EPIPE}


def is_outage(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, says that the store is away rather than that something is wrong."""
    while error is not None:
        if isinstance(error, (ConnectionError, TimeoutError, asyncio.TimeoutError)):
            return True
        if type(error).__name__ in _OUTAGE_NAMES or (isinstance(error, OSError) and error.errno in _OUTAGE_ERRNOS):
            return True
        error = error.__cause__
    return False


def patiently(action: Callable[[], T], *, patience_s: float, what: str, first_wait_s: float = 0.5) -> T:
    """Run `action`, again after growing pauses while the store is away; any other error is raised at once."""
    deadline, wait = time.monotonic() + patience_s, first_wait_s
    while True:
        try:
            return action()
        except Exception as error:
            if not is_outage(error) or time.monotonic() + wait > deadline:
                raise
            print(f"{what}: the store does not answer ({type(error).__name__}), again in {wait:.1f} s", file=sys.stderr)
            time.sleep(wait)
            wait = min(2 * wait, 30.0)
