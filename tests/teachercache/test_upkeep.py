"""optimize, gc, append and re-use: every document of the newest manifest is there exactly once, older pins still read."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest

import teachercache
from teachercache.errors import (
    IncompleteCache,
    MissingObject,
    NotACache,
    RepeatedContent,
    StaleAttempt,
    UsageError,
)
from teachercache.format import layout
from teachercache.format.objects import Plan, PlanShard
from teachercache.store.store import Store
from teachercache.testing import synthetic_records, synthetic_spec
from teachercache.upkeep.gc import collect
from teachercache.upkeep.optimize import optimize
from teachercache.upkeep.verify import verify
from teachercache.write.attempt import ShardAttempt

SPEC = synthetic_spec()


def writer_with(url, shards, per_shard=4):
    writer = teachercache.create(url, SPEC)
    for i in shards:
        writer.commit(f"s{i}", synthetic_records(SPEC, per_shard, seed=i, prefix=f"s{i}"))
    writer.publish()
    return writer


def documents(url, manifest=None):
    return sorted(r.doc_id for r in teachercache.open(url, manifest).records(columns={"doc_id"}))


class Clock:
    """Makes the store's objects look older than they are: the server's clock runs ahead."""

    def __init__(self, monkeypatch):
        self.ahead, real = 0.0, Store.now
        from datetime import timedelta

        monkeypatch.setattr(Store, "now", lambda store: real(store) + timedelta(seconds=self.ahead))


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
    with pytest.raises(UsageError, match="holds no document 'nobody'"):
        optimize(writer, without={"nobody"})


def test_a_second_collection_keeps_the_commits_of_replaced_shards(tmp_path):
    """Else the job would compute every merged shard again, and the cache would count as incomplete."""
    writer = writer_with(tmp_path, range(3))
    optimize(writer)
    for _ in range(3):
        collect(writer.store, SPEC, keep_manifests=1, dry_run=False)
        assert writer.committed() >= {"s0", "s1", "s2"}
    assert writer.publish().number == 2, "nothing is new"


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


def test_optimize_publishes_nothing_that_publish_would_refuse(tmp_path):
    writer = writer_with(tmp_path, range(2))
    leak = dataclasses.replace(synthetic_records(SPEC, 4, seed=1, prefix="s1")[0], doc_id="leaked", split="heldout")
    writer.commit("h", [leak])
    with pytest.raises(RepeatedContent):
        optimize(writer)
    assert writer.ledger.manifest_numbers() == [1]
    writer.publish(allow_repeated_content=True)
    assert optimize(writer, target_bytes=10**9).manifest.repeated_content == 2, "it was told before"


def test_optimize_of_a_complete_cache_does_not_publish_half_a_job(tmp_path):
    writer = writer_with(tmp_path, range(2))
    shards = [PlanShard(shard_id=f"new-{i}", source="web", input="x", input_digest="0" * 64) for i in range(2)]
    writer.put_plan(Plan(spec_digest=SPEC.digest, created="now", shards=shards))
    writer.commit("new-0", synthetic_records(SPEC, 2, prefix="new"))
    with pytest.raises(IncompleteCache, match="1 of 2 planned shards"):
        optimize(writer)
    assert writer.ledger.manifest_numbers() == [1]
    assert not optimize(writer, allow_partial=True).manifest.complete
    assert not optimize(writer, target_bytes=1).manifest.complete, "it was told before"


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


def dense(record):
    """[r, V] log-probabilities: ids of one level have no order of their own."""
    table = np.full((len(record.row_pos), SPEC.tokenizer.vocab_size), -np.inf, np.float32)
    np.put_along_axis(table, record.topk_ids, record.topk_logprobs, axis=1)
    return table


def max_l1(cache, entry):
    with cache.open_file(entry) as file:
        return float(file.footer.metadata[b"teachercache.compact.max_l1"])


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


def test_an_attempt_that_slept_past_half_the_grace_period_gives_up(tmp_path):
    writer = writer_with(tmp_path, [0])
    now = [0.0]
    with ShardAttempt(writer.store, SPEC, "s9", grace_seconds=100.0, clock=lambda: now[0]) as attempt:
        attempt.build(synthetic_records(SPEC, 1, prefix="z"))
        attempt.upload()
        now[0] = 51.0
        with pytest.raises(StaleAttempt, match="51 s ago"):
            attempt.commit()
    assert writer.committed() == {"s0"}


def test_an_attempt_whose_file_was_collected_cannot_commit(tmp_path):
    writer = writer_with(tmp_path, [0])
    with ShardAttempt(writer.store, SPEC, "s9") as attempt:
        attempt.build(synthetic_records(SPEC, 1, prefix="z"))
        attempt.upload()
        writer.store.delete(attempt.entries[0].path)
        with pytest.raises(MissingObject):
            attempt.commit()


def test_a_grace_period_of_nothing_is_refused(tmp_path):
    writer = writer_with(tmp_path, [0])
    with pytest.raises(UsageError, match="would collect running uploads"):
        collect(writer.store, SPEC, grace_seconds=0)
    with pytest.raises(UsageError, match="at least 1"):
        collect(writer.store, SPEC, keep_manifests=0)


def test_appending_leaves_readers_pinned_and_shards_unchanged(any_url):
    writer = writer_with(any_url, range(2))
    pinned = teachercache.open(any_url)
    first = {f.path for f in pinned.manifest.files}
    writer.commit("new", synthetic_records(SPEC, 3, prefix="new", source="web"))
    second = writer.publish()
    assert first < {f.path for f in second.files}
    assert len(list(pinned.records())) == 8
    assert teachercache.open(any_url, manifest=1).manifest == pinned.manifest


def test_committed_rows_are_found_by_content_key_and_copied(any_url):
    writer = writer_with(any_url, range(3))
    index = writer.reuse_index()
    assert len(index) == 12
    source = synthetic_records(SPEC, 4, seed=1, prefix="s1")[2]
    key = teachercache.content_key(SPEC.digest, source.input_ids, source.row_pos)
    assert key in index
    copied = index.get(key)
    assert copied.doc_id == "s1-00002"
    assert index.get(b"\0" * 16) is None
    writer.commit("again", [dataclasses.replace(copied, doc_id="renamed", source="other", meta={"licence": "MIT"})])
    writer.publish()
    found = next(teachercache.open(any_url).records(source="other"))
    assert found.content_key == key
    assert (found.topk_logprobs == copied.topk_logprobs).all()


def test_content_in_two_splits_is_counted_and_refused_unless_told(tmp_path):
    writer = writer_with(tmp_path, range(2))
    leak = dataclasses.replace(synthetic_records(SPEC, 4, seed=1, prefix="s1")[0], doc_id="leaked", split="heldout")
    writer.commit("h", [leak])
    with pytest.raises(RepeatedContent, match="2 records hold content that is in another split"):
        writer.publish()
    assert writer.ledger.manifest_numbers() == [1]
    assert writer.publish(allow_repeated_content=True).repeated_content == 2


def test_the_same_document_committed_by_two_shards_is_refused(tmp_path):
    writer = writer_with(tmp_path, range(2))
    writer.commit("twin", synthetic_records(SPEC, 4, seed=7, prefix="s1"))
    with pytest.raises(teachercache.errors.DuplicateDocument, match="'s1-00000' window 0"):
        writer.publish()
    assert any("committed twice" in p.message for p in verify(writer.store, SPEC).problems)


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


def test_scratch_objects_are_removed(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    writer = writer_with(tmp_path, [0])
    writer.store.create(layout.PROBES + "left", b"x")
    clock.ahead = 8 * 24 * 3600.0
    assert [o.path for o in collect(writer.store, SPEC, dry_run=False).scratch] == ["probes/left"]


def test_reuse_computes_again_what_was_collected_since(tmp_path):
    writer = writer_with(tmp_path, range(2))
    index = writer.reuse_index()
    source = synthetic_records(SPEC, 4, seed=1, prefix="s1")[2]
    key = teachercache.content_key(SPEC.digest, source.input_ids, source.row_pos)
    optimize(writer, without={"s0-00000"})
    collect(writer.store, SPEC, keep_manifests=1, dry_run=False)
    assert index.get(key) is None, "another process merged its file away"
    assert writer.reuse_index().get(key).doc_id == "s1-00002"


def test_reuse_passes_over_a_commit_that_lost_its_file(tmp_path):
    writer = writer_with(tmp_path, range(2))
    result = writer.commit("late", synthetic_records(SPEC, 2, seed=8, prefix="late"))
    writer.store.delete(result.files[0].path)
    assert len(writer.reuse_index()) == 8
