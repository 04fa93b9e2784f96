"""The driver and `status` at scale: 100,000 shards over 1,000 actors and 1,000,000 files, no teacher.

    python benchmarks/pipeline_simulation.py [--shards 100000] [--actors 1000] [--files 1000000]

The driver's own code runs (pipeline/running/driver.py) against a pool of simulated actors and a simulated store in virtual
time: a shard takes 90 s ± 30 %, 1 % of the attempts fail and 0.1 % of the actors die under them, listings cost 100 ms a
page of 1,000 keys. Measured in real time: receipts handled a second of the driver's CPU, peak memory, and the time to
resume a half-done job with the simulated listing added. Then `open` and `status` run, each in a new process, on a cache
on disk whose newest manifest settled all shards, in parts; its commits and data are names alone, since neither command
reads them. Results: benchmarks/results/pipeline_simulation.json.
"""

from __future__ import annotations

import heapq
import json
import multiprocessing
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import RESULTS, host, parser, write
from pipeline.config import RunConfig
from pipeline.running.driver import Driver
from pipeline.running.tasks import Failed, Finished, PoolState, Receipt, ShardTask
from teachercache import Manifest, Plan, PlanShard
from teachercache.format import layout
from teachercache.format.objects import ManifestFile
from teachercache.format.sealed import seal
from teachercache.store.store import Store
from teachercache.testing import synthetic_spec
from teachercache.write.publish import split_manifest

PAGE, PAGE_S = 1_000, 0.1  # keys of one S3 listing page, seconds for it


class SimulatedStore:
    """Commits in memory, and the virtual time; listing advances it as S3 would."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done: set[str] = set()
        self.quarantined: dict[str, str] = {}
        self.listings: list[float] = []  # seconds of each

    def committed(self) -> set[str]:
        self.listings.append((len(self.done) // PAGE + 1) * PAGE_S)
        self.now += self.listings[-1]
        return set(self.done)

    def quarantine(self, shard_id: str, *, reason: str, message: str, documents: Sequence[str] = ()) -> None:
        self.quarantined[shard_id] = reason


class SimulatedPool:
    """`actors` × `slots` tasks at a time, ended by a heap of virtual times."""

    def __init__(self, store: SimulatedStore, actors: int, slots: int, seed: int = 0) -> None:
        self.store, self.capacity = store, actors * slots
        self.heap: list[tuple[float, int, ShardTask]] = []
        self.serial = self.receipts = 0
        self.first_submitted: float | None = None  # in real time
        self.rng = random.Random(seed)

    def free_slots(self) -> int:
        return self.capacity - len(self.heap)

    def submit(self, task: ShardTask, solo: bool = False) -> bool:
        self.serial += 1
        self.first_submitted = self.first_submitted or time.perf_counter()
        heapq.heappush(self.heap, (self.store.now + self.rng.uniform(63, 117), self.serial, task))
        return True

    def wait(self, timeout_s: float) -> list[Finished | Failed]:
        now = self.store.now
        self.store.now = max(now, min(self.heap[0][0], now + timeout_s)) if self.heap else now + timeout_s
        events: list[Finished | Failed] = []
        while self.heap and self.heap[0][0] <= self.store.now:
            task = heapq.heappop(self.heap)[2]
            luck = self.rng.random()
            if luck < 0.011:
                events.append(Failed(task, "error" if luck < 0.01 else "died", "simulated"))
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
        pass


def make_large_cache(folder: Path, shards: int, files: int) -> None:
    """Write spec, plan, commits' names and one manifest in parts: `files` files of `shards` shards."""
    spec = synthetic_spec()
    store = Store.open(folder)
    store.create(layout.SPEC, seal(spec))
    ids = [f"{i:032x}" for i in range(shards)]
    planned = [PlanShard(shard_id=name, source="web", input="s3://corpus/x", input_digest="etag:x") for name in ids]
    plan = Plan(spec_digest=spec.digest, created="2026-12-01", shards=planned)
    store.create(layout.plan_path(plan.digest), seal(plan))
    (folder / layout.COMMITS).mkdir()
    for name in ids:
        (folder / layout.commit_path(name)).touch()
    counts = {"records": 10, "documents": 10, "tokens": 1000, "rows": 1000}
    entries = [
        ManifestFile(
            path=str(layout.DataPath("open", "train", f"source-{i // shards}", ids[i % shards], f"{i:032x}")), codec="open",
            split="train", source=f"source-{i // shards}", size=1000, sha256=f"{i:064x}", row_groups=1,
            shard_id=ids[i % shards], **counts,
        )
        for i in range(files)
    ]  # fmt: skip
    entries.sort(key=lambda entry: entry.path)
    manifest = Manifest(
        number=1, spec_digest=spec.digest, created="2026-12-01", publisher="0" * 32, files=entries, plans=[plan.digest],
        shards_planned=shards, shards_committed=shards, shards_quarantined=0, complete=True,
        **{name: count * files for name, count in counts.items()},
    )  # fmt: skip
    head, parts, _ = split_manifest(manifest, None)
    for ref, part in parts:
        store.create(layout.part_path(ref.sha256), seal(part))
    store.create(layout.manifest_path(1), seal(head))


