"""The commit protocol under every crash, every bad answer and every interleaving that a small model can enumerate.

After each schedule, whatever happened: what every manifest names exists, is whole, and no document is there twice;
manifests never shrink; and running the work again without faults finishes it. The same explorer is then pointed at
protocols that are broken on purpose, and must find them out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from teachercache.errors import MissingObject, TeacherCacheError
from teachercache.format import layout
from teachercache.format.objects import Commit, Manifest, Plan, PlanShard
from teachercache.format.sealed import seal, unseal
from teachercache.format.spec import SampledRows
from teachercache.parquet.datafile import DataFile
from teachercache.store.ledger import Ledger
from teachercache.store.store import Store
from teachercache.testing import synthetic_records, synthetic_spec
from teachercache.upkeep.gc import collect
from teachercache.write.attempt import ShardAttempt
from teachercache.write.publish import publish
from teachercache.write.writer import CacheWriter
from tests.teachercache.faultfs import FAULTS, Actor, Crash, FaultFS, InlinePool, Scheduler, explore

SPECS = {
    "top_k": synthetic_spec(vocab_size=50, top_k=3),
    "sampled": synthetic_spec(vocab_size=50, rows=SampledRows(entries=3)),
}


def records_of(spec):
    return {s: synthetic_records(spec, 2, seed=i, prefix=s, length=3) for i, s in enumerate(("s0", "s1", "s2"))}


SPEC = SPECS["top_k"]
RECORDS = records_of(SPEC)
GRACE = 1000.0
TOTAL = Counter()


@pytest.fixture(autouse=True)
def without_threads(monkeypatch):
    for module in ("store.ledger", "write.uniqueness", "write.publish"):
        monkeypatch.setattr(f"teachercache.{module}.ThreadPoolExecutor", InlinePool)
    monkeypatch.setattr("teachercache.parquet.datafile.PRE_BUFFER", False)


@pytest.fixture(params=SPECS)
def kind(request, monkeypatch):
    """Rows of each kind in turn, in this module's worlds."""
    monkeypatch.setitem(globals(), "SPEC", SPECS[request.param])
    monkeypatch.setitem(globals(), "RECORDS", records_of(SPECS[request.param]))


@dataclass
class World:
    """One cache on one store, and what may be done to it."""

    fs: FaultFS = field(default_factory=FaultFS)
    commit: Callable[[World, str], object] = None
    grace: float = GRACE

    def __post_init__(self):
        self.commit = self.commit or World.honest_commit
        self.store().create(layout.SPEC, seal(SPEC))

    def store(self) -> Store:
        return Store(self.fs, "bucket/cache", "fault://bucket/cache", sleep=lambda seconds: None)

    def writer(self) -> CacheWriter:
        return CacheWriter(self.store(), SPEC, grace_seconds=self.grace)

    def honest_commit(self, shard: str, clock: Callable[[], float] | None = None):
        with ShardAttempt(
            self.store(), SPEC, shard, grace_seconds=self.grace, clock=clock or (lambda: self.fs.seconds)
        ) as attempt:
            attempt.build(RECORDS[shard])
            attempt.upload()
            return attempt.commit()

    def worker(self, *shards: str) -> Actor:
        def work():
            for shard in shards:
                self.commit(self, shard)

        return Actor(f"worker {shards}", work)

    def publisher(self) -> Actor:
        return Actor("publisher", lambda: publish(self.store(), SPEC, grace_seconds=self.grace))

    def collector(self) -> Actor:
        return Actor("collector", lambda: collect(self.store(), SPEC, grace_seconds=self.grace, dry_run=False))

    def job(self, *shards: str) -> Actor:
        """What a driver does: store the plan, commit what is not committed, publish."""
        planned = [PlanShard(shard_id=shard, source="default", input="memory", input_digest="") for shard in shards]

        def work():
            self.writer().put_plan(Plan(spec_digest=SPEC.digest, created="", shards=planned))
            done = self.writer().committed()
            for shard in shards:
                if shard not in done:
                    self.commit(self, shard)
            publish(self.store(), SPEC, grace_seconds=self.grace)

        return Actor("job", work)

    def manifests(self) -> list[Manifest]:
        """Every manifest with its parts, which must be there."""
        ledger = Ledger(self.store(), SPEC)
        return [ledger.manifest(number) for number in ledger.manifest_numbers()]

    # ---- what must hold --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every manifest's files exist and are whole, no document is twice in one, and none is smaller than the last."""
        prefix = "bucket/cache/"
        before: set[str] = set()
        for number, manifest in enumerate(self.manifests(), 1):
            assert manifest.number == number
            assert sum(run.records for run in manifest.keys) == manifest.records
            shards = {entry.shard_id for entry in manifest.files} | set(manifest.replaced)
            assert shards >= before, "a manifest shrank"
            before = shards
            documents = []
            for entry in manifest.files:
                assert prefix + entry.path in self.fs.objects, f"manifest {number} names {entry.path}, which is gone"
                with DataFile(self.store(), entry, SPEC) as file:
                    documents += [doc for block in file.blocks() for doc in block.doc_id]
            assert len(documents) == len(set(documents)), "a document is there twice"
        assert not self.fs.overwritten, f"{self.fs.overwritten[0]} was overwritten"
        for name, stored in self.fs.objects.items():
            if name.startswith(prefix + layout.COMMITS):
                for entry in unseal(Commit, stored.data, name).files:
                    there = prefix + entry.path in self.fs.objects
                    assert there or self.fs.seconds > GRACE, f"{name} names {entry.path}, which is not there"

    def finish(self, *shards: str) -> None:
        """Run the job again, without faults, as an operator would: a collection where publishing asks for one."""
        for attempt in range(3):
            work = self.job(*shards)
            try:
                work.work()
                break
            except TeacherCacheError:
                assert attempt < 2, "the work cannot be finished"
                self.fs.seconds += 2 * self.grace
                collect(self.store(), SPEC, grace_seconds=self.grace, dry_run=False)
        self.check()
        newest = self.manifests()[-1]
        assert {entry.shard_id for entry in newest.files} == set(shards), "a shard is missing"


