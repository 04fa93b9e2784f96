"""optimize: merge, recode, take down; nothing is lost, repeated or changed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import teachercache
from teachercache.errors import IncompleteCache, NotACache, RepeatedContent, UsageError
from teachercache.format.objects import Plan, PlanShard
from teachercache.store.store import Store
from teachercache.testing import synthetic_records
from teachercache.upkeep.gc import collect
from teachercache.upkeep.optimize import optimize
from teachercache.upkeep.verify import verify
from tests.teachercache.caches import SPEC, writer_with


def documents(url, manifest=None):
    return sorted(r.doc_id for r in teachercache.open(url, manifest).records(columns={"doc_id"}))


@pytest.mark.slow
def test_optimize_merges_small_files_and_changes_no_record(any_url):
    writer = writer_with(any_url, range(6))
    before = list(teachercache.open(any_url).records())
    done = optimize(writer)
    assert (done.files_before, done.files_after, done.removed) == (6, 1, 0)
    after = {r.doc_id: r for r in teachercache.open(any_url).records()}
    assert all(after[r.doc_id].same_as(r) for r in before)
    assert documents(any_url, manifest=1) == documents(any_url, manifest=2), "the older manifest still reads"
    again = optimize(writer)
    assert (again.bins, again.manifest.number) == (0, 2), "nothing left to do"
    assert verify(Store.open(any_url), SPEC).ok


def test_optimize_publishes_nothing_that_publish_would_refuse(tmp_path):
    writer = writer_with(tmp_path, range(2))
    leak = dataclasses.replace(synthetic_records(SPEC, 4, seed=1, prefix="s1")[0], doc_id="leaked", split="heldout")
    writer.commit("h", [leak])
    with pytest.raises(RepeatedContent):
        optimize(writer)
    assert writer.ledger.manifest_numbers() == [1]
    writer.publish(allow_repeated_content=True)
    assert optimize(writer, target_bytes=10**9).manifest.repeated_content == 2, "it was allowed before"


def test_optimize_of_a_complete_cache_does_not_publish_half_a_job(tmp_path):
    writer = writer_with(tmp_path, range(2))
    shards = [PlanShard(shard_id=f"new-{i}", source="web", input="x", input_digest="0" * 64) for i in range(2)]
    writer.put_plan(Plan(spec_digest=SPEC.digest, created="now", shards=shards))
    writer.commit("new-0", synthetic_records(SPEC, 2, prefix="new"))
    with pytest.raises(IncompleteCache, match="1 of 2 planned shards"):
        optimize(writer)
    assert writer.ledger.manifest_numbers() == [1]
    assert not optimize(writer, allow_partial=True).manifest.complete
    assert not optimize(writer, target_bytes=1).manifest.complete, "it was allowed before"


def test_a_document_taken_down_is_gone_after_older_manifests_expire(tmp_path):
    writer = writer_with(tmp_path, range(3))
    optimize(writer, without={"s1-00002"})
    assert "s1-00002" not in documents(tmp_path)
    assert len(documents(tmp_path)) == 11
    assert "s1-00002" in documents(tmp_path, manifest=1)
    assert collect(writer.store, SPEC, dry_run=False).objects == [], "manifest 1 still holds its files"
    collect(writer.store, SPEC, keep_manifests=1, dry_run=False)
    with pytest.raises(NotACache, match="has no manifest 1"):
        teachercache.open(tmp_path, manifest=1)
    assert not list(tmp_path.rglob("s1-*.parquet"))
    assert len(documents(tmp_path)) == 11
    assert writer.committed() >= {"s0", "s1", "s2"}, "the shard is not computed again"
    assert verify(writer.store, SPEC).ok
    with pytest.raises(UsageError, match="holds no document 'unknown'"):
        optimize(writer, without={"unknown"})


def test_a_takedown_that_loses_its_shard_to_a_merge_is_done_again(tmp_path):
    writer = writer_with(tmp_path, range(3))
    records = [r for i in (0, 1) for r in synthetic_records(SPEC, 4, seed=i, prefix=f"s{i}")]

    def another_process_merges_first(done, total):
        if "aaa-merge" not in writer.committed():
            writer.commit("aaa-merge", records, replaces=["s0", "s1"])
            writer.publish()

    optimize(writer, without={"s1-00002"}, target_bytes=1, progress=another_process_merges_first)
    assert "s1-00002" not in documents(tmp_path)
    assert len(documents(tmp_path)) == 11


def test_a_takedown_that_was_killed_half_way_is_resumed_by_the_same_command(tmp_path):
    writer = writer_with(tmp_path, range(3))

    def killed(done, total):
        raise KeyboardInterrupt

    gone = {"s0-00001", "s2-00003"}
    with pytest.raises(KeyboardInterrupt):
        optimize(writer, without=gone, target_bytes=1, progress=killed)
    optimize(writer, without=gone, target_bytes=1)
    assert not gone & set(documents(tmp_path))
    assert len(documents(tmp_path)) == 10
    assert optimize(writer, without=gone, target_bytes=1).bins == 0, "done already: not an error"


def dense(record):
    """[r, V] log-probabilities: ids of one level have no order."""
    table = np.full((len(record.row_pos), SPEC.tokenizer.vocab_size), -np.inf, np.float32)
    np.put_along_axis(table, record.topk_ids, record.topk_logprobs, axis=1)
    return table


def max_l1(cache, entry):
    with cache.open_file(entry) as file:
        return float(file.footer.metadata[b"teachercache.compact.max_l1"])


def test_a_row_that_went_through_the_compact_codec_is_not_moved_again(tmp_path):
    """Else each merge would add another 1 %, and the footer would call the sum zero."""
    writer = teachercache.create(tmp_path, SPEC, codec="compact")
    for i in range(3):
        writer.commit(f"s{i}", synthetic_records(SPEC, 8, seed=i, prefix=f"s{i}"))
    cache = teachercache.open(tmp_path) if writer.publish() else None
    before = {r.doc_id: dense(r) for r in cache.records()}
    assert max(max_l1(cache, entry) for entry in cache.manifest.files) > 0
    optimize(writer)
    merged = teachercache.open(tmp_path)
    assert len(merged.manifest.files) == 1
    for record in merged.records():
        assert np.array_equal(dense(record), before[record.doc_id])
    assert max_l1(merged, merged.manifest.files[0]) == 0.01, "what the first encoding moved is known by its bound only"
    optimize(writer, codec="open")
    optimize(writer, codec="compact")
    for record in teachercache.open(tmp_path).records():
        assert np.abs(np.exp(dense(record)) - np.exp(before[record.doc_id])).sum(1).max() < 2e-3, "float16 at most"


def test_two_optimisers_of_overlapping_shards_repeat_nothing(tmp_path):
    writer = writer_with(tmp_path, range(4))
    records = {i: synthetic_records(SPEC, 4, seed=i, prefix=f"s{i}") for i in range(4)}
    for name, shards in (("opt-b", (0, 1)), ("opt-a", (1, 2)), ("opt-c", (3,))):
        merged = [r for i in shards for r in records[i]]
        writer.commit(name, merged, replaces=[f"s{i}" for i in shards])
    manifest = writer.publish()
    assert manifest.replaced == {"s1": "opt-a", "s2": "opt-a", "s3": "opt-c"}
    assert len(documents(tmp_path)) == len(set(documents(tmp_path))) == 16
    late = [r for i in (0, 1) for r in records[i]]
    writer.commit("opt-0", late, replaces=["s0", "s1"])
    assert writer.publish().replaced == manifest.replaced, "what was settled stays, whatever sorts before it"
    found = collect(writer.store, SPEC, dry_run=False)
    assert found.orphans == []
    assert verify(writer.store, SPEC).ok
