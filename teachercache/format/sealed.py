"""Seal small JSON objects with their own digest, and check and bound them when they are read. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from datetime import UTC, datetime
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from teachercache.errors import CorruptFile, UnsafeManifest, UnsupportedFormat, UsageError
from teachercache.format.spec import FORMAT_VERSION, CacheSpec, canonical_json

M = TypeVar("M", bound=BaseModel)
_SEAL = re.compile(rb',"seal":"([0-9a-f]{64})"}\n\Z')
MAX_JSON_BYTES = 2**29  # a manifest of a million files is about 400 MB; beyond that something is wrong
MAX_OBJECTS = 2**19  # some 16,000 GPU-hours of unmerged shards
MAX_VALUES = 16 * MAX_OBJECTS  # commas, strings' own included
MAX_RUN = 2**22  # bytes without a quotation mark: bounds each string and each list of numbers


def utc_now() -> str:
    """Return the time in ISO 8601, UTC, microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def seal(model: BaseModel) -> bytes:
    """Return canonical JSON with one more key at its end: `seal`, the sha256 of the bytes without it.

    Raises UsageError beyond the bounds that readers check: such an object could never be read, nor replaced.
    """
    body = canonical_json(model.model_dump(mode="json"))
    if said := _excess(body):
        raise UsageError(
            f"a {type(model).__name__.lower()} would hold {said}, and no reader would take it; make fewer, larger shards."
        )
    return body[:-1] + b',"seal":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def unseal(model: type[M], data: bytes, path: str) -> M:
    """Parse a sealed object. Cost: about 60 microseconds an entry of a manifest; memory: ten times the object, at most.

    Raises CorruptFile when damaged or not canonical, UnsupportedFormat when written by another format, UnsafeManifest
    beyond the bounds.
    """
    match = _SEAL.search(data, max(0, len(data) - 100))
    if match is None:
        raise CorruptFile(f"{path} does not end in a seal; it was truncated, or is no object of a cache.")
    body = data[: match.start()] + b"}"
    if hashlib.sha256(body).hexdigest().encode() != match[1]:
        raise CorruptFile(f"{path} does not match its own seal; it was damaged or edited.")
    if said := _excess(body):  # before a parser allocates a thousand bytes for each
        raise UnsafeManifest(f"{path} holds {said}; merge small files with `optimize`, or do not trust it.")
    if not _is_canonical(body):
        raise CorruptFile(
            f"{path} is not canonical JSON (a key twice or out of order, a blank, another form of a number, too deep a "
            "recursion); another program wrote it, or edited it."
        )
    try:
        return model.model_validate_json(body, strict=True)  # 1.0 and "1" are no counts
    except ValidationError as error:
        version = _format_version(body)
        if version > FORMAT_VERSION:
            raise UnsupportedFormat(
                f"{path} has format version {version}, this version reads up to {FORMAT_VERSION}; upgrade teachercache."
            ) from error
        if model is CacheSpec and b'"rows":' not in body and re.search(rb'"top_k":\d', body):
            raise UnsupportedFormat(
                f"{path} was made by an earlier format, without `rows`; make the cache again."
            ) from error
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "document"
        raise CorruptFile(f"{path}: {ascii(where[:200])[1:-1]}: {first['msg'][:200]}.") from error


def _excess(body: bytes) -> str:
    """Return which bound an object passes, and by how much; nothing where it passes none. Allocates nothing."""
    if len(body) > MAX_JSON_BYTES - 100:
        return f"{len(body):,} bytes, limit {MAX_JSON_BYTES:,}"
    if (objects := body.count(b"{")) > MAX_OBJECTS:
        return f"{objects:,} entries, limit {MAX_OBJECTS:,}"
    if (values := body.count(b",")) > MAX_VALUES:
        return f"{values:,} values, limit {MAX_VALUES:,}"
    at = 0
    while at + MAX_RUN < len(body):
        quote = body.rfind(b'"', at, at + MAX_RUN)
        if quote < 0:
            return f"more than {MAX_RUN:,} bytes without a quotation mark"
        at = quote + 1
    return ""


def _is_canonical(body: bytes) -> bool:
    """Return whether the bytes are what `canonical_json` makes of their value."""
    try:
        return canonical_json(json.loads(body)) == body
    except (ValueError, RecursionError):
        return False


def _format_version(body: bytes) -> int:
    match = re.search(rb'"format_version":([0-9]{1,9})[,}]', body)
    return int(match[1]) if match else 0