def settle(world: World, actors: list[Actor], allowed: tuple[type, ...] = (TeacherCacheError, Crash)) -> None:
    """All threads have ended, each with a result, its own death, or an error that a user may see."""
    for actor in actors:
        assert actor.finished
        if isinstance(actor.outcome, BaseException) and not isinstance(actor.outcome, allowed):
            raise actor.outcome


def run_to_end(scheduler: Scheduler, actor: Actor) -> None:
    while not actor.finished:
        scheduler.step(actor)


def trace(make: Callable[[], tuple[World, Actor]]) -> list[tuple[str, str]]:
    """The I/Os of one actor without faults."""
    world, actor = make()
    scheduler, seen = Scheduler(world.fs), []
    scheduler.start([actor])
    while not actor.finished:
        seen.append(actor.waiting_for)
        scheduler.step(actor)
    settle(world, [actor], ())
    return seen


def with_faults(make: Callable[[], tuple[World, Actor]], faults: dict[int, str]) -> World:
    """Run one actor with a fault at each given I/O (counted as they come, so retries shift later ones)."""
    world, actor = make()
    scheduler, count = Scheduler(world.fs), 0
    stale = set(world.fs.objects)
    scheduler.start([actor])
    real_find = world.fs.find
    while not actor.finished:
        fault = faults.get(count)
        op = actor.waiting_for[0]
        if fault == "stale":
            hidden = {n for n in world.fs.objects if n not in stale}
            world.fs.find = lambda path, detail=False, **kw: {
                n: i
                for n, i in real_find(path, detail=True).items()
                if n not in hidden  # noqa: B023
            }
            scheduler.step(actor)
            world.fs.find = real_find
        else:
            scheduler.step(actor, fault if fault in FAULTS[op] else None)
        count += 1
    settle(world, [actor])
    TOTAL["schedules"] += 1
    return world


def a_job() -> tuple[World, Actor]:
    world = World()
    return world, world.job("s0", "s1")


def an_append() -> tuple[World, Actor]:
    world = World()
    world.job("s0").work()
    return world, world.job("s0", "s1")


def a_collection() -> tuple[World, Actor]:
    world = World()
    world.job("s0").work()
    with ShardAttempt(world.store(), SPEC, "s1", grace_seconds=GRACE) as attempt:
        attempt.build(RECORDS["s1"])
        attempt.upload()
    world.fs.seconds += 2 * GRACE
    return world, world.collector()


