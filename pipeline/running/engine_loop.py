"""One thread owns the teacher; any number of shards score through it at a time, so that the engine never waits.

    reader/tokeniser thread of each shard ──budget──▶ inbox ──▶ engine thread ──▶ results in input order ──▶ encoder

Two bounds keep memory flat for documents of any length: the engine holds at most `max_inflight_tokens`, and a shard at
most twice that between its reader and its consumer. An input whose rows are broken (NaN: the whole forward pass may
have been garbage) is scored once more while nothing else is inside, and only then given up.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pipeline.corpus.encode import Window
from pipeline.errors import EngineDied
from pipeline.teachers.base import Scored, Teacher

T = TypeVar("T")

_WORTH_A_SECOND_TRY = {"nan", "inf", "zero_row", "column_zero", "no_rows", "unsorted"}


@dataclass(slots=True, eq=False)
class _Item:
    client: _Client
    index: int
    window: Window
    alone: bool = False
    tried_alone: bool = False

    @property
    def tokens(self) -> int:
        return len(self.window.input_ids)


@dataclass(slots=True, eq=False)
class _Client:
    """One shard's view: what it fed and what came back. Guarded by the loop's condition."""

    budget: int
    held: int = 0
    fed: int = 0
    results: dict[int, tuple[Window, Scored]] = field(default_factory=dict)
    exhausted: bool = False
    closed: bool = False
    error: BaseException | None = None  # of the source: raised after everything before it
    died: EngineDied | None = None


class EngineLoop:
    """Starts the teacher in a thread and scores windows for several shards. Raises what `start` raises."""

    def __init__(self, start: Callable[[], Teacher], max_inflight_tokens: int) -> None:
        self._start, self._max = start, max_inflight_tokens
        self._cond = threading.Condition()
        self._inbox: deque[_Item] = deque()
        self._alone: deque[_Item] = deque()
        self._inside: dict[int, _Item] = {}
        self._calls: deque[tuple[Callable[[Teacher], Any], Future[Any]]] = deque()
        self._clients: list[_Client] = []
        self._serial = 0
        self._stopping = False
        self._dead: EngineDied | None = None
        self._started: Future[None] = Future()
        self.teacher: Teacher
        self.busy_s = 0.0  # the engine held at least one input
        self.tokens = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._started.result()

    # -- the shard's side ----------------------------------------------------------------------------------------

    def score(self, windows: Iterator[Window], alone: bool = False) -> Iterator[tuple[Window, Scored]]:
        """Score windows as they are read and yield them in their order. `alone`: one at a time, nothing else inside.

        Raises what the source raises (after the windows before it) and EngineDied, whose suspects are the ordinals
        of this shard's documents that were inside.
        """
        client = _Client(budget=1 if alone else 2 * self._max)
        with self._cond:
            if self._dead is not None:
                raise EngineDied(str(self._dead))
            self._clients.append(client)
        feeder = threading.Thread(target=self._feed, args=(client, windows, alone), name="reader", daemon=True)
        feeder.start()
        try:
            for index in itertools.count():
                with self._cond:
                    self._cond.wait_for(partial(self._answer_ready, client, index))
                    if index not in client.results:
                        if problem := client.died or client.error:
                            raise problem
                        return
                    window, scored = client.results.pop(index)
                    client.held -= len(window.input_ids)
                    self._cond.notify_all()
                yield window, scored
        finally:
            with self._cond:
                client.closed = True
                self._inbox = deque(i for i in self._inbox if i.client is not client)
                self._clients.remove(client)
                self._cond.notify_all()
            feeder.join(timeout=60)

    def _answer_ready(self, client: _Client, index: int) -> bool:
        return index in client.results or client.died is not None or (client.exhausted and index >= client.fed)

    def _may_feed(self, client: _Client, size: int) -> bool:
        ended = client.closed or client.died is not None
        return ended or client.held == 0 or client.held + size <= client.budget

    def _feed(self, client: _Client, windows: Iterator[Window], alone: bool) -> None:
        try:
            for window in windows:
                size = len(window.input_ids)
                with self._cond:
                    self._cond.wait_for(partial(self._may_feed, client, size))
                    if client.closed or client.died is not None:
                        return
                    item = _Item(client, client.fed, window, alone=alone, tried_alone=alone)
                    client.fed += 1
                    client.held += size
                    (self._alone if alone else self._inbox).append(item)
                    self._cond.notify_all()
        except BaseException as error:
            client.error = error
        finally:
            with self._cond:
                client.exhausted = True
                self._cond.notify_all()

    def call(self, action: Callable[[Teacher], T]) -> T:
        """Run `action(teacher)` in the engine's thread while nothing is inside, and return what it returns."""
        answer: Future[T] = Future()
        with self._cond:
            if self._dead is not None:
                raise self._dead
            self._calls.append((action, answer))
            self._cond.notify_all()
        return answer.result()

    def depths(self) -> tuple[int, int]:
        """Return (inputs inside the engine, inputs waiting for it)."""
        with self._cond:
            return len(self._inside), len(self._inbox) + len(self._alone)

    # -- the engine's side ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.teacher = self._start()
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        try:
            while self._step():
                pass
        except EngineDied as error:
            self._mark_dead(error)
        except BaseException as error:  # whatever the engine raises, its state is unknown
            self._mark_dead(EngineDied(f"{type(error).__name__}: {error}"))

    def _step(self) -> bool:
        with self._cond:
            self._cond.wait_for(lambda: self._inbox or self._alone or self._inside or self._calls or self._stopping)
            if self._stopping:
                return False
            call = self._calls.popleft() if self._calls and not self._inside else None
            ready = [] if self._calls or call else self._take()
        began = time.monotonic()
        if call is not None:
            self._answer(*call)
            self.busy_s += time.monotonic() - began
            return True
        for item in ready:
            self._serial += 1
            self._inside[self._serial] = item
            self.teacher.submit(self._serial, item.window.input_ids, item.window.row_pos)
        done = self.teacher.collect()
        self.busy_s += time.monotonic() - began
        if done:
            with self._cond:
                for scored in done:
                    self._deliver(scored)
                self._cond.notify_all()
        return True

    def _answer(self, action: Callable[[Teacher], Any], answer: Future[Any]) -> None:
        try:
            answer.set_result(action(self.teacher))
        except Exception as error:  # travels to the caller as itself
            answer.set_exception(error)
            if isinstance(error, EngineDied):
                raise

    def _take(self) -> list[_Item]:
        """Return the items that may enter now; one that must be alone waits until the engine is empty."""
        if self._alone and not self._inside:
            return [self._alone.popleft()]
        if self._alone or any(item.alone for item in self._inside.values()):
            return []
        held = sum(item.tokens for item in self._inside.values())
        ready: list[_Item] = []
        while self._inbox and (not (self._inside or ready) or held + self._inbox[0].tokens <= self._max):
            item = self._inbox.popleft()
            held += item.tokens
            ready.append(item)
        return ready

    def _deliver(self, scored: Scored) -> None:
        item = self._inside.pop(scored.key)
        self.tokens += item.tokens
        if scored.error is not None and scored.error.reason in _WORTH_A_SECOND_TRY and not item.tried_alone:
            item.alone = item.tried_alone = True
            self._alone.append(item)
            return
        if not item.client.closed:
            item.client.results[item.index] = (item.window, scored)

    def _mark_dead(self, error: EngineDied) -> None:
        """Tell every shard that the engine is gone and which of its documents were inside."""
        with self._cond:
            self._dead = error
            for client in self._clients:
                suspects = {item.window.ordinal for item in self._inside.values() if item.client is client}
                client.died = EngineDied(str(error), sorted(suspects))
            for _, answer in self._calls:
                answer.set_exception(EngineDied(str(error)))
            self._cond.notify_all()

    @property
    def dead(self) -> bool:
        """Return whether the engine is gone."""
        return self._dead is not None

    def stop(self) -> None:
        """End the thread and free the teacher."""
        with self._cond:
            self._stopping = True
            self._cond.notify_all()
        self._thread.join(timeout=30)
        if hasattr(self, "teacher"):
            self.teacher.close()
