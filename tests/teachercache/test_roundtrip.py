"""Create, commit, publish, open, read: the main path, on local disk and on two S3 servers."""

from __future__ import annotations

import dataclasses
import datetime
import decimal

import numpy as np
import pytest

import teachercache
from teachercache import Plan, PlanShard
from teachercache.errors import (
    IncompleteCache,
    InvalidRecord,
    NotACache,
    SpecMismatch,
    StoreUnsafe,
)
from teachercache.format.record import round_logprobs
from teachercache.format.sealed import utc_now
from teachercache.testing import synthetic_record, synthetic_records, synthetic_spec

SPEC = synthetic_spec()


def expected(record):
    """What a reader gets back: log-probabilities rounded, the content key filled in."""
    key = teachercache.content_key(SPEC.digest, record.input_ids, record.row_pos)
    return dataclasses.replace(record, topk_logprobs=round_logprobs(record.topk_logprobs), content_key=key)


def test_what_is_committed_and_published_is_read_back_exactly(any_url):
    writer = teachercache.create(any_url, SPEC)
    train = synthetic_records(SPEC, 40, seed=1, prefix="a")
    held = synthetic_records(SPEC, 5, seed=2, prefix="b", split="heldout", source="web")
    result = writer.commit("shard-1", train + held, drops={"empty": 2}, provenance={"engine": "none"})
    assert result.won
    assert len(result.files) == 2
    manifest = writer.publish()
    assert manifest.number == 1
    assert manifest.complete
    assert manifest.drops == {"empty": 2}

    cache = teachercache.open(any_url)
    assert cache.manifest == manifest
    assert cache.spec == SPEC
    assert cache.splits == ["heldout", "train"]
    for split, wrote in (("train", train), ("heldout", held)):
        read = list(cache.records(split=split))
        assert len(read) == len(wrote)
        assert all(r.same_as(expected(w)) for r, w in zip(read, wrote, strict=True))
    assert sum(len(r.row_pos) for r in cache.records()) == manifest.rows


def test_a_projection_reads_only_its_columns(tmp_path):
    writer = teachercache.create(tmp_path, SPEC)
    writer.commit("s", synthetic_records(SPEC, 3))
    writer.publish()
    cache = teachercache.open(tmp_path)
    for record in cache.records(columns={"doc_id", "topk_logprobs"}):
        assert record.topk_logprobs.shape[1] == SPEC.top_k
        assert record.input_ids is None
        assert record.topk_ids is None
    assert [r.doc_id for r in cache.records(columns={"doc_id"}, limit=2)] == ["doc-00000", "doc-00001"]


def test_records_span_row_groups(tmp_path):
    writer = teachercache.create(tmp_path, SPEC)
    writer.rows_per_group = 50
    records = synthetic_records(SPEC, 30)
    writer.commit("s", iter(records))
    writer.publish()
    cache = teachercache.open(tmp_path)
    assert cache.open_file(cache.files()[0]).num_groups > 5
    assert all(r.same_as(expected(w)) for r, w in zip(cache.records(), records, strict=True))


def test_meta_columns_may_appear_late_and_change_type(tmp_path):
    writer = teachercache.create(tmp_path, SPEC)
    writer.rows_per_group = 20
    metas = [{"n": 1}] * 10 + [{"n": 2, "url": "u"}] * 10 + [{"n": "three"}] * 10
    records = [dataclasses.replace(r, meta=m) for r, m in zip(synthetic_records(SPEC, 30), metas, strict=True)]
    writer.commit("s", records)
    writer.publish()
    read = [r.meta for r in teachercache.open(tmp_path).records(columns={"meta"})]
    assert read[0] == {"n": "1"}
    assert read[15] == {"n": "2", "url": "u"}
    assert read[25] == {"n": "three"}


def test_a_document_longer_than_a_row_group_stays_one_record(tmp_path):
    writer = teachercache.create(tmp_path, SPEC)
    record = synthetic_records(SPEC, 1, length=40_000)[0]
    writer.commit("s", [record])
    writer.publish()
    assert next(teachercache.open(tmp_path).records()).same_as(expected(record))


def test_the_second_commit_of_a_shard_loses_without_harm(any_url):
    writer = teachercache.create(any_url, SPEC)
    assert writer.commit("s", synthetic_records(SPEC, 3, seed=1)).won
    assert not writer.commit("s", synthetic_records(SPEC, 3, seed=2)).won
    assert writer.committed() == {"s"}
    assert writer.publish().records == 3


