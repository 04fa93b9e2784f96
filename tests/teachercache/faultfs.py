"""An object store in memory that does on purpose what real ones do by accident, and a scheduler of its clients.

`FaultFS` is an fsspec file system with S3's semantics: whole-object puts, conditional create, strong consistency, a clock
for itself. Every I/O of every actor passes one gate, where a schedule decides: who goes next, who crashes before or
after it, which answer is lost, refused or damaged, and when time leaps. Nothing is random: a schedule is a list of
choices, and the explorer enumerates the lists.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fsspec

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
READS = {"cat_file", "info"}
LISTS = {"find"}
WRITES = {"put", "rm"}

# Faults of one I/O. `crash` ends the actor as SIGKILL would; the others reach it as the store's answer.
ANYWHERE = ("crash before", "crash after", "500", "slow down")
FAULTS = {
    "put": (*ANYWHERE, "lost acknowledgement", "409", "412 in flight"),
    "rm": (*ANYWHERE, "lost acknowledgement"),
    "cat_file": (*ANYWHERE, "truncated", "corrupted"),
    "info": ANYWHERE,
    "find": (*ANYWHERE, "stale"),
}


class Crash(BaseException):
    """The actor is dead: not an Exception, so that nothing in the code under test can survive it."""


class ClientError(Exception):
    """A botocore-shaped error."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}}


@dataclass
class Stored:
    data: bytes
    modified: datetime


class FaultFS(fsspec.AbstractFileSystem):
    """`gate(op, path)` is called before each I/O and returns a fault or None."""

    protocol = "fault"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, Stored] = {}
        self.seconds = 0.0
        self.gate: Callable[[str, str], str | None] = lambda op, path: None
        self.ignore_conditions = False  # a deliberately broken store: overwrite instead of create
        self.overwritten: list[str] = []

    def _io(self, op: str, path: str, perform: Callable[[], object]) -> object:
        fault = self.gate(op, path)
        self.seconds += 0.001
        if fault == "crash before":
            raise Crash
        if fault == "500":
            raise ClientError("InternalError")
        if fault == "slow down":
            raise ClientError("SlowDown")
        if fault == "409":
            raise ClientError("ConditionalRequestConflict")
        if fault == "412 in flight":
            raise ClientError("PreconditionFailed")
        result = perform()
        if fault == "crash after":
            raise Crash
        if fault == "lost acknowledgement":
            raise ConnectionResetError("connection reset by peer")
        if fault == "truncated":
            return bytes(result)[: len(result) // 2]
        if fault == "corrupted" and result:
            damaged = bytearray(result)
            damaged[len(damaged) // 2] ^= 0x15
            return bytes(damaged)
        return result

    def now(self) -> datetime:
        return EPOCH + timedelta(seconds=self.seconds)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._io("put", path, lambda: self._put(path, bytes(value), mode))

    def put_file(self, lpath, rpath, mode="overwrite", **kwargs):
        data = Path(lpath).read_bytes()
        self._io("put", rpath, lambda: self._put(rpath, data, mode))

    def _put(self, path: str, data: bytes, mode: str) -> None:
        if path in self.objects:
            if mode == "create" and not self.ignore_conditions:
                raise ClientError("PreconditionFailed")
            self.overwritten.append(path)
        self.objects[path] = Stored(data, self.now())

    def cat_file(self, path, start=None, end=None, **kwargs):
        return self._io("cat_file", path, lambda: self._get(path).data[start:end])

    def info(self, path, **kwargs):
        return self._io("info", path, lambda: self._describe(path))

    def find(self, path, detail=False, **kwargs):
        names = [name for name in self.objects if name.startswith(path.rstrip("/") + "/")]
        return self._io("find", path, lambda: {name: self._describe(name) for name in names})

    def rm_file(self, path):
        self._io("rm", path, lambda: self.objects.pop(path, None))

    def _get(self, path: str) -> Stored:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path]

    def _describe(self, path: str) -> dict[str, object]:
        stored = self._get(path)
        return {"name": path, "size": len(stored.data), "type": "file", "LastModified": stored.modified}


class InlinePool:
    """ThreadPoolExecutor's interface without threads: one actor's I/Os keep their order."""

    def __init__(self, *args, **kwargs) -> None: ...

    def __enter__(self):
        return self

    def __exit__(self, *args) -> None: ...

    def map(self, function, *iterables):
        return [function(*items) for items in zip(*iterables, strict=False)]


@dataclass
class Actor:
    name: str
    work: Callable[[], object]
    thread: threading.Thread | None = None
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waiting_for: tuple[str, str] | None = None  # the I/O before which it waits
    fault: str | None = None
    finished: bool = False
    outcome: object = None  # a result, or the exception


class Scheduler:
    """Runs actors one I/O at a time, in the order that `choose` gives."""

    def __init__(self, fs: FaultFS) -> None:
        self._fs = fs
        self._me = threading.local()
        self._idle = threading.Semaphore(0)
        fs.gate = self._gate

    def start(self, actors: list[Actor]) -> None:
        for actor in actors:
            actor.thread = threading.Thread(target=self._run, args=(actor,), daemon=True)
            actor.thread.start()
            self._idle.acquire()  # it waits before its first I/O, or is done

    def step(self, actor: Actor, fault: str | None = None) -> None:
        """Let an actor do the I/O that it waits before, with a fault or without, up to its next one."""
        actor.fault, actor.waiting_for = fault, None
        actor.go.release()
        self._idle.acquire()

    def _run(self, actor: Actor) -> None:
        self._me.actor = actor
        try:
            actor.outcome = actor.work()
        except BaseException as error:
            actor.outcome = error
        actor.finished = True
        self._idle.release()

    def _gate(self, op: str, path: str) -> str | None:
        actor: Actor | None = getattr(self._me, "actor", None)
        if actor is None:  # the test itself looks at the store
            return None
        actor.waiting_for = (op, path)
        self._idle.release()
        actor.go.acquire()
        return actor.fault


def explore(run: Callable[[list[int]], list[int]]) -> Iterator[list[int]]:
    """Every schedule of a run, depth first. `run(choices)` follows the given choices, then takes 0 at every further
    point, and returns how many options each point had."""
    choices: list[int] = []
    while True:
        widths = run(list(choices))
        taken = choices + [0] * (len(widths) - len(choices))
        yield taken
        while taken and taken[-1] + 1 >= widths[len(taken) - 1]:
            taken.pop()
        if not taken:
            return
        taken[-1] += 1
        choices = taken
