"""Seal small JSON objects with their own digest, and check and bound them when they are read. Pure."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from teachercache.errors import CorruptFile, UnsafeManifest, UnsupportedFormat, UsageError
from teachercache.format.spec import FORMAT_VERSION, canonical_json

M = TypeVar("M", bound=BaseModel)
_SEAL = re.compile(rb',"seal":"([0-9a-f]{64})"}\n\Z')
MAX_JSON_BYTES = 2**29  # a manifest of a million files is about 400 MB; beyond that something is wrong
MAX_OBJECTS = 2**19  # some 16,000 GPU-hours of unmerged shards


def utc_now() -> str:
    """Return the time in ISO 8601, UTC, microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def seal(model: BaseModel) -> bytes:
    """Return canonical JSON with one more key at its end: `seal`, the sha256 of the bytes without it.

    Raises UsageError beyond the bounds that readers check: such an object could never be read, nor replaced.
    """
    body = canonical_json(model.model_dump(mode="json"))
    if body.count(b"{") > MAX_OBJECTS or len(body) > MAX_JSON_BYTES - 100:
        raise UsageError(
            f"a {type(model).__name__.lower()} of {body.count(b'{'):,} entries and {len(body):,} bytes would pass the limits of "
            f"{MAX_OBJECTS:,} and {MAX_JSON_BYTES:,}, and no reader would take it; make fewer, larger shards."
        )
    return body[:-1] + b',"seal":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def unseal(model: type[M], data: bytes, path: str) -> M:
    """Parse a sealed object.

    Raises CorruptFile when damaged, UnsupportedFormat when written by a newer format, UnsafeManifest beyond the bounds.
    """
    match = _SEAL.search(data, max(0, len(data) - 100))
    if match is None:
        raise CorruptFile(f"{path} does not end in a seal; it was truncated, or is no object of a cache.")
    body = data[: match.start()] + b"}"
    if hashlib.sha256(body).hexdigest().encode() != match[1]:
        raise CorruptFile(f"{path} does not match its own seal; it was damaged or edited.")
    if body.count(b"{") > MAX_OBJECTS:  # before a parser allocates a thousand bytes for each
        raise UnsafeManifest(
            f"{path} holds {body.count(b'{'):,} entries, limit {MAX_OBJECTS:,}; merge small files with `optimize`."
        )
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        version = _format_version(body)
        if version > FORMAT_VERSION:
            raise UnsupportedFormat(
                f"{path} has format version {version}, this version reads up to {FORMAT_VERSION}; upgrade teachercache."
            ) from error
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "document"
        raise CorruptFile(f"{path}: {where[:200]}: {first['msg'][:200]}.") from error


def _format_version(body: bytes) -> int:
    match = re.search(rb'"format_version":(\d{1,9})', body)
    return int(match[1]) if match else 0
