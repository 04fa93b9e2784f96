"""Cache: what is committed and published is read back exactly."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

import teachercache
from teachercache.errors import MissingObject, NotACache, UsageError
from teachercache.format.record import round_logprobs
from teachercache.parquet.datafile import DataFile
from teachercache.testing import synthetic_records
from tests.teachercache.caches import SPEC, in_a_fork, make


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
    for record, whole in zip(cache.records(columns={"doc_id", "topk_logprobs"}), cache.records(), strict=True):
        assert np.array_equal(record.topk_logprobs, whole.topk_logprobs), "the rows of this record and no others"
        assert record.input_ids is None
        assert record.topk_ids is None
    assert [r.doc_id for r in cache.records(columns={"doc_id"}, limit=2)] == ["doc-00000", "doc-00001"]


def test_opening_what_is_no_cache_says_so(any_url):
    with pytest.raises(NotACache, match=r"not a teacher cache"):
        teachercache.open(any_url)
    teachercache.create(any_url, SPEC)
    with pytest.raises(NotACache, match="no manifest yet"):
        teachercache.open(any_url)


def test_columns_given_as_one_string_are_refused_as_that(tmp_path):
    with pytest.raises(UsageError, match=r"\['doc_id'\]"):
        list(make(tmp_path / "cache").records(columns="doc_id"))


def test_representations_are_one_line(tmp_path):
    cache = make(tmp_path / "cache")
    record = next(cache.records(columns={"doc_id", "row_pos"}))
    assert f"tokens=None, rows={len(record.row_pos)}" in repr(record)
    assert f"manifest=1, records=5, rows={cache.manifest.rows:,}" in repr(cache)
    assert "path=" not in repr(cache.manifest)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_open_cache_is_read_in_a_forked_worker(s3_url):
    """What a torch DataLoader does with a data set that holds a cache."""
    cache = make(f"{s3_url}/cache")
    assert len(list(cache.records())) == 5  # the parent's connections are open
    assert in_a_fork(lambda: len(list(cache.records()))) == 5
    assert len(list(cache.records())) == 5


def test_a_file_that_was_collected_is_said_to_be(tmp_path):
    cache = make(tmp_path / "cache")
    cache.store.delete(cache.files()[0].path)
    with pytest.raises(MissingObject, match="manifest expired and gc removed it"):
        list(cache.records())


def test_a_file_is_not_closed_while_a_row_group_is_read_ahead(tmp_path, monkeypatch):
    """Closing a memory-mapped file under a reading thread kills the process."""
    cache = make(tmp_path / "cache", 20, rows_per_group=50)
    real_read, real_close, reading, overlaps = DataFile.read_group, DataFile.close, set(), []

    def slow_read(self, i, columns=None):
        reading.add(i)
        if i:
            threading.Event().wait(0.05)
        try:
            return real_read(self, i, columns)
        finally:
            reading.discard(i)

    def close(self):
        overlaps.extend(reading)
        real_close(self)

    monkeypatch.setattr(DataFile, "read_group", slow_read)
    monkeypatch.setattr(DataFile, "close", close)
    assert len(list(cache.records(limit=1))) == 1
    records = cache.records()
    next(records)
    records.close()
    assert overlaps == []
