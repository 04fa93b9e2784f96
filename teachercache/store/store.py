"""Store: an object store behind a few verbs: create (never overwrite), read, head, list, open_input, delete, probe.

Everything that the protocol needs from a store is here: a conditional create that tells a lost acknowledgement from
another writer's object, listings that are never cached, bounded retries, and errors without credentials. Works on
`s3://`, `file://` or a plain path, and reads `hf://datasets/ORG/NAME`. Endpoint and keys come from the usual chain:
AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION, profiles, instance roles.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

import fsspec
import pyarrow as pa

from teachercache.errors import (
    Exists,
    MissingObject,
    StoreDenied,
    StoreUnavailable,
    StoreUnsafe,
    UnsafeManifest,
    UsageError,
)
from teachercache.format import layout
from teachercache.format.sealed import MAX_JSON_BYTES
from teachercache.store.failures import classify, endpoint_of, error_code, explain, http_status
from teachercache.urls import NO_CREDENTIALS, check_url, refuse_credentials, refuse_read_only

_NO_LINKS_ERRNO = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
T = TypeVar("T")
TRIES = 8  # 9 s of waiting between them, besides what the client waits itself
FIRST_ANSWER_S = 10.0  # a store that never answered is given up after this time
BLOCK = 2**22
DOWNLOAD_BYTES = 2**23
S3_CONFIG = {
    "connect_timeout": 3, "read_timeout": 60, "retries": {"total_max_attempts": 3, "mode": "standard"},
    "max_pool_connections": 32,
}  # fmt: skip
_RANGE_CODES = {"InvalidRange", "416", "InvalidArgument", "400"}  # of a range that ends, or begins, beyond the object
_TOO_LONG = "{path} is {size} bytes long, above the limit of {limit}; it is not what it claims to be."
_LOCAL_TEMP = ".tmp-"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing."""

    path: str  # relative to the store's root
    size: int  # bytes
    modified: datetime  # by the server's clock, UTC


