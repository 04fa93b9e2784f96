"""The disk cache of a node: its bound, and what a full disk costs."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from teachercache.read.disk_cache import DiskCache
from teachercache.store.store import Store
from teachercache.testing import synthetic_spec
from tests.teachercache.caches import names, streamed

SPEC = synthetic_spec()


def test_a_copy_that_gets_its_name_while_room_is_counted_is_counted(tmp_path, monkeypatch):
    """Else two streams of a node reserve the same room, and the bound does not hold."""
    disk = DiskCache(tmp_path, 1000)
    temp, real = tmp_path / ".tmp-in-flight", Path.glob
    temp.write_bytes(bytes(600))

    def glob_and_rename(folder, pattern):
        found = list(real(folder, pattern))
        if temp.exists():
            temp.rename(tmp_path / "done.parquet")
        return iter(found)

    monkeypatch.setattr(Path, "glob", glob_and_rename)
    assert disk.size() == 600


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return streamed(tmp_path_factory.mktemp("stream") / "cache")


def test_a_full_scratch_disk_costs_the_local_copy_and_not_the_run(cache, tmp_path, monkeypatch):
    def full(store, path, size, out):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Store, "download", full)
    plain = names(cache.stream(seed=3, repeat=False))
    with pytest.warns(UserWarning, match="No space left on device"):
        assert names(cache.stream(seed=3, repeat=False, cache_dir=tmp_path)) == plain
    assert not list(tmp_path.glob("*.parquet")) + list(tmp_path.glob(".tmp-*"))
