"""Input files: what a glob names, how large each file is, and the digest that shard ids are made of.

A digest comes from the store where the store has one (S3's ETag with the size, the sha256 of an LFS file on the Hub: no
byte is read), else from the content (sha256, about 1.5 GB/s a core). Two copies of one object uploaded with different
part sizes have two ETags and count as different inputs: their shards are then made twice, never mixed up.

An input may be in another store than the cache: `corpora.N.storage` says where, and every function here takes it.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import IO, Any
from urllib.parse import urlsplit

import fsspec

from pipeline.config import StorageConfig
from teachercache.errors import StoreDenied, StoreUnavailable, TeacherCacheError, UsageError
from teachercache.format.record import is_unicode
from teachercache.store.failures import classify, error_code

READ_AHEAD = 4 << 20
S3, HTTP = ("s3", "s3a"), ("http", "https")
_OBJECT_STORES = (*S3, "gs", "gcs", "abfs", "az", "oss")
# a store that is away is reported within seconds; the driver repeats a shard's reading for as long as is sensible
_S3_CONFIG = {
    "connect_timeout": 5, "read_timeout": 60, "retries": {"max_attempts": 2, "mode": "standard"},
    "max_pool_connections": 32,
}  # fmt: skip


_HINTS = dict.fromkeys(S3, "; a public bucket is read with corpora.N.storage.anonymous=true") | {
    "hf": "; a private data set needs HF_TOKEN"
}


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input: url as it is opened, size in bytes, digest of the content."""

    url: str
    size: int
    digest: str


def protocol_of(url: str) -> str:
    """Return the scheme of a url, `file` for a plain path."""
    return url.split("://", 1)[0] if "://" in url else "file"


def filesystem(url: str, storage: StorageConfig | None = None) -> tuple[Any, str]:
    """Return the fsspec file system of a url and the path in it; object stores never list from a cache."""
    protocol = protocol_of(url)
    options: dict[str, Any] = {"use_listings_cache": False} if protocol in _OBJECT_STORES else {}
    if protocol == "hf":
        options["skip_instance_cache"] = True  # an instance keeps its listings
    if protocol in S3:
        options["config_kwargs"] = _S3_CONFIG
        if chosen := _endpoint(storage):
            options["endpoint_url"] = chosen  # said here, so that fsspec keeps one file system an endpoint
    elif protocol in HTTP:
        import aiohttp  # a dependency of s3fs

        # without these a file whose reading takes five minutes breaks off, and a proxy of the environment is ignored
        patient = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60)
        options["client_kwargs"] = {"timeout": patient, "trust_env": True}
    if storage is not None and storage != StorageConfig.model_validate({}):
        options |= _storage_options(url, protocol, storage)
    try:
        fs, path = fsspec.core.url_to_fs(url, **options)
    except (ValueError, ImportError) as error:
        raise UsageError(f"{url}: cannot be opened: {error}") from error
    return fs, path


def _storage_options(url: str, protocol: str, storage: StorageConfig) -> dict[str, Any]:
    if protocol in S3:
        named = {"profile": storage.profile, "anon": storage.anonymous or None}
        return {name: value for name, value in named.items() if value is not None}
    if protocol in ("gs", "gcs") and not (storage.endpoint or storage.profile):
        return {"token": "anon"} if storage.anonymous else {}  # nosec B105: what gcsfs calls no credentials
    raise UsageError(f"{url}: corpora.N.storage is about s3:// (gs:// knows `anonymous` alone), found {protocol}://")


def _endpoint(storage: StorageConfig | None) -> str | None:
    """Return the endpoint of s3:// that is asked, None where botocore finds it."""
    chosen = storage.endpoint if storage is not None else None
    return chosen or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def endpoint_of(url: str, storage: StorageConfig | None = None) -> str:
    """Return where requests for a url go, as messages name it; without user and password."""
    parts = urlsplit(url)
    if parts.scheme == "hf":
        from huggingface_hub import constants

        return str(constants.ENDPOINT).rsplit("@", 1)[-1]
    if parts.scheme not in S3:
        return parts.netloc
    chosen = _endpoint(storage)
    return chosen.rsplit("@", 1)[-1] if chosen else "the default endpoint of AWS"


