"""publish: what becomes a manifest, and what is refused."""

from __future__ import annotations

import pytest

import teachercache
from teachercache.errors import IncompleteCache, UsageError
from teachercache.format.objects import Plan, PlanShard
from teachercache.format.sealed import utc_now
from teachercache.testing import synthetic_records
from tests.teachercache.caches import SPEC, make, writer_with


def test_an_incomplete_cache_is_published_only_when_asked(any_url):
    writer = teachercache.create(any_url, SPEC)
    shards = [PlanShard(shard_id=f"s{i}", source="default", input="x", input_digest="d") for i in range(3)]
    plan = Plan(spec_digest=SPEC.digest, created=utc_now(), shards=shards)
    assert writer.put_plan(plan) == writer.put_plan(plan.model_copy(update={"created": "later"}))
    writer.commit("s0", synthetic_records(SPEC, 2))
    writer.quarantine("s1", reason="nan", message="row 3 is NaN")
    assert writer.quarantined().keys() == {"s1"}
    with pytest.raises(IncompleteCache, match="2 of 3 planned shards"):
        writer.publish()
    manifest = writer.publish(allow_partial=True)
    assert (manifest.complete, manifest.shards_planned, manifest.shards_committed, manifest.shards_quarantined) == (
        False,
        3,
        1,
        1,
    )
    for shard in ("s1", "s2"):
        writer.commit(shard, synthetic_records(SPEC, 2, prefix=shard, seed=hash(shard) % 1000))
    assert writer.quarantined() == {}
    final = writer.publish()
    assert (final.number, final.complete, final.parent) == (2, True, manifest.digest)
    assert writer.publish() == final, "publishing without news creates nothing"
    assert teachercache.open(any_url, manifest=1).manifest == manifest


def test_a_manifest_that_no_one_could_read_is_not_published(tmp_path, monkeypatch):
    """It would be the newest for ever: no reader, publisher or collector gets past it."""
    cache = make(tmp_path / "cache")
    writer = teachercache.create(tmp_path / "cache", SPEC)
    for i in range(4):
        writer.commit(f"t{i}", synthetic_records(SPEC, 1, seed=i + 5, prefix=f"t{i}"))
    monkeypatch.setattr("teachercache.format.sealed.MAX_OBJECTS", 6)
    with pytest.raises(UsageError, match="fewer, larger shards"):
        writer.publish()
    assert teachercache.open(tmp_path / "cache").manifest == cache.manifest


@pytest.mark.slow
def test_appending_leaves_readers_pinned_and_shards_unchanged(any_url):
    writer = writer_with(any_url, range(2))
    pinned = teachercache.open(any_url)
    first = {f.path for f in pinned.manifest.files}
    writer.commit("new", synthetic_records(SPEC, 3, prefix="new", source="web"))
    second = writer.publish()
    assert first < {f.path for f in second.files}
    assert len(list(pinned.records())) == 8
    assert teachercache.open(any_url, manifest=1).manifest == pinned.manifest
