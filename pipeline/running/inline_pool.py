"""One worker in this process, one shard at a time: a single GPU without Ray, and tests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipeline.running.tasks import Failed, Finished, PoolState, ShardTask

if TYPE_CHECKING:
    from pipeline.running.worker import ShardWorker


class InlinePool:
    """A pool of one worker that `make_worker` makes, and makes again after its engine died; see tasks.Pool."""

    def __init__(self, make_worker: Callable[[], ShardWorker], gpus: float = 0.0) -> None:
        self._make, self._gpus = make_worker, gpus
        self._worker: ShardWorker | None = make_worker()
        self._queue: deque[ShardTask] = deque()
        self._deaths, self._began = 0, time.monotonic()

    def free_slots(self) -> int:
        """Return 1 where the worker is idle, else 0."""
        return 0 if self._queue else 1

    def submit(self, task: ShardTask, solo: bool = False) -> bool:
        """Queue a task; `wait` runs it."""
        self._queue.append(task)
        return True

    def wait(self, timeout_s: float) -> list[Finished | Failed]:
        """Run the queued task to its end, however long that takes."""
        if not self._queue:
            time.sleep(min(timeout_s, 0.05))
            return []
        task = self._queue.popleft()
        if self._worker is None:
            self._worker = self._make()
        try:
            return [Finished(task, self._worker.run(task))]
        except Exception as error:
            if self._worker.loop.dead:
                self._deaths += 1
                self.close()
            return [Failed.of(task, error)]

    def state(self) -> PoolState:
        """Return the counts; the GPUs count from the pool's start."""
        spent = self._gpus * (time.monotonic() - self._began)
        return PoolState(1, int(self._worker is not None), 0, self._deaths, spent)

    def worker_states(self) -> list[dict[str, Any]]:
        """Return the worker's state."""
        return [self._worker.state()] if self._worker else []

    def close(self) -> None:
        """Free the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
