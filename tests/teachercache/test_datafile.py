"""Data files: row groups, columns of the corpus, and files that lie."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import os

import numpy as np
import pytest

import teachercache
from teachercache.errors import CorruptFile, InvalidRecord
from teachercache.format import layout
from teachercache.format.objects import Manifest
from teachercache.format.record import round_logprobs
from teachercache.format.sealed import unseal
from teachercache.testing import synthetic_record, synthetic_records, synthetic_spec
from tests.teachercache.caches import make

SPEC = synthetic_spec()


def expected(record):
    """What a reader gets back: log-probabilities rounded, the content key filled in."""
    key = teachercache.content_key(SPEC.digest, record.input_ids, record.row_pos)
    return dataclasses.replace(record, topk_logprobs=round_logprobs(record.topk_logprobs), content_key=key)


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
        entropy=record.entropy[5:],
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
    monkeypatch.setattr("teachercache.parquet.datafile.MAX_RECORD_BYTES", 2500)
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


@pytest.fixture
def cache(tmp_path):
    make(tmp_path / "cache")
    return tmp_path / "cache"


def test_garbage_in_place_of_parquet_is_a_clear_error(cache):
    manifest = unseal(Manifest, (cache / layout.manifest_path(1)).read_bytes(), "")
    path = cache / manifest.files[0].path
    path.write_bytes(os.urandom(path.stat().st_size))
    with pytest.raises(CorruptFile, match="not readable as Parquet"):
        list(teachercache.open(cache).records())
