"""A record's invariants and arithmetic, against plain twins."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import teachercache
from teachercache.errors import InvalidRecord
from teachercache.format.record import TAIL_FLOOR, check_record, content_key, round_logprobs, tail_from_logprobs
from teachercache.format.spec import SampledRows, TopKRows
from teachercache.testing import synthetic_record, synthetic_spec

SPEC = synthetic_spec()
RNG = np.random.default_rng(0)
GOOD = synthetic_record(RNG, SPEC, "doc", length=10)


def changed(name, index, value):
    array = getattr(GOOD, name).copy()
    array[index] = value
    return dataclasses.replace(GOOD, **{name: array})


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (dataclasses.replace(GOOD, doc_id=""), "doc_id"),
        (dataclasses.replace(GOOD, split="a/b"), "name"),
        (dataclasses.replace(GOOD, source="../x"), "name"),
        (dataclasses.replace(GOOD, window=-1), "window"),
        (dataclasses.replace(GOOD, input_ids=np.empty(0, np.int32)), "empty"),
        (dataclasses.replace(GOOD, topk_ids=GOOD.topk_ids[:, :3]), "shape"),
        (dataclasses.replace(GOOD, topk_ids=GOOD.topk_ids.astype(np.float32)), "dtype"),
        (changed("input_ids", 0, 1000), "id_out_of_range"),
        (changed("topk_ids", (0, 0), -1), "id_out_of_range"),
        (changed("row_pos", 3, 2), "row_pos"),
        (changed("row_pos", -1, 10), "row_pos"),
        (changed("topk_logprobs", (2, 2), np.nan), "nan"),
        (changed("tail_logprob", 2, np.nan), "nan"),
        (changed("topk_logprobs", (2, -1), -np.inf), "inf"),
        (changed("target_logprob", 2, np.inf), "inf"),
        (changed("topk_logprobs", (2, 0), -50.0), "unsorted"),
        (changed("topk_ids", (2, 0), GOOD.topk_ids[2, 1]), "repeated_id"),
        (changed("topk_logprobs", (2, 0), 0.01), "mass_above_one"),
        (changed("tail_logprob", 2, -17.0), "tail_floor"),
        (changed("tail_logprob", 2, -0.001), "tail_mass"),
        (changed("target_logprob", 2, 0.5), "target"),
        (changed("loss_mask", -1, True), "loss_mask"),
        (dataclasses.replace(GOOD, content_key=b"short"), "content_key"),
    ],
)
def test_each_broken_invariant_is_named(record, reason):
    with pytest.raises(InvalidRecord) as caught:
        check_record(record, SPEC)
    assert caught.value.reason == reason


def test_a_good_record_passes_before_and_after_rounding():
    check_record(GOOD, SPEC)
    check_record(dataclasses.replace(GOOD, topk_logprobs=round_logprobs(GOOD.topk_logprobs)), SPEC)


def test_a_flat_row_that_holds_all_the_mass_rounds_down_and_passes():
    """Nearest rounding of log(1/100) to float16 would make the sum 1.0012."""
    for k in (90, 100, 110, 128, 200):
        exact = np.full((1, k), -math.log(k), dtype=np.float32)
        rounded = round_logprobs(exact)
        assert np.exp(rounded.astype(np.float64)).sum() <= 1 + 5e-4
        assert abs(rounded - exact).max() <= 0.004


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.01, 20), st.floats(1e-6, 1.0))
def test_rounding_keeps_order_and_mass(seed, spread, covered):
    rng = np.random.default_rng(seed)
    scores = -np.sort(rng.exponential(spread, (20, 100)), axis=1)
    exact = scores - np.log(np.exp(scores).sum(1, keepdims=True)) + np.log(covered)
    rounded = round_logprobs(exact)
    assert np.array_equal(rounded, rounded.astype(np.float16).astype(np.float32))
    assert np.all(np.diff(rounded, axis=1) <= 0)
    assert np.exp(rounded.astype(np.float64)).sum(1).max() <= 1 + 1e-3
    assert np.all(abs(rounded - exact) <= np.maximum(abs(exact) * 2**-10, 1e-6))


def test_the_tail_is_that_of_exact_arithmetic_and_floored():
    logprobs = np.log(np.array([[0.5, 0.25, 0.125], [0.6, 0.4, 1e-9], [0.9, 0.0999, 1e-9]]))
    plain = [
        max(math.log1p(-math.fsum(math.exp(v) for v in row)) if math.fsum(map(math.exp, row)) < 1 else -99, TAIL_FLOOR)
        for row in logprobs
    ]
    assert np.allclose(tail_from_logprobs(logprobs), plain, rtol=1e-5)


def test_the_content_key_is_the_documented_hash():
    import hashlib
    import struct

    ids, pos = np.array([5, 6, 7], np.int32), np.array([0, 2], np.int32)
    digest = "ab" * 32
    plain = hashlib.blake2b(struct.pack("<q3i2i", 3, *ids, *pos), digest_size=16, key=digest.encode()).digest()
    assert content_key(digest, ids, pos) == plain
    assert content_key(digest, np.array([5, 6], np.int32), np.array([7, 0, 2], np.int32)) != plain


@pytest.mark.parametrize("rows", [TopKRows(entries=8), SampledRows(entries=8)], ids=lambda rows: rows.kind)
@pytest.mark.parametrize("codec", ["open", "compact"])
def test_the_targets_log_probability_is_the_nearest_float16_value(tmp_path, codec, rows):
    spec = synthetic_spec(rows=rows)
    record = synthetic_record(np.random.default_rng(1), spec, "d", length=200)
    target = np.where(np.arange(200) % 5 == 4, record.topk_logprobs[:, 1], record.topk_logprobs[:, 0])
    target[:7] = 0.0, -1e-7, -3e-5, -65519.0, -65521.0, -3.4e38, 5e-4
    target[-9:] = np.nan
    writer = teachercache.create(tmp_path / "first", spec, codec=codec)
    writer.commit("s", [dataclasses.replace(record, target_logprob=target)])
    writer.publish()
    read = next(teachercache.open(tmp_path / "first").records())
    stored = read.target_logprob
    assert stored.dtype == np.float32
    assert np.array_equal(np.isnan(stored), np.isnan(target))
    assert stored[4] == stored[5] == -65504
    assert np.array_equal(stored, stored.astype(np.float16).astype(np.float32), equal_nan=True)
    near = target[[*range(4), *range(6, 191)]].astype(np.float64)
    assert np.all(abs(stored[[*range(4), *range(6, 191)]] - near) <= np.maximum(abs(near) * 2.0**-11, 2.0**-25))
    if codec == "open":
        place = np.where(np.arange(200) % 5 == 4, 1, 0)[7:191]
        assert np.array_equal(stored[7:191], read.topk_logprobs[np.arange(7, 191), place])
    writer = teachercache.create(tmp_path / "again", spec, codec=codec)
    writer.commit("s", [read])
    writer.publish()
    again = next(teachercache.open(tmp_path / "again").records())
    assert np.array_equal(again.target_logprob, stored, equal_nan=True)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["open", "compact"]),
)
def test_any_shape_of_records_survives_a_file(tmp_path_factory, lengths, seed, codec):
    rng = np.random.default_rng(seed)
    records = [synthetic_record(rng, SPEC, f"d{i}", length=n) for i, n in enumerate(lengths)]
    url = tmp_path_factory.mktemp("any")
    writer = teachercache.create(url, SPEC, codec=codec, probe=False)
    writer.commit("s", records)
    writer.publish()
    for wrote, read in zip(records, teachercache.open(url).records(), strict=True):
        assert np.array_equal(wrote.input_ids, read.input_ids)
        assert np.array_equal(wrote.target_logprob, read.target_logprob, equal_nan=True)
        assert np.array_equal(wrote.loss_mask, read.loss_mask)
        assert np.array_equal(np.sort(wrote.topk_ids, 1), np.sort(read.topk_ids, 1))
        if codec == "open":
            assert np.array_equal(read.topk_logprobs, round_logprobs(wrote.topk_logprobs))


def test_a_doc_id_that_is_not_unicode_is_named_before_it_breaks_a_file():
    """JSON lets half a surrogate pair through; Parquet does not."""
    with pytest.raises(InvalidRecord, match="doc_id"):
        check_record(dataclasses.replace(GOOD, doc_id="a\ud800"), SPEC)