@pytest.mark.slow
@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("make", [a_job, an_append, a_collection])
def test_every_single_fault_at_every_io(make, monkeypatch):
    monkeypatch.setattr("teachercache.write.publish.PART_ENTRIES", 1)  # every manifest but the first has parts
    ios = trace(make)
    for i, (op, _) in enumerate(ios):
        for fault in FAULTS[op]:
            world = with_faults(make, {i: fault})
            world.check()
            world.finish("s0", "s1")


@pytest.mark.slow
def test_every_pair_of_faults_in_one_commit():
    """Two bad answers in a row, in all places and kinds: lost acknowledgements of refused retries and so on."""

    def one_commit() -> tuple[World, Actor]:
        world = World()
        return world, world.worker("s0")

    ios = trace(one_commit)
    for i, (op, _) in enumerate(ios):
        for first in FAULTS[op]:
            if first.startswith("crash"):
                continue
            for j in range(i + 1, i + 10):
                for second in sorted({f for faults in FAULTS.values() for f in faults} - {"stale"}):
                    world = with_faults(one_commit, {i: first, j: second})
                    world.check()
                    world.finish("s0")


def interleave(
    make: Callable[[], tuple[World, list[Actor]]],
    *,
    preemptions: int,
    crashes: int = 0,
    check: Callable[[World], None] = lambda world: world.check(),
    limit: int = 100_000,
) -> int:
    """Every interleaving with at most `preemptions` switches away from an actor that could go on, and `crashes` crashes before
    or after an I/O. Returns how many schedules there were."""

    def run(choices: list[int]) -> list[int]:
        world, actors = make()
        scheduler = Scheduler(world.fs)
        scheduler.start(actors)
        widths: list[int] = []
        current, switches, dead = actors[0], 0, 0
        while any(not a.finished for a in actors):
            ready = [a for a in actors if not a.finished]
            moves: list[tuple[Actor, str | None]] = []
            if current in ready:
                moves.append((current, None))
                if switches < preemptions:
                    moves += [(a, None) for a in ready if a is not current]
            else:
                moves += [(a, None) for a in ready]
            if dead < crashes:
                moves += [(current, "crash before"), (current, "crash after")] if current in ready else []
            at = len(widths)
            actor, fault = moves[choices[at] if at < len(choices) else 0]
            widths.append(len(moves))
            switches += current in ready and actor is not current
            dead += fault is not None
            current = actor
            scheduler.step(actor, fault)
        settle(world, actors)
        check(world)
        return widths

    count = 0
    for _ in explore(run):
        count += 1
        assert count <= limit, "the model is larger than expected"
    TOTAL["schedules"] += count
    print(f"{count:,} interleavings")
    return count


@pytest.mark.slow
@pytest.mark.usefixtures("kind")
def test_two_workers_of_one_shard_in_every_order_with_every_crash():
    def two() -> tuple[World, list[Actor]]:
        world = World()
        return world, [world.worker("s0"), world.worker("s0")]

    def check(world: World) -> None:
        world.check()
        world.finish("s0")

    # Without a bound on preemptions: 382 are all that there are, since each of the two does so few I/Os.
    assert interleave(two, preemptions=99, crashes=2, check=check) > 350


def test_a_publisher_races_a_worker():
    def both() -> tuple[World, list[Actor]]:
        world = World()
        world.job("s0").work()
        return world, [world.publisher(), world.worker("s1")]

    def check(world: World) -> None:
        world.check()
        world.finish("s0", "s1")

    interleave(both, preemptions=2, check=check)


@pytest.mark.slow
def test_two_publishers_race_and_never_shrink_the_cache():
    def two() -> tuple[World, list[Actor]]:
        world = World()
        world.worker("s0").work()

        def slow():
            world.commit(world, "s1")
            publish(world.store(), SPEC)

        return world, [world.publisher(), Actor("second", slow)]

    def check(world: World) -> None:
        world.check()
        world.finish("s0", "s1")

    interleave(two, preemptions=2, check=check)


