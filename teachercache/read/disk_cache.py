"""Keep whole data files in a bounded folder that the students of one node share. Safe between processes."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from teachercache.errors import CorruptFile
from teachercache.format.objects import FileEntry
from teachercache.store.store import Store

STALE_SECONDS = 3600.0  # a download that was killed stops holding room
_TEMP = ".tmp-"


class DiskCache:
    """Files named by their sha256; the least recently used go first. A file in use stays readable when it is evicted."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Use `folder`, which is made where it is missing, for at most `max_bytes`."""
        self.folder, self.max_bytes = folder, max_bytes
        folder.mkdir(parents=True, exist_ok=True)

    def fetch(self, store: Store, entry: FileEntry) -> pa.NativeFile | None:
        """Return a verified local copy, opened; it is downloaded once for all processes.

        None where the bound or the disk has no room for it.
        """
        if entry.size > self.max_bytes:
            return None
        path = self.folder / f"{entry.sha256}.parquet"
        with self._locked(entry.sha256[:2]):
            try:
                os.utime(path)
                return pa.memory_map(str(path))
            except FileNotFoundError:
                temp = self._reserve(entry.size)
            if temp is None:
                return None
            try:
                self._download(store, entry, temp)
                opened = pa.memory_map(str(temp))  # before the rename: another process may evict it right after
                temp.rename(path)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                warnings.warn(f"{self.folder}: {error.strerror}; reading from the store instead.", stacklevel=2)
                return None
            finally:
                temp.unlink(missing_ok=True)
        return opened

    def forget(self, entry: FileEntry) -> None:
        """Drop the copy of a file that turned out to be damaged."""
        (self.folder / f"{entry.sha256}.parquet").unlink(missing_ok=True)

    def size(self) -> int:
        """Return the bytes held, downloads in flight included."""
        return sum(size for _, size, _ in self._held())

    def _reserve(self, size: int) -> Path | None:
        """Make a temporary file of `size` bytes, after evicting as much; None where downloads in flight hold the room."""
        with self._locked("evict"):
            held = sorted(self._held())
            total = sum(s for _, s, _ in held)
            for modified, s, path in held:
                if total + size <= self.max_bytes:
                    break
                if path.name.startswith(_TEMP) and time.time() - modified < STALE_SECONDS:
                    continue
                path.unlink(missing_ok=True)
                total -= s
            if total + size > self.max_bytes:
                return None
            temp = self.folder / f"{_TEMP}{uuid.uuid4().hex}"
            with temp.open("xb") as out:
                out.truncate(size)
            return temp

    def _download(self, store: Store, entry: FileEntry, temp: Path) -> None:
        with temp.open("r+b") as out:
            digest = store.download(entry.path, entry.size, out)
            out.flush()
            os.fsync(out.fileno())  # else a power cut may keep the name and lose the bytes
        if digest != entry.sha256:
            raise CorruptFile(f"{entry.path} does not have the sha256 of its manifest; run `teachercache verify`.")

    def _held(self) -> Iterator[tuple[float, int, Path]]:
        """(time, size, path) of each file, once. Copies in flight first: one that gets its name meanwhile is then met there."""
        seen: set[int] = set()
        for pattern in (f"{_TEMP}*", "*.parquet"):
            for path in self.folder.glob(pattern):
                try:
                    stat = path.stat()
                except FileNotFoundError:  # another process evicted or renamed it
                    continue
                if stat.st_ino not in seen:
                    seen.add(stat.st_ino)
                    yield stat.st_mtime, stat.st_size, path

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """One download of a file at a time on this node; 256 lock files in all."""
        with (self.folder / f".lock-{name}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
