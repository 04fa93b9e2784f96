"""The pull loop: dispatches shards to actors with room, and decides what becomes of those that fail.

A shard ends in one of three ways: committed (by us or by another job), quarantined with a reason, or given back.
Before anything is written, a trial scores a first document of every source; and the first shards are committed only once
it is known that not too many of their documents are left out.
Nothing here is needed for safety: commits are conditional creates, so a lost driver, a zombie or a second job costs
work, never a document.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pipeline.config import RunConfig
from pipeline.running.leases import StoreLeases
from pipeline.running.tasks import (
    ENOUGH_TO_JUDGE,
    Failed,
    Finished,
    Pool,
    PoolState,
    Receipt,
    ShardTask,
    failures,
    merge_suspects,
    said,
    too_many,
)
from teachercache import CacheWriter
from teachercache.errors import TeacherCacheError, UsageError
from teachercache.format.objects import PlanShard
from teachercache.store.failures import retry_while_unavailable

T = TypeVar("T")
STORE_PATIENCE_S = 900.0
REFRESH_S = 30.0  # how often commits of other jobs are looked up
FIRST_SHARDS = 4  # committed only once it is known how many of their documents are left out
TRIALS = 3  # shards of a source that may fail before a job gives up
STORE_TRIES = 30  # of a shard, with pauses of up to a minute
NARROWINGS = 12  # attempts that only find out which document kills the engine


@dataclass(slots=True)
class Tally:
    """Counts of one run, for progress lines and the summary."""

    total: int = 0
    committed: int = 0  # by this run
    found: int = 0  # committed already, or by another job meanwhile
    quarantined: int = 0
    retries: int = 0
    conflicts: int = 0
    documents: int = 0
    tokens: int = 0
    rows: int = 0
    bytes: int = 0
    reused_rows: int = 0
    drops: Counter[str] = field(default_factory=Counter)
    estimated_tokens_left: int = 0

    @property
    def done(self) -> int:
        """Return how many shards need no more work."""
        return self.committed + self.found + self.quarantined


@dataclass(slots=True)
class Outcome:
    """How a run ended: `reason` is done, budget or stopped."""

    reason: str
    tally: Tally
    quarantined: dict[str, str]
    seconds: float
    gpu_hours: float = 0.0  # that this run's actors held GPUs


@dataclass(slots=True)
class _Pending:
    task: ShardTask
    not_before: float = 0.0
    failures: int = 0
    narrowings: int = 0
    store_errors: int = 0
    solo: bool = False
    accepted: bool = False  # whatever it leaves out


class Driver:
    """Runs the shards of a plan on a pool. `on_progress` is called every `run.log_every_s`, `on_event` for every event.

    begin: called once a document of every source was scored (or is committed), and before anything is written.
    """

    def __init__(
        self,
        run: RunConfig,
        store: CacheWriter,
        shards: Sequence[PlanShard],
        pool: Callable[[], Pool],
        *,
        leases: StoreLeases | None = None,
        on_progress: Callable[[Tally, PoolState], None] | None = None,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
        stop: threading.Event | None = None,
        begin: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        refresh_s: float = REFRESH_S,
    ) -> None:
        self.run_config, self.store, self._make_pool = run, store, pool
        self.leases = leases
        self._on_progress = on_progress or (lambda tally, state: None)
        self._on_event = on_event or (lambda name, details: None)
        self.stop = stop or threading.Event()
        self._begin = begin
        self._held: list[tuple[_Pending, Receipt]] = []  # shards that lost too much, until the first ones are judged
        self._details: dict[str, str] = {}
        self._clock, self._refresh_s = clock, refresh_s
        self.shards = {s.shard_id: s for s in shards}
        self.tally = Tally(total=len(self.shards))
        self.quarantined: dict[str, str] = {}
        self._pending: deque[_Pending] = deque()
        self._running: dict[str, _Pending] = {}
        self._others: set[str] = set()

    # -- the loop ------------------------------------------------------------------------------------------------

    def run(self, skip: set[str] | None = None) -> Outcome:
        """Work until every shard is committed or quarantined, the budget is spent, or `stop` is set.

        skip: shards quarantined earlier that are not to be tried again. Raises UsageError for a misused job and
        TeacherCacheError where no actor can start or the store stays away for STORE_PATIENCE_S.
        """
        began = self._clock()
        committed = self._patiently(self.store.committed)
        self.tally.found = len(committed & self.shards.keys())
        skipped = (skip or set()) - committed
        self.tally.quarantined = len(skipped & self.shards.keys())
        todo = [s for s in self.shards.values() if s.shard_id not in committed and s.shard_id not in skipped]
        # two jobs on one cache begin at different places; the order is otherwise that of the plan
        turn = random.Random(uuid.uuid4().int).randrange(len(todo)) if todo else 0
        self._pending.extend(_Pending(ShardTask(s)) for s in todo[turn:] + todo[:turn])
        self.tally.estimated_tokens_left = sum(s.estimated_tokens for s in todo)
        if not todo:
            if self._begin is not None:
                self._begin()
            return Outcome("done", self.tally, self.quarantined, self._clock() - began)
        pool = self._make_pool()
        try:
            reason = "done"
            if self._begin is not None:
                known = {s.corpus for s in self.shards.values() if s.shard_id in committed}
                reason = self._trial(pool, [s for s in todo if s.corpus not in known])
                if reason == "done":
                    self._begin()
            if reason == "done":
                reason = self._loop(pool)
        finally:
            pool.close()
            if self.leases is not None:
                self.leases.release()
        return Outcome(reason, self.tally, self.quarantined, self._clock() - began, pool.state().gpu_seconds / 3600)

    # -- before anything is written --------------------------------------------------------------------------------

    def _trial(self, pool: Pool, shards: Sequence[PlanShard]) -> str:
        """Score a first document of each source; return `done` or `stopped`.

        Raises UsageError where a source gives no document, or where its first ENOUGH_TO_JUDGE cannot be used, and
        TeacherCacheError where every input is damaged or the teacher fails TRIALS times.
        """
        sources: dict[int, list[PlanShard]] = {}
        for shard in shards:
            sources.setdefault(shard.corpus, []).append(shard)
        for of_source in sources.values():
            drops: Counter[str] = Counter()
            details: dict[str, str] = {}
            failed: dict[str, Failed] = {}  # by input
            for shard in of_source:
                if shard.input in failed:
                    continue
                event = self._try(pool, shard)
                if event is None:
                    return "stopped"
                if isinstance(event, Failed):
                    failed[shard.input] = event
                    if event.kind in ("died", "timeout"):
                        break  # the loop narrows down what kills an engine
                    if event.kind != "input" and len(failed) >= TRIALS:
                        raise TeacherCacheError(f"nothing was written: {event.message}")
                    continue
                if event.receipt.documents:
                    break
                drops.update(event.receipt.drops)
                details = event.receipt.details | details
                if failures(drops) >= ENOUGH_TO_JUDGE and self.run_config.max_drop_share < 1:
                    raise _nothing_usable(of_source[0].source, shard, drops, details, "the first")
            else:
                if failed:
                    raise TeacherCacheError(f"nothing was written: {next(iter(failed.values())).message}")
                if drops.keys() != {"duplicate"}:  # those are in the cache under another source
                    raise _nothing_usable(of_source[0].source, of_source[0], drops, details, "all")
        return "done"

    def _try(self, pool: Pool, shard: PlanShard) -> Finished | Failed | None:
        """Run the trial of a shard, waiting out an outage of a store; None where `stop` is set. Raises UsageError."""
        task, tries, submitted = ShardTask(shard, trial=True), 0, False
        while not self.stop.is_set():
            submitted = submitted or (pool.free_slots() > 0 and pool.submit(task))
            for event in pool.wait(0.5):
                if isinstance(event, Finished):
                    return event
                if event.kind == "usage":
                    raise _usage(event)
                if event.kind != "store" or tries == STORE_TRIES:
                    return event
                self._on_event("store", {"message": event.message})
                tries, submitted = tries + 1, False
                self.stop.wait(min(60.0, 2.0**tries))
        return None

    def _judged(self, held: int, documents: int) -> bool:
        """Return whether enough is known of the first shards: FIRST_SHARDS and ENOUGH_TO_JUDGE documents, or all there is."""
        enough = self.tally.committed + held >= FIRST_SHARDS and documents >= ENOUGH_TO_JUDGE
        return enough or (held > 0 and not (self._pending or self._running))

    def _judge(self) -> None:
        """Stop where too many documents of the first shards, or of all so far, cannot be used; else go on with those held.

        Raises UsageError.
        """
        share, tally = self.run_config.max_drop_share, self.tally
        held: Counter[str] = Counter()
        documents = tally.documents + sum(receipt.documents for _, receipt in self._held)
        for _, receipt in self._held:
            held.update(receipt.drops)
            self._details = receipt.details | self._details
        drops = tally.drops + held
        if self._held and not self._judged(len(self._held), documents + failures(drops)):
            return
        if too_many(documents, drops, share):
            lost = failures(drops)
            worst = f", many in {self._held[0][0].task.shard.input}" if self._held else ""
            kept = f"{tally.committed} shards of this run are" if tally.committed else "nothing of this run is"
            raise UsageError(
                f"{lost} of the first {documents + lost} documents cannot be used: {said(drops, self._details)}{worst}; "
                f"{kept} committed. Correct the input or the recipe and run the same command again, or allow "
                f"it with run.max_drop_share={min(1.0, lost / (documents + lost) + 0.05):.2f}"
            )
        for entry, _ in self._held:
            entry.accepted = True
            self._pending.append(entry)
        self._held.clear()

    def _loop(self, pool: Pool) -> str:
        refreshed = reported = self._clock()
        budget_s = (self.run_config.budget_gpu_hours or float("inf")) * 3600
        self._refresh_leases()
        while self._pending or self._running or self._held:
            if self._held and not (self._pending or self._running):
                self._judge()
            if self.stop.is_set():
                return "stopped"
            spent = pool.state().gpu_seconds >= budget_s
            if spent and not self._running:
                return "budget"
            if not spent:
                self._dispatch(pool)
            for event in pool.wait(0.5):
                entry = self._running.pop(event.task.shard.shard_id)
                if isinstance(event, Finished):
                    self._committed(event)
                else:
                    self._failed(entry, event)
            now = self._clock()
            if now - refreshed >= self._refresh_s:
                self._refresh()
                refreshed = now
            if now - reported >= self.run_config.log_every_s:
                self._report(pool)
                reported = now
        self._report(pool)
        return "done"

    def _report(self, pool: Pool) -> None:
        state = pool.state()
        state.workers = pool.worker_states()
        self._on_progress(self.tally, state)

    def _dispatch(self, pool: Pool) -> None:
        """Submit tasks while there is room; what other jobs have leased comes last."""
        now = self._clock()
        free = pool.free_slots()
        waiting: list[_Pending] = []
        leased: list[_Pending] = []
        while free > 0 and (self._pending or leased):
            if not self._pending:
                entry = leased.pop(0)
            else:
                entry = self._pending.popleft()
                if entry.not_before > now:
                    waiting.append(entry)
                    continue
                if entry.task.shard.shard_id in self._others and entry.failures == 0:
                    leased.append(entry)
                    continue
            first = not entry.accepted and not self._judged(0, self.tally.documents + failures(self.tally.drops))
            entry.task = replace(entry.task, max_drop_share=self.run_config.max_drop_share if first else 1.0)
            if not pool.submit(entry.task, solo=entry.solo):
                waiting.append(entry)
                continue
            self._running[entry.task.shard.shard_id] = entry
            free -= 1
        self._pending.extendleft(reversed(leased))
        self._pending.extend(waiting)

    # -- events --------------------------------------------------------------------------------------------------

    def _committed(self, event: Finished) -> None:
        receipt, tally = event.receipt, self.tally
        tally.estimated_tokens_left -= event.task.shard.estimated_tokens
        if not receipt.won:
            tally.conflicts += 1
            tally.found += 1
            return
        tally.committed += 1
        for name in ("documents", "tokens", "rows", "bytes", "reused_rows"):
            setattr(tally, name, getattr(tally, name) + getattr(receipt, name))
        tally.drops.update(receipt.drops)
        self._details = self._details | receipt.details
        self._judge()
        self._on_event("committed", {"shard": receipt.shard_id, "tokens": receipt.tokens, "seconds": receipt.seconds})

    def _failed(self, entry: _Pending, event: Failed) -> None:
        if event.kind == "usage":
            raise _usage(event)
        if event.kind == "drops" and event.receipt is not None:
            self._held.append((entry, event.receipt))
            self._judge()
            return
        shard_id = event.task.shard.shard_id
        self._on_event("failed", {"shard": shard_id, "kind": event.kind, "message": event.message})
        if event.kind == "input":
            self._quarantine(event.task, "input", event.message)
            return
        now = self._clock()
        if event.kind == "store":
            entry.store_errors += 1
            if entry.store_errors <= STORE_TRIES:
                entry.not_before = now + min(60.0, 2.0**entry.store_errors)
                self._requeue(entry, event.task)
                return
        task = self._narrow(entry, event)
        if entry.failures > self.run_config.max_retries:
            self._quarantine(event.task, event.kind, event.message)
            return
        entry.not_before = now + min(30.0, 0.5 * 2**entry.failures)
        self._requeue(entry, task)

    def _requeue(self, entry: _Pending, task: ShardTask) -> None:
        self.tally.retries += 1
        entry.task = replace(task, attempt=task.attempt + 1)
        self._pending.append(entry)

    def _narrow(self, entry: _Pending, event: Failed) -> ShardTask:
        """Narrow down what killed an engine: run alone, score suspects one at a time, leave out the proven one.

        An attempt that learns something (fewer suspects, a culprit) is not held against the shard.
        """
        task, found = event.task, event.suspects
        killed, was_solo = event.kind in ("died", "timeout"), entry.solo
        entry.solo = was_solo or killed
        if not killed or not found:
            entry.failures += 1
            return task
        if was_solo and task.suspects and len(found) == 1:
            rest = tuple(ordinal for ordinal in task.suspects if ordinal not in found)
            narrowed = replace(task, exclude=(*task.exclude, *found), suspects=rest)
        else:
            narrowed = replace(task, suspects=merge_suspects(task.suspects, found))
        entry.narrowings += 1
        if narrowed == task or entry.narrowings > NARROWINGS:
            entry.failures += 1
        return narrowed

    def _quarantine(self, task: ShardTask, reason: str, message: str) -> None:
        shard_id = task.shard.shard_id
        self.quarantined[shard_id] = message
        self.tally.quarantined += 1
        self.tally.estimated_tokens_left -= task.shard.estimated_tokens
        documents = [f"{task.shard.input}@{ordinal}" for ordinal in (*task.exclude, *task.suspects)][:100]
        self._patiently(lambda: self.store.quarantine(shard_id, reason=reason, message=message, documents=documents))
        self._on_event("quarantined", {"shard": shard_id, "reason": reason, "message": message})

    # -- other jobs ----------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Drop pending shards that another job has committed, and renew the leases."""
        committed = self._patiently(self.store.committed)
        kept: deque[_Pending] = deque()
        for entry in self._pending:
            if entry.task.shard.shard_id in committed:
                self.tally.found += 1
                self.tally.estimated_tokens_left -= entry.task.shard.estimated_tokens
            else:
                kept.append(entry)
        self._pending = kept
        self._refresh_leases()

    def _refresh_leases(self) -> None:
        if self.leases is None:
            return
        try:
            self._others = self.leases.others()
            ahead = [e.task.shard.shard_id for e in list(self._pending)[: 2 * max(1, self.run_config.actors)]]
            self.leases.announce([*self._running, *(s for s in ahead if s not in self._others)])
        except (OSError, TeacherCacheError) as error:  # advisory: work goes on without them
            self._on_event("leases", {"message": str(error)})

    def _patiently(self, action: Callable[[], T]) -> T:
        return retry_while_unavailable(
            action,
            patience_s=STORE_PATIENCE_S,
            on_retry=lambda error, _: self._on_event("store", {"message": str(error)}),
            stop=self.stop,
        )


def _usage(event: Failed) -> UsageError:
    error = UsageError(event.message)
    error.exit_code = event.exit_code
    return error


def _nothing_usable(
    source: str, shard: PlanShard, drops: Counter[str], details: dict[str, str], which: str
) -> UsageError:
    lost = drops.total()
    what = f"{which} {lost} documents are left out: {said(drops, details)}" if lost else "its files hold no document"
    return UsageError(f"source {source!r} gives no document ({shard.input}): {what}; nothing was written")