MEASURE = """
import json, resource, sys, time
began, what, url = time.perf_counter(), *sys.argv[1:]
if what == "open":
    import teachercache
    said = teachercache.open(url).manifest.rows
else:
    from pipeline.watching.status import read_status
    said = read_status(url)["rows"]
seconds, cpu, peak = time.perf_counter() - began, time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps({"seconds": round(seconds, 1), "cpu_s": round(cpu, 1), "peak_rss_gib": round(peak, 2), "rows": said}))
"""


def large_cache(shards: int, files: int) -> dict[str, Any]:
    """Return seconds and memory of `open` and `status` on a cache of that size."""
    with tempfile.TemporaryDirectory() as name:
        process = multiprocessing.get_context("spawn").Process(
            target=make_large_cache, args=(Path(name), shards, files)
        )
        process.start()
        process.join()
        assert process.exitcode == 0
        sizes = [path.stat().st_size for path in Path(name, layout.PARTS).iterdir()]
        found: dict[str, Any] = {"shards": shards, "files": files, "parts": len(sizes), "parts_bytes": sum(sizes)}
        found["head_bytes"] = Path(name, layout.manifest_path(1)).stat().st_size
        for what in ("open", "status"):
            command = [sys.executable, "-c", MEASURE, what, name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[what] = json.loads(done.stdout)
    return found


def main() -> int:
    out = RESULTS / "pipeline_simulation.json"
    options = parser(__doc__, shards=100_000, actors=1_000, slots=2, files=1_000_000, out=out).parse_args()
    run = RunConfig(actors=options.actors)
    same: dict[str, Any] = {"source": "web", "input_digest": "etag:x", "unit": "bytes", "estimated_tokens": 2_000_000}
    files = (f"s3://corpus/web/{i // 50:06d}.jsonl" for i in range(options.shards))
    shards = [PlanShard(shard_id=f"{i:032x}", input=f, start=i, stop=i + 1, **same) for i, f in enumerate(files)]
    store = SimulatedStore()
    pool = SimulatedPool(store, options.actors, options.slots)
    cpu, wall = time.process_time(), time.perf_counter()
    outcome = Driver(run, store, shards, lambda: pool, clock=lambda: store.now).run()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert outcome.reason == "done"
    assert len(store.done) + len(store.quarantined) == options.shards
    # resume a half-done job: from the call to the first submitted task
    half = SimulatedStore()
    half.done = {s.shard_id for s in shards[::2]}
    rest = SimulatedPool(half, options.actors, options.slots)
    began = time.perf_counter()
    Driver(run, half, shards, lambda: rest, clock=lambda: half.now).run()
    resume_s = (rest.first_submitted or began) - began + half.listings[0]
    report = {
        "shards": options.shards,
        "actors": options.actors,
        "receipts": pool.receipts,
        "receipts_per_cpu_second": round(pool.receipts / cpu),
        "driver_cpu_s": round(cpu, 2),
        "driver_wall_s": round(wall, 2),
        "virtual_hours": round(store.now / 3600, 2),
        "listings": len(store.listings),
        "listing_virtual_s": round(sum(store.listings), 1),
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "resume_half_done_s": round(resume_s, 2),
        "resume_of_which_listing_s": half.listings[0],
        "retries": outcome.tally.retries,
        "quarantined": len(store.quarantined),
        "large_cache": large_cache(options.shards, options.files),
        **host(),
    }
    print(json.dumps(report, indent=2))
    write(options.out, report)
    good = report["receipts_per_cpu_second"] >= 500 and report["peak_rss_gib"] < 1 and resume_s < 60
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