def test_an_equal_spec_appends_and_another_is_refused_field_by_field(any_url):
    teachercache.create(any_url, SPEC).commit("s", synthetic_records(SPEC, 2))
    assert teachercache.create(any_url, SPEC).committed() == {"s"}
    other = SPEC.model_copy(update={"top_k": 9, "teacher": SPEC.teacher.model_copy(update={"dtype": "bfloat16"})})
    with pytest.raises(SpecMismatch) as caught:
        teachercache.create(any_url, other)
    assert [d[0] for d in caught.value.differences] == ["teacher.dtype", "top_k"]
    assert caught.value.exit_code == 2


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


def test_opening_what_is_no_cache_says_so(any_url):
    with pytest.raises(NotACache, match=r"not a teacher cache"):
        teachercache.open(any_url)
    teachercache.create(any_url, SPEC)
    with pytest.raises(NotACache, match="no manifest yet"):
        teachercache.open(any_url)


def test_a_store_that_ignores_conditional_writes_is_refused(unsafe_s3_url):
    with pytest.raises(StoreUnsafe, match="ignores conditional writes"):
        teachercache.create(unsafe_s3_url + "/cache", SPEC)


def test_windows_and_masks_survive(tmp_path):
    record = synthetic_records(SPEC, 1, length=20)[0]
    rows = np.arange(5, 20, dtype=np.int32)
    cut = dataclasses.replace(
        record,
        window=3,
        start=60,
        row_pos=rows,
        topk_ids=record.topk_ids[5:],
        topk_logprobs=record.topk_logprobs[5:],
        tail_logprob=record.tail_logprob[5:],
        target_logprob=record.target_logprob[5:],
        loss_mask=np.arange(15) % 2 == 1,
    )
    cut.loss_mask[-1] = False
    writer = teachercache.create(tmp_path, SPEC)
    writer.commit("s", [cut])
    writer.publish()
    assert next(teachercache.open(tmp_path).records()).same_as(expected(cut))


def test_whatever_a_corpus_has_as_meta_is_kept_and_breaks_no_shard(tmp_path):
    """A timestamp from Parquet, an id beyond int64, half a surrogate pair: found at the end of a shard, each would cost it."""
    values = {
        "when": datetime.date(2026, 1, 2),
        "price": decimal.Decimal("1.50"),
        "huge": 2**64,
        "odd": "a\ud800b",
        "nested": {"k": [1, datetime.date(2026, 1, 2), "\ud800"]},
        "count": np.int64(7),
    }
    first, second = synthetic_records(SPEC, 2)
    writer = teachercache.create(tmp_path, SPEC)
    writer.commit("s", [dataclasses.replace(first, meta=values), dataclasses.replace(second, meta={"huge": 5})])
    writer.publish()
    found, other = (r.meta for r in teachercache.open(tmp_path).records())
    assert found["huge"] == str(2**64)
    assert other["huge"] == "5"
    assert found["odd"] == "a\ufffdb"
    assert "2026-01-02" in found["when"]
    assert "1.50" in found["price"]
    assert "2026-01-02" in found["nested"]


def test_a_record_that_no_reader_would_take_is_not_written(tmp_path, monkeypatch):
    """Readers refuse a row group beyond a bound; so must writers, or the commit is of no use."""
    monkeypatch.setattr("teachercache.parquet.datafile.MAX_GROUP_BYTES", 5000)
    writer = teachercache.create(tmp_path, SPEC)
    small, large = (
        synthetic_record(np.random.default_rng(0), SPEC, name, length=n) for name, n in (("a", 5), ("b", 99))
    )
    with pytest.raises(InvalidRecord, match="split it into windows") as caught:
        writer.commit("s", [small, large])
    assert caught.value.reason == "too_long"


def test_wide_rows_make_small_row_groups(tmp_path, monkeypatch):
    """A row group is what a reader holds in memory: bounded in bytes, whatever K is."""
    monkeypatch.setattr("teachercache.parquet.datafile.GROUP_BYTES", 2000)
    writer = teachercache.create(tmp_path, SPEC)
    writer.commit("s", synthetic_records(SPEC, 20))
    assert writer.publish().files[0].row_groups > 5
