"""A run's lease on its output: of two runs into one folder, the second ends at once and names the first.

    <output>/lease/00000003.json     who writes here: host, process, start, last heartbeat, whether it has ended

The highest number counts. A number is created conditionally, so one of two runs gets it, and is never used again. Its
owner alone replaces the object, every HEARTBEAT_S, and looks whether a higher number has come. Whoever takes over,
creates the next number. A process that was asleep meanwhile finds it, and stops before it writes a checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from teachercache.console import note
from teachercache.errors import Exists, MissingObject, StoreUnsafe, TeacherCacheError, UsageError
from teachercache.store.store import ObjectInfo, Store

FOLDER = "lease/"
HEARTBEAT_S = 20.0
STALE_S = 120.0
"""A run on another machine may be taken over once its last heartbeat is this old."""
_NAME = re.compile(r"lease/([0-9]{8})\.json")
_MAX_BYTES = 2**16


class LeaseLost(TeacherCacheError):
    """Another run took this run's output over; nothing of the two is mixed."""

    code = "TC-T103"
    remedy = "Look at the run that the message names; to go on here, end it and run the command again."


@dataclass(frozen=True)
class Holder:
    """The run that has a lease, as the object says."""

    host: str = "an unknown host"
    pid: int = 0
    process: str = ""
    """Boot, process namespace and start of the process; empty where they are unknown."""
    token: str = ""
    started: str = "an unknown time"
    beat: int = 0
    """Heartbeats so far, so that no two objects are equal."""
    released: bool = False


@dataclass(frozen=True)
class _Found:
    number: int
    holder: Holder
    object: ObjectInfo | None = None


class Lease:
    """The lease of this process on the folder of a store. Use `peek`, then `acquire`, `check` now and then, `release`.

    take_over   take the place of a run whose heartbeat is older than STALE_S
    A run of this machine whose process is gone is taken over in any case. On a store that has no conditional create
    no run is kept out, and a line says so. Cost: a listing and a read, then a small write every HEARTBEAT_S.
    """

    def __init__(self, store: Store, *, take_over: bool) -> None:
        self._store, self._take_over = store, take_over
        started = datetime.now(UTC).isoformat(timespec="seconds")
        self._me = Holder(
            host=socket.gethostname(),
            pid=os.getpid(),
            process=_process(os.getpid()),
            token=uuid.uuid4().hex,
            started=started,
        )
        self._number: int | None = None
        self._lost: LeaseLost | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def peek(self) -> None:
        """Raise UsageError, naming the holder, where `acquire` would; takes nothing."""
        self._check_free(self._newest())

    def acquire(self) -> None:
        """Take the lease and begin its heartbeats. Raises UsageError, naming the holder, while another run has it."""
        found = self._newest()
        self._check_free(found)
        number = found.number + 1
        try:
            self._store.create(_path(number), _bytes(self._me))
        except Exists:  # someone else was as quick
            self._check_free(self._newest())
            raise UsageError(f"{self._store.url}: another run began here just now; choose another output") from None
        except StoreUnsafe as error:
            note(f"two runs into this output would not notice each other: {error}", "note")
            return
        self._number = number
        if found.number and not found.holder.released:
            note(f"took over from {self._described(found)}", "note")
        self._remove_older()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Ask the store whether the lease is still ours; LeaseLost if another run has taken over."""
        if self._number is None:
            return
        found = self._newest()
        if self._lost is None and (found.number != self._number or found.holder.token != self._me.token):
            self._lost = LeaseLost(
                f"{self._store.url} was taken over by {self._described(found)}: this run has stopped and saved nothing more"
            )
        if self._lost is not None:
            raise self._lost

    @property
    def lost(self) -> bool:
        """Whether a heartbeat found that another run has taken over; costs nothing."""
        return self._lost is not None

    def release(self) -> None:
        """End the heartbeats and say that this run has ended. Safe to call twice; never raises for a store's failure."""
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join(timeout=10)  # a store that is away holds it up
        self._thread = None
        with suppress(TeacherCacheError):
            self.check()
            self._replace(replace(self._me, released=True))

    # ---- the object --------------------------------------------------------------------------------------------

    def _newest(self) -> _Found:
        """Return the lease that counts; number 0 and released where there is none."""
        for _ in range(3):  # it may be removed between the listing and the read
            numbers = {int(m[1]): o for o in self._store.list(FOLDER) if (m := _NAME.fullmatch(o.path))}
            if not numbers:
                return _Found(0, Holder(released=True))
            number = max(numbers)
            with suppress(MissingObject):
                return _Found(number, _parse(self._store.read(_path(number), max_bytes=_MAX_BYTES)), numbers[number])
        return _Found(number, Holder(), numbers[number])

    def _check_free(self, found: _Found) -> None:
        holder = found.holder
        if holder.released or _is_gone(holder):
            return
        age = self._age(found)
        if age < STALE_S:
            raise UsageError(
                f"{self._store.url} is being written by {self._described(found)}, last heartbeat {age:.0f} s ago; choose "
                f"another output, or end that run. Should it have died: from {STALE_S:.0f} s after its last heartbeat on, "
                "--take-over continues it"
            )
        if not self._take_over:
            raise UsageError(
                f"{self._store.url} was left by {self._described(found)}, last heartbeat {age:,.0f} s ago; once you know that it "
                "has ended, --take-over (take_over=true) continues it"
            )

    def _age(self, found: _Found) -> float:
        """Return the seconds since the last heartbeat, by the clock that stamped it."""
        if found.object is None:
            return 0.0
        now = datetime.now(UTC) if self._store.is_local else self._store.now()
        return max(0.0, (now - found.object.modified).total_seconds())

    def _described(self, found: _Found) -> str:
        holder = found.holder
        return f"a run on {holder.host[:100]} (process {holder.pid}, started {holder.started[:40]})"

    def _replace(self, holder: Holder) -> None:
        assert self._number is not None
        self._store.replace(_path(self._number), _bytes(holder))

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            try:
                self.check()
                self._me = replace(self._me, beat=self._me.beat + 1)
                self._replace(self._me)
            except LeaseLost:
                return
            except Exception:  # nosec B112: the store is away: the training loop says so where it needs it
                continue

    def _remove_older(self) -> None:
        for item in self._store.list(FOLDER):
            match = _NAME.fullmatch(item.path)
            if match and self._number is not None and int(match[1]) < self._number:
                with suppress(TeacherCacheError):  # a right that a writer need not have
                    self._store.delete(item.path)


def _path(number: int) -> str:
    return f"{FOLDER}{number:08d}.json"


def _bytes(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()


def _parse(data: bytes) -> Holder:
    """Return the holder that an object names; one that is not understood is a holder without a name."""
    try:
        tree = json.loads(data)
        known = {name: tree[name] for name, default in asdict(Holder()).items() if type(tree[name]) is type(default)}
    except (ValueError, KeyError, TypeError, RecursionError):
        return Holder()
    return Holder(**known)


def _process(pid: int) -> str:
    """Return what tells a process of this machine from every other: boot, namespace, start; "" where that is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        started = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""
    return f"{boot} {namespace} {started}"


def _is_gone(holder: Holder) -> bool:
    """Return whether the holder's process is known to have ended: it ran on this machine, and is no more."""
    mine = _process(os.getpid())
    same_machine = bool(mine) and holder.process.split()[:2] == mine.split()[:2]
    return same_machine and _process(holder.pid) != holder.process
