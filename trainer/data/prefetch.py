"""Packed sequences prepared ahead of the training loop, in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from typing import Any, TypeAlias

import torch

from trainer.checkpoint import wait_for_store
from trainer.data.sequence import PackedSequence
from trainer.data.shared_order import SharedOrder

Pair: TypeAlias = tuple[PackedSequence, dict[str, Any]]


class Interrupted(Exception):
    """The wait for a sequence ended because `stop` was set; nothing was consumed."""


class Prefetcher:
    """Run a PackedCache or MixedCaches in a thread and pass on its (sequence, state) pairs in order.

    depth  how many sequences wait ready
    pin    pin their memory, so that copies to the GPU overlap with compute
    stop   where it is set, a wait for a sequence that is not ready ends with Interrupted
    While the store is away the thread starts again from the last state, for ten minutes at most. Its errors are raised
    where the sequence was requested.
    """

    def __init__(
        self, dataset: SharedOrder, *, depth: int = 4, pin: bool = False, stop: threading.Event | None = None
    ) -> None:
        self._dataset, self._pin, self._interrupt = dataset, pin, stop
        self._device = (
            torch.cuda.current_device() if pin else None
        )  # of several ranks' GPUs; a new thread has the first
        self._state = dataset.state()
        self._pairs: Generator[Pair] | None = None
        self._closed = threading.Event()
        self._queue: queue.Queue[Pair | BaseException | None] = queue.Queue(maxsize=depth)
        self._end: BaseException | None = None
        self._thread = threading.Thread(target=self._fill, name="packed-cache", daemon=True)
        self._thread.start()

    def _read(self) -> Pair | None:
        if self._pairs is None:
            self._pairs = self._dataset.with_states(self._state)
        try:
            return next(self._pairs, None)
        except Exception:
            self._pairs = None  # a generator that raised is spent: the next attempt starts from the last state
            raise

    def _fill(self) -> None:
        item: Pair | BaseException | None = None
        if self._device is not None:
            torch.cuda.set_device(self._device)
        while not self._closed.is_set():
            try:
                item = wait_for_store(self._read, "reading the cache")
                if item is not None:
                    sequence, self._state = item
                    item = (sequence.pin_memory() if self._pin else sequence), self._state
            except BaseException as error:  # handed to the consumer, who raises it
                item = error
            while not self._closed.is_set():
                try:
                    self._queue.put(item, timeout=0.2)
                    break
                except queue.Full:
                    continue
            if item is None or isinstance(item, BaseException):
                return

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> Pair:
        while self._end is None:
            try:
                item = self._queue.get(timeout=0.2)
            except queue.Empty:
                if self._interrupt is not None and self._interrupt.is_set():
                    raise Interrupted from None
                continue
            if isinstance(item, tuple):
                return item
            self._end = item or StopIteration()  # the thread is gone: a second wait would never end
        raise self._end

    def close(self) -> None:
        """End the thread and the reading of the cache."""
        self._closed.set()
        self._thread.join(timeout=10)
        if self._pairs is not None:
            self._pairs.close()