def endpoints(options: Mapping[str, Any]) -> dict[str, str]:
    """Return where S3 may be, by the name of the setting: of a store's options and of the environment."""
    found = {"endpoint_url": options.get("endpoint_url") or options.get("client_kwargs", {}).get("endpoint_url")}
    found |= {name: os.environ.get(name) for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")}
    return {name: str(endpoint) for name, endpoint in found.items() if endpoint}


class Store:
    """A place in an object store. Thread-safe; survives pickling and a fork, after which the child connects anew."""

    def __init__(
        self, fs: fsspec.AbstractFileSystem, root: str, url: str, *, sleep: Callable[[float], None] = time.sleep
    ):
        """Use a file system below `root`; `url` is what messages call it. `Store.open` finds all three from a URL."""
        self._fs, self._pid = _once(fs), os.getpid()
        self.answered = False  # whether the store ever answered anything
        self.root = root.rstrip("/")
        self.url = url.rstrip("/")
        protocols = (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
        self.is_local = "file" in protocols or "local" in protocols
        self._sleep = sleep

    @classmethod
    def open(cls, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Store:
        """Return a store rooted at `url`: s3://, file:// or a plain path. Touches nothing yet.

        `hf://datasets/ORG/NAME[@REVISION]` is read only, and stays at the commit that it means now: the Hub is asked
        for that, and for the list of its files. Raises UsageError for any other URL, and for one (or an endpoint) that
        holds credentials.
        """
        url = os.fspath(url)
        check_url(url)
        options: dict[str, Any] = dict(storage_options or {})
        scheme = urlsplit(url).scheme if "://" in url else "file"
        if scheme == "hf":
            from teachercache.store import hub

            store = cls(files := hub.HubFiles(skip_instance_cache=True, **options), "", url)
            store.root = store._retry("", partial(hub.open_commit, files, url))
            store.url = f"hf://{store.root}"
            return store
        if scheme in ("s3", "s3a"):
            bucket = urlsplit(url).netloc
            if "?" in url:
                raise UsageError(NO_CREDENTIALS)
            if not bucket:
                raise UsageError(f"{url!r} names no bucket; expected s3://bucket/prefix.")
            for name, endpoint in endpoints(options).items():
                refuse_credentials(endpoint if "://" in endpoint else f"http://{endpoint}", name)
            options["use_listings_cache"] = False  # whatever was asked for: another process's commits would stay hidden
            options.setdefault("skip_instance_cache", True)
            options["config_kwargs"] = S3_CONFIG | dict(options.get("config_kwargs", {}))
        elif scheme not in ("file", "local"):
            raise UsageError(
                f"{scheme}:// is not supported; expected s3://, file://, hf://datasets/ORG/NAME or a plain path, found {url!r}. "
                "deploy/storage/README.md says how other stores are reached."
            )
        if "://" not in url:  # the path as it is: no reader of these URLs takes %20 for a blank
            url = f"file://{Path(url).expanduser().absolute()}"
        fs = fsspec.filesystem(scheme, **options)  # not url_to_fs, which sees a chain of file systems in "::"
        return cls(fs, fs._strip_protocol(url), url)

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    @property
    def fs(self) -> fsspec.AbstractFileSystem:
        """Return the file system; a new one in a forked child, which must not use its parent's sockets."""
        if self._pid != os.getpid():
            self._fs, self._pid = _once(pickle.loads(pickle.dumps(self._fs))), os.getpid()  # nosec B301: ours
        return self._fs

    def child(self, path: str) -> Store:
        """Return the same file system, rooted deeper."""
        path = path.strip("/")
        found = Store(self.fs, f"{self.root}/{path}", f"{self.url}/{path}", sleep=self._sleep)
        found.answered = self.answered
        return found

    @property
    def endpoint(self) -> str:
        """Return what the store's messages call the server that is asked; empty for a local path."""
        return "" if self.is_local else endpoint_of(self._fs)

    @property
    def where(self) -> str:
        """Return the URL and, of an object store, the endpoint: what a message about something missing names."""
        return self.url if self.is_local else f"{self.url} at {self.endpoint}"

    # ---- verbs -------------------------------------------------------------------------------------------------

    def create(self, path: str, data: bytes | Path) -> None:
        """Create an object whole, or raise Exists. Equal content is a lost acknowledgement, hence success.

        `data` is the content, or a local file of any size (multipart above 100 MB). Two writers never both succeed
        with different content. A file of a multipart upload is completed under the condition as well, but stores that
        check it only on a plain PUT are common; that is why data files carry their attempt in their name, and only
        small objects (commits, manifests) decide races.
        """
        refuse_read_only(self.url)
        began = time.monotonic()
        for attempt in range(TRIES):
            try:
                self._put(path, data, new=True)
                self.answered = True
                return
            except Exception as error:
                kind = classify(error)
                if kind not in ("exists", "transient") or self._is_given_up(error, began):
                    raise self._explained(error, path, creating=True) from error
                last = error
            found = self._compare(path, data)
            if found == "ours":
                return
            if found == "other":
                raise Exists(path)
            self._sleep(min(0.1 * 2**attempt, 3.0))  # refused, yet nothing is there: a conflict in flight
        raise StoreUnavailable(
            f"{self.url}/{path} could not be created in {TRIES} tries; the store keeps failing."
        ) from last

    def replace(self, path: str, data: bytes | Path) -> None:
        """Write an object whole, whatever is there; for what one process owns (a run's index and logs), never for races.

        `data` is the content, or a local file of any size. On a local disk the file is synced and renamed into place.
        """
        refuse_read_only(self.url)
        self._retry(path, lambda: self._put(path, data, new=False))

    def read(self, path: str, *, max_bytes: int = MAX_JSON_BYTES) -> bytes:
        """Return the whole object; UnsafeManifest above `max_bytes`, of which no more is read.

        One request; three for a store that refuses a range beyond the object's end, and two for an empty object.
        """
        most = max_bytes
        if self.is_local and (most := self.head(path).size) > max_bytes:  # a local read allocates what it is asked for
            raise UnsafeManifest(_TOO_LONG.format(path=path, size=f"{most:,}", limit=f"{max_bytes:,}"))
        data = self._retry(path, lambda: self._first_bytes(path, most + 1))
        if len(data) > max_bytes:
            raise UnsafeManifest(_TOO_LONG.format(path=path, size=f"more than {max_bytes:,}", limit=f"{max_bytes:,}"))
        return data

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of an object that is at least that long; a short answer is asked for again."""
        full = self._full(path)
        return self._retry(path, lambda: _whole(self.fs.cat_file(full, start=start, end=stop), stop - start))

    def download(self, path: str, size: int, out: BinaryIO | None = None) -> str:
        """Copy the first `size` bytes of an object into `out` by range requests of 8 MiB; returns their sha256 hex."""
        digest = hashlib.sha256()
        for start in range(0, size, DOWNLOAD_BYTES):
            data = self.read_range(path, start, min(start + DOWNLOAD_BYTES, size))
            digest.update(data)
            if out is not None:
                out.write(data)
        return digest.hexdigest()

    def head(self, path: str) -> ObjectInfo:
        """Return size and time of an object; MissingObject where there is none."""
        info = self._retry(path, lambda: self.fs.info(self._full(path)))
        if info["type"] != "file":
            raise MissingObject(f"{self.url}/{path} does not exist{'' if self.is_local else f' at {self.endpoint}'}.")
        return ObjectInfo(path, int(info["size"]), _modified(info))

    def exists(self, path: str) -> bool:
        """Return whether there is an object of this name: one HEAD, never from a cache."""
        try:
            self.head(path)
        except MissingObject:
            return False
        return True

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Return every object below a prefix that ends in '/', sorted by path, without folder markers; never from a cache."""
        try:
            found = self._retry(prefix, lambda: self._find(prefix))
        except MissingObject:
            return []
        cut = len(self.root) + 1
        objects = (ObjectInfo(name[cut:], int(info["size"]), _modified(info)) for name, info in found.items())
        return sorted((o for o in objects if o.path.startswith(prefix) and _is_object(o.path)), key=lambda o: o.path)

    def level(self, prefix: str) -> tuple[Sequence[str], Sequence[str]]:
        """Return the objects and the folders one level below a prefix ('' or ending in '/'); folders end in '/'."""
        try:
            found = self._retry(prefix, lambda: self.fs.ls(self._full(prefix).rstrip("/"), detail=True))
        except MissingObject:
            return [], []
        names = sorted((info["name"].rstrip("/").rsplit("/", 1)[-1], info["type"] == "directory") for info in found)
        objects = [f"{prefix}{name}" for name, is_folder in names if not is_folder]
        return objects, [f"{prefix}{name}/" for name, is_folder in names if is_folder]

    def folders(self, prefix: str) -> Sequence[str]:
        """Return the folders one level below a prefix ('' or ending in '/'), each ending in '/'."""
        return self.level(prefix)[1]

    def open_input(self, path: str, size: int | None = None) -> pa.NativeFile:
        """Open a seekable input; on S3 every read is one range request with retries. `size` saves the HEAD."""
        if self.is_local:
            try:
                return pa.memory_map(self._full(path))
            except (OSError, pa.ArrowException) as error:
                raise self._explained(error, path) from error
        return pa.PythonFile(_RangeFile(self, path, self.head(path).size if size is None else size), mode="r")

    def delete(self, path: str) -> None:
        """Remove an object; a missing one is fine. Nothing that a manifest names is ever deleted, except by `gc`."""
        refuse_read_only(self.url)
        with suppress(MissingObject):
            self._retry(path, lambda: self.fs.rm_file(self._full(path)))

    def now(self) -> datetime:
        """Return the server's clock, read from the time that it gives a fresh object."""
        path = f"{layout.PROBES}{uuid.uuid4().hex}"
        self.create(path, path.encode())
        modified = self.head(path).modified
        with suppress(StoreDenied):  # as in the probe
            self.delete(path)
        return modified

    def probe(self) -> None:
        """Raise StoreUnsafe unless a second create is refused, alone and in an eight-way race.

        Costs about 20 requests. Leaves nothing behind where deletion is allowed.
        """
        refuse_read_only(self.url)
        self._bucket_must_exist()
        path = f"{layout.PROBES}{uuid.uuid4().hex}"
        try:
            self._probe_create(path, [b"first"], [b"second"])
            self._probe_create(f"{path}-race", [f"racer {i}".encode() for i in range(8)], [])
        finally:
            for name in (path, f"{path}-race"):
                try:
                    self.delete(name)
                except StoreDenied:  # writers without the right to delete are good practice; gc removes these
                    break

    def _bucket_must_exist(self) -> None:
        if self.is_local:
            return
        bucket = self.root.split("/", 1)[0]
        try:
            self._retry(bucket, lambda: self.fs.call_s3("head_bucket", Bucket=bucket))
        except MissingObject as error:
            raise UsageError(
                f"the bucket s3://{bucket} does not exist at {self.endpoint}; create it or correct the URL."
            ) from error

    def _probe_create(self, path: str, racers: Sequence[bytes], late: Sequence[bytes]) -> None:
        def won(data: bytes) -> bool:
            try:
                self.create(path, data)
            except Exists:
                return False
            return True

        with ThreadPoolExecutor(len(racers)) as pool:
            winners = [data for data, ok in zip(racers, pool.map(won, racers), strict=True) if ok]
        winners += [data for data in late if won(data)]
        if len(winners) != 1 or self._compare(path, winners[0]) != "ours":
            raise StoreUnsafe(
                f"{self.where} ignores conditional writes (If-None-Match: *): {len(winners)} of {len(racers) + len(late)} "
                "creates of one object succeeded, so writers would overwrite each other; use a store that honours them "
                "(AWS S3, MinIO, Ceph, R2, GCS)."
            )

    # ---- one I/O each ------------------------------------------------------------------------------------------

    def _find(self, prefix: str) -> dict[str, dict[str, Any]]:
        if _is_s3(self.fs) and prefix:  # a plain find asks twice more where there is nothing
            found: dict[str, dict[str, Any]] = self.fs.find(self.root, prefix=prefix, detail=True)
        else:
            found = self.fs.find(self._full(prefix.rstrip("/")), detail=True)
        return found

    def _first_bytes(self, path: str, count: int) -> bytes:
        """Return at most `count` bytes by one range request; s3fs asks for the size first where the whole is wanted.

        A store that refuses the range is asked for the size: no object is ever taken for an empty one.
        """
        full = self._full(path)
        try:
            return bytes(self.fs.cat_file(full, start=0, end=count))
        except Exception as error:
            if error_code(error) not in _RANGE_CODES:
                raise
            stop = min(int(self.fs.info(full)["size"]), count)
            return _whole(self.fs.cat_file(full, start=0, end=stop), stop) if stop else b""

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}"

    def _put(self, path: str, data: bytes | Path, *, new: bool) -> None:
        full, mode = self._full(path), "create" if new else "overwrite"
        if self.is_local:
            _put_local(Path(full), data, new=new)
        elif isinstance(data, bytes):
            self.fs.pipe_file(full, data, mode=mode)
        else:
            self.fs.put_file(str(data), full, mode=mode)

    def _compare(self, path: str, data: bytes | Path) -> str:
        """Return what is at `path`: 'ours' (equal bytes), 'other', or 'absent'."""
        size = len(data) if isinstance(data, bytes) else data.stat().st_size
        try:
            if self.head(path).size != size:
                return "other"
            if not size:
                return "ours"
            if isinstance(data, bytes):
                return "ours" if self.read_range(path, 0, size) == data else "other"
            return "ours" if sha256_file(data) == self.download(path, size) else "other"
        except MissingObject:
            return "absent"

    def _retry(self, path: str, operation: Callable[[], T]) -> T:
        began = time.monotonic()
        for attempt in range(TRIES):
            try:
                result = operation()
                self.answered = True
                return result
            except Exception as error:
                if classify(error) != "transient" or attempt == TRIES - 1 or self._is_given_up(error, began):
                    raise self._explained(error, path) from error
                self._sleep(min(0.1 * 2**attempt, 3.0))
        raise AssertionError("unreachable")

    def _is_given_up(self, error: Exception, began: float) -> bool:
        """Return whether a store that never answered has had its time: whoever typed a wrong endpoint is waiting."""
        self.answered = self.answered or http_status(error) is not None
        return not self.answered and time.monotonic() - began >= FIRST_ANSWER_S

    def _explained(self, error: Exception, path: str, *, creating: bool = False) -> Exception:
        return explain(error, self.url, path, local=self.is_local, endpoint=self.endpoint, creating=creating)


class _RangeFile(io.RawIOBase):
    """A read-only file over range requests; pyarrow asks for whole column chunks, so nothing is read ahead."""

    def __init__(self, store: Store, path: str, size: int) -> None:
        super().__init__()
        self._store, self._path, self._size, self._at = store, path, size, 0

    def readable(self) -> bool:
        """Return True: pyarrow asks."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move, and return the position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, length: int = -1) -> bytes:
        """Read at most `length` bytes, or the rest."""
        stop = self._size if length < 0 else min(self._at + length, self._size)
        if stop <= self._at:
            return b""
        data = self._store.read_range(self._path, self._at, stop)
        self._at += len(data)
        return data


def _once(fs: fsspec.AbstractFileSystem) -> fsspec.AbstractFileSystem:
    """Return the file system without its own retries: botocore's and ours would multiply with them to minutes."""
    if _is_s3(fs):
        fs.retries = 1
    return fs


def _is_s3(fs: fsspec.AbstractFileSystem) -> bool:
    return "s3" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))


