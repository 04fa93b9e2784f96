"""The compact codec: the same records within a stated bound, guaranteed row by row."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import teachercache
from teachercache.errors import CorruptFile
from teachercache.format.record import round_logprobs
from teachercache.format.spec import SampledRows
from teachercache.parquet.compact import MAX_L1, OCCURS, grid, quantise
from teachercache.testing import synthetic_records, synthetic_spec
from teachercache.upkeep.optimize import optimize
from teachercache.upkeep.verify import verify

SPEC = synthetic_spec(vocab_size=5000, top_k=100)


def l1(ours, theirs):
    """Between two records' rows, by id: worst row."""
    worst = 0.0
    for i in range(len(ours.row_pos)):
        a = dict(zip(ours.topk_ids[i].tolist(), np.exp(ours.topk_logprobs[i].astype(np.float64)), strict=True))
        b = dict(zip(theirs.topk_ids[i].tolist(), np.exp(theirs.topk_logprobs[i].astype(np.float64)), strict=True))
        assert a.keys() == b.keys(), "not one id is lost"
        worst = max(worst, sum(abs(a[t] - b[t]) for t in a))
    return worst


@pytest.mark.parametrize(
    "spec", [SPEC, synthetic_spec(vocab_size=262_144, top_k=100), synthetic_spec(vocab_size=40, top_k=1)]
)
@pytest.mark.parametrize("occurs", [1, OCCURS, 10**6], ids=["all", "some", "none"])
def test_records_come_back_within_the_bound(tmp_path, spec, occurs, monkeypatch):
    monkeypatch.setattr("teachercache.parquet.compact.OCCURS", occurs)  # how many ids are renumbered
    records = synthetic_records(spec, 20)
    writer = teachercache.create(tmp_path, spec, codec="compact")
    writer.commit("s", records)
    writer.publish()
    cache = teachercache.open(tmp_path)
    read = list(cache.records())
    for wrote, got in zip(records, read, strict=True):
        assert l1(wrote, got) <= MAX_L1 + 1e-6
        assert np.array_equal(wrote.tail_logprob, got.tail_logprob)
        assert np.array_equal(wrote.input_ids, got.input_ids)
        assert np.all(np.diff(got.topk_logprobs, axis=1) <= 0)
        assert got.topk_ids.dtype == np.int32
        assert got.topk_logprobs.dtype == np.float32
    assert verify(cache.store, spec).problems == []
    footer = pq.read_metadata(tmp_path / cache.files()[0].path).metadata
    assert 0 < float(footer[b"teachercache.compact.max_l1"]) <= MAX_L1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.01, 30), st.floats(1e-6, 1.0), st.integers(1, 120))
def test_the_bound_and_the_mass_hold_for_rows_of_every_shape(seed, spread, covered, top_k):
    rng = np.random.default_rng(seed)
    scores = -np.sort(rng.exponential(spread, (50, top_k)), axis=1)
    logprobs = scores - np.log(np.exp(scores).sum(1, keepdims=True)) + np.log(covered)
    level, scale, error = quantise(round_logprobs(logprobs))
    assert error.max() <= MAX_L1
    restored = np.stack([np.exp(-grid(int(j))[row]) for row, j in zip(level, scale, strict=True)])
    assert restored.sum(1).max() <= 1 + 1e-3
    assert abs(restored.sum(1) - np.exp(round_logprobs(logprobs)).sum(1)).max() <= MAX_L1


def test_optimize_recodes_a_cache_and_back(tmp_path):
    writer = teachercache.create(tmp_path, SPEC)
    for i in range(3):
        writer.commit(f"s{i}", synthetic_records(SPEC, 10, seed=i, prefix=f"s{i}"))
    writer.publish()
    before = {r.doc_id: r for r in teachercache.open(tmp_path).records()}
    done = optimize(writer, codec="compact")
    assert done.bytes_after < 0.85 * done.bytes_before
    compact = {r.doc_id: r for r in teachercache.open(tmp_path).records()}
    assert max(l1(before[k], compact[k]) for k in before) <= MAX_L1 + 1e-6
    optimize(writer, codec="open")
    assert {f.codec for f in teachercache.open(tmp_path).files()} == {"open"}
    assert verify(writer.store, SPEC).ok


def test_a_projection_of_one_topk_column_reads_both(tmp_path):
    writer = teachercache.create(tmp_path, SPEC, codec="compact")
    writer.commit("s", synthetic_records(SPEC, 3))
    writer.publish()
    record = next(teachercache.open(tmp_path).records(columns={"topk_ids"}))
    assert record.topk_ids.shape[1] == 100
    assert record.input_ids is None
    record = next(teachercache.open(tmp_path).records(columns={"doc_id", "input_ids"}))
    assert record.topk_ids is None


def test_a_renumbering_that_is_none_is_refused(tmp_path, monkeypatch):
    damaged = {"teachercache.compact.frequent_ids": "AAAA"}
    writer = teachercache.create(tmp_path, SPEC, codec="compact")
    with monkeypatch.context() as patch:
        patch.setattr("teachercache.parquet.datafile.FileBuilder._verify", lambda self: None)
        patch.setattr("teachercache.parquet.compact.CompactCodec.opening_metadata", lambda self: damaged)
        writer.commit("s", synthetic_records(SPEC, 3))
    writer.publish()
    with pytest.raises(CorruptFile, match="cannot be decoded"):
        list(teachercache.open(tmp_path).records())


@pytest.mark.parametrize("vocab_size", [97, 50_257, 262_144, 2**24])
@pytest.mark.parametrize("occurs", [1, 10**6], ids=["all", "none"])
def test_sampled_rows_of_any_vocabulary_come_back(tmp_path, vocab_size, occurs, monkeypatch):
    """From 2**18 ids on, the key by which a row is sorted again no longer fits 32 bits."""
    monkeypatch.setattr("teachercache.parquet.compact.OCCURS", occurs)
    spec = synthetic_spec(vocab_size=vocab_size, rows=SampledRows(entries=12, exact=3))
    records = synthetic_records(spec, 3)
    writer = teachercache.create(tmp_path / "cache", spec, codec="compact")
    writer.commit("one", records)
    writer.publish()
    for ours, theirs in zip(teachercache.open(tmp_path / "cache").records(), records, strict=True):
        assert (ours.exact == theirs.exact).all()
        drawn = np.arange(12) >= theirs.exact[:, None]
        assert (np.where(drawn, ours.topk_ids, 0) == np.where(drawn, theirs.topk_ids, 0)).all()
        assert (np.sort(ours.topk_ids, axis=1) == np.sort(theirs.topk_ids, axis=1)).all()
