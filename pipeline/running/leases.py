"""Advisory leases: a job says which shards it works on, so that a second job on the same cache starts elsewhere.

One small object per job and renewal below leases/, create-only like everything else. Losing, ignoring or misreading
them costs double work and nothing else.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress

from teachercache.errors import StoreDenied, TeacherCacheError
from teachercache.format.layout import LEASES
from teachercache.store.store import Store

LEASE_S = 300.0


class StoreLeases:
    """The leases of one job below leases/ of a cache; one that is older than `lease_s` has expired."""

    def __init__(self, store: Store, lease_s: float = LEASE_S, clock: Callable[[], float] = time.time) -> None:
        self._store, self._lease_s, self._clock = store, lease_s, clock
        self._job = uuid.uuid4().hex
        self._serial = 0
        self._announced = 0.0
        self._mine: list[str] = []

    def others(self) -> set[str]:
        """Return the shards that another job announced within the lease time."""
        newest: dict[str, tuple[str, float]] = {}
        for info in self._store.list(LEASES):
            job = info.path.removeprefix(LEASES).split("/", 1)[0]
            age = self._clock() - info.modified.timestamp()
            if job != self._job and age < self._lease_s:
                newest[job] = (info.path, age)  # names sort by serial: the last one is the newest
        taken: set[str] = set()
        for path, _ in newest.values():
            with suppress(ValueError, TeacherCacheError):  # gone or half understood: then it is no lease
                taken.update(str(s) for s in json.loads(self._store.read(path))["shards"])
        return taken

    def announce(self, shards: Sequence[str]) -> None:
        """Take the shards that this job works on; a no-op until a third of the lease has passed."""
        now = self._clock()
        if self._mine and now - self._announced < self._lease_s / 3:
            return
        self._serial += 1
        path = f"{LEASES}{self._job}/{self._serial:08d}.json"
        self._store.create(path, json.dumps({"shards": list(shards)}).encode())
        for old in self._mine:
            with suppress(StoreDenied):  # a writer without the right to delete leaves them to expire
                self._store.delete(old)
        self._mine, self._announced = [path], now

    def release(self) -> None:
        """Give everything back; leftovers expire by themselves."""
        with suppress(TeacherCacheError):
            for path in self._mine:
                self._store.delete(path)
            self._mine.clear()