class _Forward(io.RawIOBase):
    """A stream that can only be read on: a file of a web server that knows no ranges."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._raw.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._raw.close()
        super().close()


@lru_cache(maxsize=65_536)
def _serves_ranges(url: str) -> bool:
    """Return whether a web server gives parts of a file: one request, once a file in a process."""
    fs, path = filesystem(url)
    try:
        with fs.open(path, "rb", block_size=1, cache_type="none") as handle:
            handle.seek(1)
            handle.read(1)
    except (ValueError, NotImplementedError):
        return False
    return True


def open_binary(url: str, read_ahead: int = READ_AHEAD, storage: StorageConfig | None = None) -> IO[bytes]:
    """Open one input for reading, seekable where the store is.

    read_ahead: bytes fetched beyond what was requested (s3fs: 50 MiB by default, six times a shard); 0 = none, for files
    that are read in places.
    """
    fs, path = filesystem(url, storage)
    if protocol_of(url) in HTTP and not _serves_ranges(url):
        if not read_ahead:
            raise UsageError(
                f"{url}: Parquet is read in places, and this web server gives no parts of a file; download the file first"
            )
        forward: Any = _Forward(fs.open(path, "rb", block_size=0))
        return io.BufferedReader(forward, 1 << 16)
    options: dict[str, Any] = {"block_size": read_ahead} if read_ahead else {"cache_type": "none"}
    handle: IO[bytes] = fs.open(path, "rb", **options)
    return handle


def _kind(error: BaseException) -> str:
    """Return what an error of a store means; see `failures.classify`, which does not know the answers of web servers."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None and error_code(error) in (None, "401"):
        error = error.__cause__  # fsspec calls every failure of a web server, and the Hub's refusals, "not found"
    status = getattr(error, "status", None)
    if isinstance(status, int):
        return "denied" if status in (401, 403, 407) else "transient" if status >= 500 or status == 429 else "missing"
    return classify(error)


@contextmanager
def store_errors(url: str, storage: StorageConfig | None = None) -> Iterator[None]:
    """Translate errors of the store that holds an input; those about a local, missing or damaged file pass unchanged.

    Raises StoreUnavailable for an outage, which is not counted against the shard, and UsageError for refused access,
    which every shard would meet.
    """
    if protocol_of(url) in ("file", "local"):
        yield
        return
    try:
        yield
    except Exception as error:
        if isinstance(error, TeacherCacheError) and not isinstance(error, StoreDenied):
            raise
        kind, said = _kind(error), error_code(error) or type(error.__cause__ or error).__name__
        at = endpoint_of(url, storage)
        if kind == "transient":
            raise StoreUnavailable(
                f"{url} at {at} does not answer ({said}); check the endpoint and the network, or try again later"
            ) from error
        if kind == "denied":
            hint = _HINTS.get(protocol_of(url), "")
            raise UsageError(
                f"{url}: the store at {at} refuses to give it ({said}); check credentials and rights{hint}"
            ) from error
        raise


def expand(patterns: Sequence[str], storage: StorageConfig | None = None) -> list[str]:
    """Return every file that the patterns name, once each, sorted.

    Raises UsageError where a pattern names nothing or may not be listed, StoreUnavailable where the store is away.
    """
    found: set[str] = set()
    for pattern in patterns:
        with store_errors(pattern, storage):
            names = _matching(pattern, storage)
        if not names:
            raise UsageError(_nothing_there(pattern, storage))
        if odd := next((name for name in names if not is_unicode(name)), None):
            raise UsageError(f"{os.fsencode(odd)!r}: the name of this file is no UTF-8 text; rename it")
        found.update(names)
    return sorted(found)


