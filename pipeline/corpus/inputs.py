"""Input files: what a glob names, how large each file is, and the digest that shard ids are made of.

A digest comes from the store where the store has one (S3's ETag with the size: no byte is read), else from the
content (sha256, about 1.5 GB/s a core). Two copies of one object uploaded with different part sizes have two ETags
and count as different inputs: their shards are then made twice, never mixed up.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any

import fsspec

from teachercache.errors import StoreDenied, UsageError
from teachercache.store.failures import outages_explained

READ_AHEAD = 4 << 20
_OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "abfs", "az", "oss")


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input: url as it is opened, size in bytes, digest of the content."""

    url: str
    size: int
    digest: str


def filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a url and the path in it; object stores never list from a cache."""
    protocol = url.split("://", 1)[0] if "://" in url else "file"
    options: dict[str, Any] = {"use_listings_cache": False} if protocol in _OBJECT_STORES else {}
    try:
        fs, path = fsspec.core.url_to_fs(url, **options)
    except (ValueError, ImportError) as error:
        raise UsageError(f"{url}: cannot be opened: {error}") from error
    return fs, path


def open_binary(url: str, read_ahead: int = READ_AHEAD) -> IO[bytes]:
    """Open one input for reading, seekable where the store is.

    read_ahead: bytes fetched beyond what was requested (s3fs: 50 MiB by default, six times a shard); 0 = none, for files
    that are read in places.
    """
    fs, path = filesystem(url)
    options: dict[str, Any] = {"block_size": read_ahead} if read_ahead else {"cache_type": "none"}
    handle: IO[bytes] = fs.open(path, "rb", **options)
    return handle


@contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Translate errors of the store that holds an input; those about a local, missing or damaged file pass unchanged.

    Raises StoreUnavailable for an outage, which is not counted against the shard, and UsageError for refused access,
    which every shard would meet.
    """
    if url.split("://", 1)[0] not in _OBJECT_STORES:
        yield
        return
    try:
        with outages_explained(url):
            yield
    except StoreDenied as error:
        raise UsageError(f"{url}: the store refuses to give it ({error}); check credentials and rights") from error


def expand(patterns: Sequence[str]) -> list[str]:
    """Return every file that the patterns name, once each, sorted. Raises UsageError where a pattern names nothing."""
    found: set[str] = set()
    for pattern in patterns:
        fs, path = filesystem(pattern)
        prefix = pattern[: len(pattern) - len(path)] if pattern.endswith(path) else ""
        if "://" in pattern and not prefix:
            prefix = pattern.split("://", 1)[0] + "://"
        try:
            if any(c in path for c in "*?["):
                names = [p for p, info in fs.glob(path, detail=True).items() if info.get("type") != "directory"]
            elif fs.isfile(path):
                names = [path]
            else:
                names = []
        except PermissionError as error:
            raise UsageError(f"{pattern}: the store refuses to list it ({error}); check credentials") from error
        if not names:
            raise UsageError(f"{pattern}: expected at least one input file, found none; check the path or the glob")
        found.update(prefix + name for name in names)
    return sorted(found)


def sha256_of(handle: IO[bytes]) -> str:
    """Return the sha256 hex of everything from here to the end."""
    digest = hashlib.sha256()
    while chunk := handle.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


@lru_cache(maxsize=65_536)
def _local_digest(path: str, size: int, mtime_ns: int) -> str:
    """Return the content digest of a local file; computed once per (path, size, mtime) in a process."""
    with open(path, "rb") as handle:
        return "sha256:" + sha256_of(handle)


def fingerprint(url: str) -> InputFile:
    """Return size and digest of one input as it is now."""
    with store_errors(url):
        return _fingerprint(url)


def _fingerprint(url: str) -> InputFile:
    fs, path = filesystem(url)
    info = fs.info(path)
    size = int(info["size"])
    etag = info.get("ETag") or info.get("etag")
    if etag:
        return InputFile(url, size, f"etag:{str(etag).strip(chr(34))}:{size}")
    if "mtime" in info and "://" not in path and type(fs).__name__ == "LocalFileSystem":
        stat = os.stat(path)
        return InputFile(url, size, _local_digest(path, stat.st_size, stat.st_mtime_ns))
    with fs.open(path, "rb") as handle:
        return InputFile(url, size, "sha256:" + sha256_of(handle))


def fingerprint_all(urls: Sequence[str], threads: int = 16) -> Iterator[InputFile]:
    """Yield fingerprints in the order of the urls, 16 at a time (a HEAD of an object store takes 20 ms)."""
    with ThreadPoolExecutor(max_workers=threads) as pool:
        yield from pool.map(fingerprint, urls)
