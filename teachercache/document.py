"""Small JSON objects of a cache: sealed with their own digest when written, checked and bounded when read."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from teachercache.errors import CorruptFile, UnsupportedFormat
from teachercache.spec import FORMAT_VERSION, canonical_json, json_digest
from teachercache.store import Store

M = TypeVar("M", bound=BaseModel)
SEAL = "seal"
READS = 3


def utc_now() -> str:
    """ISO 8601, UTC, microseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")


def seal(model: BaseModel) -> bytes:
    """JSON with a last key `seal`, the sha256 of the canonical JSON of all others; a damaged copy cannot pass."""
    value = model.model_dump(mode="json")
    return canonical_json(value)[:-1] + b',"' + SEAL.encode() + b'":"' + json_digest(value).encode() + b'"}\n'


def unseal(model: type[M], data: bytes, path: str) -> M:
    """The model of sealed JSON. CorruptFile when damaged, UnsupportedFormat when written by a newer format."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} is not JSON ({error}); it was truncated or damaged.") from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{path} must hold a JSON object, found {type(value).__name__}.")
    version = value.get("format_version", FORMAT_VERSION)
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise UnsupportedFormat(
            f"{path} has format version {version}, this version reads up to {FORMAT_VERSION}; upgrade teachercache."
        )
    claimed = value.pop(SEAL, None)
    try:
        if claimed != json_digest(value):
            raise CorruptFile(f"{path} does not match its own seal; it was damaged or edited.")
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "document"
        raise CorruptFile(f"{path}: {where}: {first['msg']}.") from error


def read_sealed(store: Store, model: type[M], path: str) -> M:
    """Read, retry a damaged transfer, and parse."""
    for attempt in range(READS):
        data = store.read(path)
        try:
            return unseal(model, data, path)
        except CorruptFile:
            if attempt == READS - 1:
                raise
    raise AssertionError("unreachable")
