"""Ledger: what is read of a cache without a writer."""

from __future__ import annotations

import pytest

import teachercache
from teachercache import Plan, PlanShard
from teachercache.errors import NotACache
from teachercache.format.sealed import utc_now
from teachercache.store.ledger import Ledger
from teachercache.testing import synthetic_records, synthetic_spec

SPEC = synthetic_spec()


@pytest.mark.slow
def test_another_processes_commit_is_seen_at_once(any_url):
    ours, theirs = teachercache.create(any_url, SPEC), teachercache.create(any_url, SPEC)
    assert ours.committed() == set()
    theirs.commit("s", synthetic_records(SPEC, 1))
    assert ours.committed() == {"s"}
    number = theirs.publish().number
    assert teachercache.open(any_url).manifest.number == number
    theirs.commit("t", synthetic_records(SPEC, 1, prefix="t", seed=2))
    assert ours.publish().number == number + 1


def test_a_ledger_reads_everything_without_a_writer(any_url):
    writer = teachercache.create(any_url, SPEC)
    planned = [PlanShard(shard_id=s, source="default", input="x", input_digest="") for s in ("a", "b", "c")]
    plan = Plan(spec_digest=SPEC.digest, created=utc_now(), shards=planned)
    writer.put_plan(plan)
    ledger = Ledger.open(any_url)
    assert ledger.newest_manifest() is None
    for shard in ("b", "a"):
        writer.commit(shard, synthetic_records(SPEC, 2, prefix=shard))
    for message in ("first", "second"):
        writer.quarantine("c", reason="nan", message=message)
    writer.publish(allow_partial=True)
    assert ledger.spec() == SPEC
    assert ledger.committed() == {"a", "b"}
    assert [c.shard_id for c in ledger.commits()] == ["a", "b"]
    assert [c.shard_id for c in ledger.commits(1)] == ["a"]
    assert [c.shard_id for c in ledger.commits_of(["b"])] == ["b"]
    assert ledger.plans() == {plan.digest: plan}
    assert ledger.quarantines()["c"].message == "second"
    assert ledger.manifest_numbers() == [1]
    assert ledger.newest_manifest() == ledger.manifest(1)
    assert ledger.snapshot().fresh == [], "the manifest settled both"
    writer.commit("c", synthetic_records(SPEC, 1, prefix="c"))
    assert [info.path for _, info in ledger.snapshot().fresh] == ["commits/c.json"]


def test_a_ledger_of_nothing_is_no_cache(tmp_path):
    with pytest.raises(NotACache, match=r"has no spec\.json"):
        Ledger.open(tmp_path).spec()
    assert Ledger.open(tmp_path).committed() == set()
