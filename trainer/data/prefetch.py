"""Packed sequences prepared ahead of the training loop, in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from trainer.checkpoint import wait_for_store
from trainer.data.dataset import PackedCache
from trainer.data.sequence import PackedSequence


class Interrupted(Exception):
    """The wait for a sequence ended because `Prefetcher.interrupted` said so; nothing was consumed."""


class Prefetcher:
    """Run a PackedCache in a thread and pass on its (sequence, state) pairs in order.

    depth  how many sequences wait ready; 0 runs without a thread
    pin    pin their memory, so that copies to the GPU overlap with compute
    While the store is away the thread starts again from the last state, for ten minutes at most. Its errors are raised
    where the sequence was requested.
    """

    def __init__(self, dataset: PackedCache, *, depth: int = 4, pin: bool = False) -> None:
        self._dataset, self._pin = dataset, pin
        self._state = dataset.state()
        self._pairs: Iterator[tuple[PackedSequence, dict[str, Any]]] | None = None
        self._stop = threading.Event()
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=max(depth, 1))
        self._thread: threading.Thread | None = None
        self._end: BaseException | None = None
        self.interrupted: Callable[[], bool] = lambda: False
        """Polled while a sequence is waited for: true ends the wait with Interrupted (with a thread, depth > 0)."""
        if depth:
            self._thread = threading.Thread(target=self._fill, name="packed-cache", daemon=True)
            self._thread.start()

    def _prepare(self) -> tuple[PackedSequence, dict[str, Any]] | None:
        pair = wait_for_store(self._read, "reading the cache")
        if pair is None:
            return None
        sequence, self._state = pair
        return (sequence.pin_memory() if self._pin else sequence), self._state

    def _read(self) -> tuple[PackedSequence, dict[str, Any]] | None:
        if self._pairs is None:
            self._pairs = self._dataset.with_states(self._state)
        try:
            return next(self._pairs, None)
        except Exception:
            self._pairs = None  # a generator that raised is spent: the next attempt starts from the last state
            raise

    def _fill(self) -> None:
        while not self._stop.is_set():
            try:
                item: Any = self._prepare()
            except BaseException as error:  # handed to the consumer, who raises it
                item = error
            while not self._stop.is_set():
                try:
                    self._queue.put(item, timeout=0.2)
                    break
                except queue.Full:
                    continue
            if item is None or isinstance(item, BaseException):
                return

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> tuple[PackedSequence, dict[str, Any]]:
        if self._end is None:
            item = self._wait() if self._thread else self._prepare()
            if item is not None and not isinstance(item, BaseException):
                return item
            self._end = item or StopIteration()  # the thread is gone: a second wait would never end
        raise self._end

    def _wait(self) -> Any:
        while True:
            try:
                return self._queue.get(timeout=0.2)
            except queue.Empty:
                if self.interrupted():
                    raise Interrupted from None

    def close(self) -> None:
        """End the thread and the reading of the cache."""
        self._stop.set()
        if self._thread:
            self._thread.join(timeout=10)
        if self._pairs is not None:
            self._pairs.close()  # type: ignore[attr-defined]
