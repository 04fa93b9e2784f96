"""The driver at scale, simulated: 100,000 shards over 1,000 actors, a store with S3's latencies, no teacher.

    python benchmarks/pipeline_simulation.py [--shards 100000] [--actors 1000]

The driver's own code runs (pipeline/running/driver.py) against a pool of simulated actors and a simulated store in virtual
time: a shard takes 90 s ± 30 %, 1 % of the attempts fail and 0.1 % of the actors die under them, listings cost 100 ms a
page of 1,000 keys. Measured in real time: receipts handled a second of the driver's CPU, peak memory, and the time to
resume a half-done job with the simulated listing added. Results: benchmarks/results/pipeline_simulation.json.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.config import RunConfig  # noqa: E402
from pipeline.running.driver import Driver  # noqa: E402
from pipeline.running.tasks import Failed, Finished, PoolState  # noqa: E402
from pipeline.running.worker import Receipt, ShardTask  # noqa: E402
from teachercache import PlanShard  # noqa: E402

PAGE, PAGE_S = 1_000, 0.1  # keys of one S3 listing page, seconds for it


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedStore:
    """Commits in memory; listing advances the virtual clock as S3 would."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.done: set[str] = set()
        self.quarantined: dict[str, str] = {}
        self.listings = 0
        self.listing_s = 0.0

    def committed(self) -> set[str]:
        seconds = (len(self.done) // PAGE + 1) * PAGE_S
        self.clock.now += seconds
        self.listings += 1
        self.listing_s += seconds
        return set(self.done)

    def quarantine(self, shard_id: str, *, reason: str, message: str, documents: Sequence[str] = ()) -> None:
        self.quarantined[shard_id] = reason


class SimulatedPool:
    """`actors` × `slots` tasks at a time, ended by a heap of virtual times."""

    def __init__(self, store: SimulatedStore, clock: Clock, actors: int, slots: int, seed: int = 0) -> None:
        self.store, self.clock = store, clock
        self.capacity = actors * slots
        self.heap: list[tuple[float, int, ShardTask]] = []
        self.serial = self.receipts = 0
        self.rng = random.Random(seed)

    def free_slots(self) -> int:
        return self.capacity - len(self.heap)

    def submit(self, task: ShardTask, solo: bool = False) -> bool:
        self.serial += 1
        heapq.heappush(self.heap, (self.clock.now + self.rng.uniform(63, 117), self.serial, task))
        return True

    def wait(self, timeout_s: float) -> list[Finished | Failed]:
        if not self.heap:
            self.clock.now += timeout_s
            return []
        self.clock.now = max(self.clock.now, min(self.heap[0][0], self.clock.now + timeout_s))
        events: list[Finished | Failed] = []
        while self.heap and self.heap[0][0] <= self.clock.now:
            task = heapq.heappop(self.heap)[2]
            luck = self.rng.random()
            if luck < 0.01:
                events.append(Failed(task, "error", "simulated"))
            elif luck < 0.011:
                events.append(Failed(task, "died", "simulated"))
            else:
                won = task.shard.shard_id not in self.store.done
                self.store.done.add(task.shard.shard_id)
                events.append(Finished(task, Receipt(task.shard.shard_id, won=won, tokens=2_000_000, rows=2_000_000)))
        self.receipts += len(events)
        return events

    def state(self) -> PoolState:
        return PoolState(ready=1000, wanted=1000)

    def worker_states(self) -> list[dict[str, object]]:
        return []

    def close(self) -> None:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--actors", type=int, default=1_000)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "pipeline_simulation.json")
    options = parser.parse_args()
    shards = [
        PlanShard(shard_id=f"{i:032x}", source="web", input=f"s3://corpus/web/{i // 50:06d}.jsonl", input_digest="etag:x",
                  start=i, stop=i + 1, unit="bytes", estimated_tokens=2_000_000)
        for i in range(options.shards)
    ]  # fmt: skip
    clock = Clock()
    store = SimulatedStore(clock)
    pool = SimulatedPool(store, clock, options.actors, options.slots)
    driver = Driver(RunConfig(actors=options.actors), store, shards, lambda: pool, clock=clock)
    cpu, wall = time.process_time(), time.perf_counter()
    outcome = driver.run()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert outcome.reason == "done"
    assert len(store.done) + len(store.quarantined) == options.shards

    # resume a half-done job: from the call to the first submitted task
    half = SimulatedStore(Clock())
    half.done = {s.shard_id for s in shards[::2]}
    first: list[float] = []

    class FirstTask(SimulatedPool):
        def submit(self, task: ShardTask, solo: bool = False) -> bool:
            if not first:
                first.append(time.perf_counter())
            return super().submit(task, solo)

    began = time.perf_counter()
    resumed = Driver(
        RunConfig(actors=options.actors),
        half,
        shards,
        lambda: FirstTask(half, half.clock, options.actors, options.slots),
        clock=half.clock,
    )
    listing = (len(half.done) // PAGE + 1) * PAGE_S
    resumed.run()
    resume_s = first[0] - began + listing
    report = {
        "shards": options.shards,
        "actors": options.actors,
        "receipts": pool.receipts,
        "receipts_per_cpu_second": round(pool.receipts / cpu),
        "driver_cpu_s": round(cpu, 2),
        "driver_wall_s": round(wall, 2),
        "virtual_hours": round(clock.now / 3600, 2),
        "listings": store.listings,
        "listing_virtual_s": round(store.listing_s, 1),
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "resume_half_done_s": round(resume_s, 2),
        "resume_of_which_listing_s": listing,
        "retries": outcome.tally.retries,
        "quarantined": len(store.quarantined),
        "cpus": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }
    print(json.dumps(report, indent=2))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    good = report["receipts_per_cpu_second"] >= 500 and report["peak_rss_gib"] < 1 and resume_s < 60
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
