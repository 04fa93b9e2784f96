"""The pull loop without Ray: retries, narrowing, budget, other jobs, a store that fails for a while."""

from __future__ import annotations

import random
import threading

import pytest

from pipeline.config import RunConfig
from pipeline.running.driver import Driver
from pipeline.running.tasks import Failed, Finished, PoolState, Receipt, ShardTask
from teachercache import PlanShard
from teachercache.errors import StoreUnavailable, UsageError


def shards(count: int) -> list[PlanShard]:
    return [
        PlanShard(shard_id=f"s{i:05d}", source="s", input=f"f{i}", input_digest="d", stop=1, estimated_tokens=100)
        for i in range(count)
    ]


class MemoryStore:
    def __init__(self) -> None:
        self.done: set[str] = set()
        self.quarantines: dict[str, str] = {}
        self.down = 0

    def committed(self) -> set[str]:
        if self.down:
            self.down -= 1
            raise StoreUnavailable("down")
        return set(self.done)

    def quarantine(self, shard_id, *, reason, message, documents=()):
        self.quarantines[shard_id] = reason


class ScriptedPool:
    """Runs `behave(task)` at once; it returns an event."""

    def __init__(self, behave, slots: int = 4) -> None:
        self.behave, self.slots = behave, slots
        self.tasks: list[tuple[ShardTask, bool]] = []
        self.log: list[tuple[ShardTask, bool]] = []
        self.gpu_seconds = 0.0

    def free_slots(self) -> int:
        return self.slots - len(self.tasks)

    def submit(self, task, solo=False):
        if solo and self.tasks:
            return False
        self.tasks.append((task, solo))
        self.log.append((task, solo))
        return True

    def wait(self, timeout_s):
        events = [self.behave(task) for task, _ in self.tasks]
        self.tasks.clear()
        return events

    def state(self) -> PoolState:
        return PoolState(gpu_seconds=self.gpu_seconds)

    def worker_states(self):
        return []

    def close(self) -> None:
        pass


def drive(store, pool, todo, **run):
    looks = iter(range(0, 10**9, 40))  # 40 s a look: waits between tries are over at once
    clock = lambda: float(next(looks))  # noqa: E731
    driver = Driver(RunConfig(**run), store, todo, lambda: pool, clock=clock, refresh_s=1e-9)
    return driver, driver.run()


def finishing(store):
    def behave(task):
        won = task.shard.shard_id not in store.done
        store.done.add(task.shard.shard_id)
        return Finished(task, Receipt(task.shard.shard_id, won=won, tokens=10))

    return behave


def test_every_shard_is_done_once_and_committed_ones_are_skipped():
    store = MemoryStore()
    store.done = {"s00001", "s00002"}
    pool = ScriptedPool(finishing(store))
    _, outcome = drive(store, pool, shards(20))
    assert (outcome.reason, outcome.tally.committed, outcome.tally.found) == ("done", 18, 2)
    assert len({t.shard.shard_id for t, _ in pool.log}) == len(pool.log) == 18


def test_a_shard_that_keeps_failing_is_quarantined_after_the_limit_and_others_go_on():
    store = MemoryStore()
    good = finishing(store)
    pool = ScriptedPool(lambda t: Failed(t, "error", "bad") if t.shard.shard_id == "s00003" else good(t))
    _, outcome = drive(store, pool, shards(6), max_retries=2)
    assert outcome.tally.committed == 5
    assert store.quarantines == {"s00003": "error"}
    assert sum(t.shard.shard_id == "s00003" for t, _ in pool.log) == 3


def test_damaged_input_is_not_retried():
    store = MemoryStore()
    pool = ScriptedPool(lambda t: Failed(t, "input", "cut short"))
    drive(store, pool, shards(1))
    assert len(pool.log) == 1


def test_the_one_document_that_kills_engines_is_found_and_left_out():
    store, good = MemoryStore(), None
    good = finishing(store)
    culprit, rng = 41, random.Random(0)

    def behave(task):
        if culprit in task.exclude:
            return good(task)
        if task.suspects:  # scored one at a time: the engine dies with the culprit alone inside
            return Failed(task, "died", "dead", (culprit,)) if culprit in task.suspects else good(task)
        if task.attempt == 0:
            return Failed(task, "died", "process gone")  # nothing is known the first time
        return Failed(task, "died", "dead", tuple(sorted({culprit, *rng.sample(range(100), 20)})))

    pool = ScriptedPool(behave)
    _, outcome = drive(store, pool, shards(1), max_retries=1)
    assert outcome.tally.committed == 1
    assert pool.log[-1][0].exclude == (culprit,)
    assert len(pool.log) <= 5
    assert all(solo for _, solo in pool.log[1:])  # a neighbour's death must not be blamed on this shard


def test_store_errors_wait_and_are_not_held_against_the_shard():
    store = MemoryStore()
    good, failures = finishing(store), {"left": 10}

    def behave(task):
        if failures["left"]:
            failures["left"] -= 1
            return Failed(task, "store", "503")
        return good(task)

    store.down = 0
    _, outcome = drive(store, ScriptedPool(behave), shards(2), max_retries=0)
    assert outcome.tally.committed == 2
    assert not store.quarantines


def test_a_misused_job_stops_at_once_with_its_exit_status():
    store = MemoryStore()
    with pytest.raises(UsageError, match="credentials") as caught:
        drive(store, ScriptedPool(lambda t: Failed(t, "usage", "credentials", exit_code=2)), shards(3))
    assert caught.value.exit_code == 2


def test_budget_stops_cleanly_and_the_next_run_goes_on():
    store = MemoryStore()
    good = finishing(store)
    pool = ScriptedPool(good, slots=1)

    def behave(task):
        pool.gpu_seconds += 3600
        return good(task)

    pool.behave = behave
    _, outcome = drive(store, pool, shards(10), budget_gpu_hours=3)
    assert (outcome.reason, outcome.tally.committed) == ("budget", 3)
    _, outcome = drive(store, ScriptedPool(finishing(store)), shards(10))
    assert (outcome.reason, outcome.tally.committed, outcome.tally.found) == ("done", 7, 3)


def test_shards_that_another_job_commits_meanwhile_are_not_done_again():
    store = MemoryStore()
    todo = shards(40)
    good = finishing(store)

    def behave(task):
        store.done.update(s.shard_id for s in todo[::2])  # the other job is fast
        return good(task)

    pool = ScriptedPool(behave)
    _, outcome = drive(store, pool, todo)
    assert outcome.tally.committed + outcome.tally.found == 40
    assert len(pool.log) < 30


def test_leased_shards_come_last_but_are_not_left_out():
    class Leases:
        def others(self):
            return {f"s{i:05d}" for i in range(5)}

        def announce(self, shards):
            pass

        def release(self):
            pass

    store = MemoryStore()
    pool = ScriptedPool(finishing(store))
    driver = Driver(RunConfig(), store, shards(15), lambda: pool, leases=Leases())
    outcome = driver.run()
    assert outcome.tally.committed == 15
    assert {t.shard.shard_id for t, _ in pool.log[-5:]} == {f"s{i:05d}" for i in range(5)}


def test_stop_gives_back_without_waiting():
    store, stop = MemoryStore(), threading.Event()
    stop.set()
    driver = Driver(RunConfig(), store, shards(5), lambda: ScriptedPool(finishing(store)), stop=stop)
    assert driver.run().reason == "stopped"
    assert not store.done
