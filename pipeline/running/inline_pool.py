"""What the driver knows of workers: slots, tasks, events.  Ray, one process, or a simulation stand behind it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pipeline.corpus.readers import InputDamaged
from pipeline.running.worker import (
    InputChanged,
    Receipt,
    ShardTask,
    ShardWorker,
)
from pipeline.teachers.base import EngineDied
from teachercache.errors import (
    CommitConflict,
    StoreUnavailable,
    TeacherCacheError,
    UsageError,
)

Kind = Literal["input", "error", "died", "timeout", "store", "usage"]


@dataclass(slots=True)
class Finished:
    task: ShardTask
    receipt: Receipt


@dataclass(slots=True)
class Failed:
    """A task that came to nothing.  `suspects`: documents (ordinals) that were inside a dead engine, if known."""

    task: ShardTask
    kind: Kind
    message: str
    suspects: tuple[int, ...] = ()
    exit_code: int = 1


@dataclass(slots=True)
class PoolState:
    """For the live view."""

    wanted: int = 0
    ready: int = 0
    starting: int = 0
    deaths: int = 0
    gpu_seconds: float = 0.0
    workers: list[dict[str, Any]] = field(default_factory=list)


class Pool(Protocol):
    def free_slots(self) -> int:
        """Tasks that may be given now."""

    def submit(self, task: ShardTask, solo: bool = False) -> bool:
        """Starts a task; `solo` on a worker that does nothing else.  False where no such worker is free now."""

    def wait(self, timeout_s: float) -> list[Finished | Failed]:
        """Blocks until something happens or the time is over.  Raises TeacherCacheError where no worker can start."""

    def state(self) -> PoolState:
        """Counts; cheap."""

    def worker_states(self) -> list[dict[str, Any]]:
        """What each worker says of itself; those that do not answer are left out."""

    def close(self) -> None:
        """Ends all workers."""


def classify(error: BaseException) -> tuple[Kind, str, tuple[int, ...], int]:
    """(kind, message, suspects, exit code) of what a shard raised."""
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, (InputDamaged, InputChanged)):
        return "input", message, (), 1
    if isinstance(error, EngineDied):
        return "died", message, error.suspects, 1
    if isinstance(error, StoreUnavailable):
        return "store", message, (), 1
    if isinstance(error, UsageError):
        return "usage", message, (), error.exit_code
    if isinstance(error, CommitConflict):
        return "error", message, (), 1
    if isinstance(error, TeacherCacheError):
        return "error", message, (), 1
    return "error", f"{type(error).__name__}: {message}", (), 1


class InlinePool:
    """One worker in this process, one shard at a time: a single GPU without Ray, and tests."""

    def __init__(self, make_worker: Callable[[], ShardWorker], gpus: float = 0.0) -> None:
        self._make, self._gpus = make_worker, gpus
        self._worker: ShardWorker | None = make_worker()
        self._queue: deque[ShardTask] = deque()
        self._deaths, self._began = 0, time.monotonic()

    def free_slots(self) -> int:
        return 0 if self._queue else 1

    def submit(self, task: ShardTask, solo: bool = False) -> bool:
        self._queue.append(task)
        return True

    def wait(self, timeout_s: float) -> list[Finished | Failed]:
        if not self._queue:
            time.sleep(min(timeout_s, 0.05))
            return []
        task = self._queue.popleft()
        if self._worker is None:
            self._worker = self._make()
        try:
            return [Finished(task, self._worker.run(task))]
        except Exception as error:
            kind, message, suspects, code = classify(error)
            if self._worker.loop.dead:
                self._deaths += 1
                self._worker.close()
                self._worker = None
            return [Failed(task, kind, message, suspects, code)]

    def state(self) -> PoolState:
        spent = self._gpus * (time.monotonic() - self._began)
        return PoolState(1, int(self._worker is not None), 0, self._deaths, spent)

    def worker_states(self) -> list[dict[str, Any]]:
        return [self._worker.state()] if self._worker else []

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def merge_suspects(old: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """Documents that may have killed an engine: those of both deaths where they agree, else the newer set."""
    both = sorted(set(old) & set(new))
    return tuple(both) if both else tuple(new)