def _matching(pattern: str, storage: StorageConfig | None) -> list[str]:
    fs, path = filesystem(pattern, storage)
    prefix = pattern[: len(pattern) - len(path)] if pattern.endswith(path) else ""
    if "://" in pattern and not prefix and "://" not in path:
        prefix = pattern.split("://", 1)[0] + "://"
    try:
        if any(c in path for c in ("*[" if protocol_of(pattern) in HTTP else "*?[")):
            names = [p for p, info in fs.glob(path, detail=True).items() if info.get("type") != "directory"]
        else:  # not isfile, which takes an outage for a missing file
            names = [path] if fs.info(path).get("type") != "directory" else []
    except PermissionError as error:
        if protocol_of(pattern) not in ("file", "local"):
            raise
        raise UsageError(f"{pattern}: this user may not read it ({error.strerror or error}); check rights") from error
    except FileNotFoundError as error:
        if _kind(error) != "missing":
            raise
        names = []
    return [prefix + name for name in names]


def _nothing_there(pattern: str, storage: StorageConfig | None) -> str:
    """Return the sentence for a pattern that names no file, with the endpoint that was asked."""
    if protocol_of(pattern) not in S3:
        return f"{pattern}: expected at least one input file, found none; check the path or the glob"
    fs, path = filesystem(pattern, storage)
    at, bucket = endpoint_of(pattern, storage), path.split("/", 1)[0]
    elsewhere = (
        "; a corpus in another store than the cache needs corpora.N.storage (endpoint, profile), or a copy in this one"
    )
    try:
        fs.call_s3("head_bucket", Bucket=bucket)
    except FileNotFoundError:
        return f"{pattern}: there is no bucket {bucket!r} at {at}{elsewhere}"
    except Exception:  # nosec B110: whoever may read an object need not have the right to ask for its bucket
        pass
    return f"{pattern}: expected at least one input file, found none at {at}; check the path or the glob{elsewhere}"


def sha256_of(handle: IO[bytes]) -> tuple[str, int]:
    """Return the sha256 hex of everything from here to the end, and its length in bytes."""
    digest, length = hashlib.sha256(), 0
    while chunk := handle.read(1 << 20):
        digest.update(chunk)
        length += len(chunk)
    return digest.hexdigest(), length


@lru_cache(maxsize=65_536)
def _local_digest(path: str, size: int, mtime_ns: int) -> str:
    """Return the content digest of a local file; computed once per (path, size, mtime) in a process."""
    with open(path, "rb") as handle:
        return "sha256:" + sha256_of(handle)[0]


def fingerprint(url: str, storage: StorageConfig | None = None) -> InputFile:
    """Return size and digest of one input as it is now."""
    with store_errors(url, storage):
        return _fingerprint(url, storage)


def _fingerprint(url: str, storage: StorageConfig | None) -> InputFile:
    fs, path = filesystem(url, storage)
    info = fs.info(path)
    size = info.get("size")  # None: a web server that does not say it
    etag = info.get("ETag") or info.get("etag")
    if etag and size is not None:
        return InputFile(url, int(size), f"etag:{str(etag).strip(chr(34))}:{size}")
    if lfs := info.get("lfs"):
        return InputFile(url, int(size), f"sha256:{lfs['sha256']}")
    if "mtime" in info and "://" not in path and type(fs).__name__ == "LocalFileSystem":
        stat = os.stat(path)
        return InputFile(url, int(size), _local_digest(path, stat.st_size, stat.st_mtime_ns))
    with open_binary(url, READ_AHEAD, storage) as handle:
        digest, length = sha256_of(handle)
    return InputFile(url, length, "sha256:" + digest)


def fingerprint_all(
    urls: Sequence[str], storage: StorageConfig | None = None, threads: int = 16
) -> Iterator[InputFile]:
    """Yield fingerprints in the order of the urls, 16 at a time (a HEAD of an object store takes 20 ms)."""
    with ThreadPoolExecutor(max_workers=threads) as pool:
        yield from pool.map(partial(fingerprint, storage=storage), urls)
