"""gc removes what no one needs, and nothing else."""

from __future__ import annotations

import random
from collections import Counter
from datetime import timedelta

import pytest

import teachercache
from teachercache.errors import StoreDenied, UsageError
from teachercache.format import layout
from teachercache.store.store import Store
from teachercache.testing import synthetic_records
from teachercache.upkeep.gc import collect
from teachercache.upkeep.optimize import optimize
from teachercache.upkeep.verify import verify
from teachercache.write.attempt import ShardAttempt
from tests.teachercache.caches import SPEC, make, writer_with


def test_a_second_collection_keeps_the_commits_of_replaced_shards(tmp_path):
    """Else the job would compute every merged shard again, and the cache would count as incomplete."""
    writer = writer_with(tmp_path, range(3))
    optimize(writer)
    for _ in range(3):
        collect(writer.store, SPEC, keep_manifests=1, dry_run=False)
        assert writer.committed() >= {"s0", "s1", "s2"}
    assert writer.publish().number == 2, "nothing is new"


def documents(url, manifest=None):
    return sorted(r.doc_id for r in teachercache.open(url, manifest).records(columns={"doc_id"}))


class Clock:
    """Makes the store's objects look older than they are: the server's clock runs ahead."""

    def __init__(self, monkeypatch):
        self.ahead, real = 0.0, Store.now

        monkeypatch.setattr(Store, "now", lambda store: real(store) + timedelta(seconds=self.ahead))


@pytest.mark.slow
def test_gc_keeps_young_orphans_and_removes_old_ones_by_the_servers_clock(any_url, monkeypatch):
    clock = Clock(monkeypatch)
    writer = writer_with(any_url, range(2))
    with ShardAttempt(writer.store, SPEC, "lost") as attempt:
        attempt.build(synthetic_records(SPEC, 2, prefix="lost"))
        attempt.upload()
        orphan = attempt.entries[0].path
    assert (collect(writer.store, SPEC).waiting, collect(writer.store, SPEC).objects) == (1, [])
    clock.ahead = 8 * 24 * 3600.0
    dry = collect(writer.store, SPEC)
    assert [o.path for o in dry.orphans] == [orphan]
    assert writer.store.exists(orphan), "a dry run removes nothing"
    collect(writer.store, SPEC, dry_run=False)
    assert not writer.store.exists(orphan)
    assert len(documents(any_url)) == 8


def test_a_grace_period_of_nothing_is_refused(tmp_path):
    writer = writer_with(tmp_path, [0])
    with pytest.raises(UsageError, match="would collect running uploads"):
        collect(writer.store, SPEC, grace_seconds=0)
    with pytest.raises(UsageError, match="at least 1"):
        collect(writer.store, SPEC, keep_manifests=0)


def test_scratch_objects_are_removed(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    writer = writer_with(tmp_path, [0])
    writer.store.create(layout.PROBES + "left", b"x")
    clock.ahead = 8 * 24 * 3600.0
    assert [o.path for o in collect(writer.store, SPEC, dry_run=False).scratch] == ["probes/left"]


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_append_publish_optimize_and_gc_keeps_every_document_once(tmp_path, seed, monkeypatch):
    """Two writers take random turns; after each step the newest manifest holds all that was published, once."""
    clock, rng = Clock(monkeypatch), random.Random(seed)
    writers = [teachercache.create(tmp_path, SPEC) for _ in range(2)]
    committed: set[str] = set()
    expected: set[str] = set()
    taken: set[str] = set()
    published = False
    for step in range(25):
        writer, action = (
            rng.choice(writers),
            rng.choice(["append", "append", "publish", "optimize", "remove", "gc", "orphan"]),
        )
        if action == "append":
            records = synthetic_records(SPEC, 3, seed=step + 100 * seed, prefix=f"d{step}")
            writer.commit(f"shard-{step}", records)
            committed |= {r.doc_id for r in records}
        elif action == "orphan":
            with ShardAttempt(writer.store, SPEC, f"orphan-{step}") as attempt:
                attempt.build(synthetic_records(SPEC, 1, prefix=f"o{step}"))
                attempt.upload()
        elif action == "gc":
            clock.ahead = 30 * 24 * 3600.0
            collect(writer.store, SPEC, keep_manifests=rng.choice([None, 1, 2]), dry_run=False)
            clock.ahead = 0.0
        elif committed and (expected or action != "remove"):
            if action == "publish":
                writer.publish()
            elif action == "optimize":
                optimize(writer, target_bytes=rng.choice([1, 10**4, 10**9]))
            else:
                gone = set(rng.sample(sorted(expected), 1))
                optimize(writer, without=gone)
                taken |= gone
            expected, published = committed - taken, True
        if published:
            counts = Counter(r.doc_id for r in teachercache.open(tmp_path).records(columns={"doc_id"}))
            assert set(counts) == expected
            assert set(counts.values()) <= {1}
            for number in writer.ledger.manifest_numbers():
                list(teachercache.open(tmp_path, number).records(columns={"doc_id"}))
    if published:
        assert verify(writers[0].store, SPEC).problems == []


def test_gc_tells_the_time_without_the_right_to_delete(tmp_path, monkeypatch):
    cache = make(tmp_path / "cache")

    def refused(self, path):
        raise StoreDenied("no")

    monkeypatch.setattr(Store, "delete", refused)
    assert collect(cache.store, SPEC).orphans == []