def _put_local(target: Path, data: bytes | Path, *, new: bool) -> None:
    """Write and sync a temporary file; link it to a `new` name (atomic, fails where the name is taken), or rename it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temp = target.with_name(f"{_LOCAL_TEMP}{uuid.uuid4().hex}")
    try:
        with temp.open("xb") as out, io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as content:
            shutil.copyfileobj(content, out, BLOCK)
            out.flush()
            os.fsync(out.fileno())
        if new:
            _link(temp, target)
        else:
            temp.replace(target)
            _sync_folder(target.parent)
    finally:
        temp.unlink(missing_ok=True)


def _link(temp: Path, target: Path) -> None:
    try:
        os.link(temp, target)
    except OSError as error:
        if error.errno not in _NO_LINKS_ERRNO:
            raise
        raise StoreUnsafe(
            f"the file system of {target.parent} has no hard links ({error.strerror}), which create a file whole "
            "and never twice; use another disk, or s3:// instead of a bucket that is mounted as a folder."
        ) from error


def _sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_object(path: str) -> bool:
    """Return whether a path is no folder marker and no file that is still being written."""
    name = path.rsplit("/", 1)[-1]
    return name != "" and not name.startswith(_LOCAL_TEMP)


def _whole(data: bytes, expected: int) -> bytes:
    if len(data) != expected:
        raise ConnectionError(f"received {len(data)} of {expected} bytes")
    return bytes(data)


def sha256_file(path: Path) -> str:
    """Return the sha256 hex of a local file's content; about 1.5 GB/s."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _modified(info: Mapping[str, Any]) -> datetime:
    value = info.get("LastModified") or info.get("mtime") or info.get("created")
    if isinstance(value, datetime):
        return value if value.tzinfo else value.replace(tzinfo=UTC)
    return datetime.fromtimestamp(float(value or 0.0), tz=UTC)