@pytest.mark.slow
def test_a_zombie_that_sleeps_past_the_collector_harms_no_one():
    """At every I/O of an attempt the world moves on by twice the grace period, and a collector and a publisher run, in
    every order with the zombie's own awakening. Its clock does not move: the machine was suspended."""

    def make() -> tuple[World, list[Actor]]:
        world = World()
        world.job("s0").work()
        zombie = Actor("zombie", lambda: world.honest_commit("s1", clock=lambda: 0.0))

        def collect_and_publish():
            world.store().exists(layout.SPEC)  # one I/O, so that the schedule decides when time leaps
            world.fs.seconds += 2 * GRACE
            collect(world.store(), SPEC, grace_seconds=GRACE, dry_run=False)
            publish(world.store(), SPEC, grace_seconds=GRACE)

        return world, [zombie, Actor("upkeep", collect_and_publish)]

    def check(world: World) -> None:
        world.check()
        world.finish("s0", "s1")

    assert interleave(make, preemptions=3, check=check) > 80


def test_a_collector_races_a_publisher_after_an_optimise():
    def make() -> tuple[World, list[Actor]]:
        world = World()
        world.job("s0", "s1").work()
        with ShardAttempt(world.store(), SPEC, "opt", grace_seconds=GRACE, clock=lambda: world.fs.seconds) as attempt:
            attempt.build([*RECORDS["s0"], *RECORDS["s1"]])
            attempt.upload()
            attempt.commit(replaces=["s0", "s1"])
        world.fs.seconds += 2 * GRACE
        collector = Actor(
            "collector", lambda: collect(world.store(), SPEC, grace_seconds=GRACE, keep_manifests=1, dry_run=False)
        )
        return world, [collector, world.publisher()]

    def check(world: World) -> None:
        for manifest in world.manifests():
            for entry in manifest.files:
                assert "bucket/cache/" + entry.path in world.fs.objects

    interleave(make, preemptions=1, check=check)


# ---- protocols that are broken on purpose: the explorer must find each ---------------------------------------------


def finds_harm(test: Callable[[], object]) -> bool:
    try:
        test()
    except (AssertionError, MissingObject):
        return True
    return False


def test_commit_before_upload_is_found_out():
    def backwards(world: World, shard: str):
        with ShardAttempt(world.store(), SPEC, shard) as attempt:
            attempt.build(RECORDS[shard])
            commit = Commit(
                shard_id=shard, attempt=attempt.attempt, spec_digest=SPEC.digest, files=attempt.entries,
                records=2, documents=2, tokens=6, rows=6, created="",
            )  # fmt: skip
            world.store().create(layout.commit_path(shard), seal(commit))
            attempt.upload()

    def make() -> tuple[World, Actor]:
        world = World(commit=backwards)
        return world, world.job("s0")

    def everything():
        for i, (op, _) in enumerate(trace(make)):
            for fault in FAULTS[op]:
                world = with_faults(make, {i: fault})
                world.check()
                world.finish("s0")

    assert finds_harm(everything)


def test_overwrite_instead_of_create_is_found_out():
    def two() -> tuple[World, list[Actor]]:
        world = World()
        world.fs.ignore_conditions = True
        return world, [world.worker("s0"), world.worker("s0")]

    assert finds_harm(lambda: interleave(two, preemptions=2))


def test_a_publisher_that_saw_the_commits_before_the_newest_manifest_cannot_shrink_the_cache(monkeypatch):
    """The wrong order of two listings, or a listing from a cache: the publisher notices that a shard is missing."""
    refused = []

    def reversed_publish(world: World) -> None:
        seen = honest(Ledger(world.store(), SPEC))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ledger, "_commit_objects", lambda self: seen if self.store is mine else honest(self))
            mine = world.store()
            try:
                publish(mine, SPEC)
            except MissingObject as error:
                refused.append(str(error))

    honest = Ledger._commit_objects

    def make() -> tuple[World, list[Actor]]:
        world = World()
        world.worker("s0").work()

        def other() -> None:
            world.commit(world, "s1")
            publish(world.store(), SPEC)

        return world, [Actor("reversed", lambda: reversed_publish(world)), Actor("honest", other)]

    interleave(make, preemptions=1)
    assert any("is not listed" in message for message in refused)


@pytest.mark.slow
def test_at_least_2000_distinct_schedules_were_run():
    """Runs last: counts what this file's other tests enumerated."""
    print(f"\n{TOTAL['schedules']:,} schedules")
    assert TOTAL["schedules"] >= 2000
