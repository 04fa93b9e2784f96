"""Statistics of rows and of cost, against naive counts and known values."""

from __future__ import annotations

import numpy as np
import pytest

import teachercache
from teachercache.testing import synthetic_record, synthetic_records, synthetic_spec
from teachercache.views.statistics import calibration_bins, costs, losses_by_length, take_sample
from tests.teachercache.caches import page_cache


@pytest.fixture
def cache(tmp_path):
    return page_cache(tmp_path / "cache")


def test_statistics_are_those_of_a_naive_count(cache):
    sample = take_sample(cache, 64)
    for (split, source), part in sample.parts.items():
        hits, losses, mass, positions = [], [], [], []
        for record in cache.records(split, source):
            for i, p in enumerate(record.row_pos):
                mass.append(np.exp(record.topk_logprobs[i, :10].astype(np.float64)).sum())
                if record.loss_mask[i]:
                    hits.append(record.topk_ids[i, 0] == record.input_ids[p + 1])
                    positions.append(p)
                    if not np.isnan(record.target_logprob[i]):
                        losses.append(-record.target_logprob[i])
        assert part.values("hit").tolist() == hits
        assert part.values("position").tolist() == positions
        np.testing.assert_allclose(part.values("loss"), losses, rtol=1e-6)
        np.testing.assert_allclose(part.values("mass10"), mass, rtol=1e-5)
        assert part.licences == {"CC0": len(list(cache.records(split, source)))}


def test_a_small_source_is_sampled_and_weighs_by_its_rows(tmp_path):
    spec = synthetic_spec()
    writer = teachercache.create(tmp_path, spec)
    for i in range(6):
        writer.commit(f"s{i}", synthetic_records(spec, 20, seed=i, prefix=f"s{i}"))
    writer.commit("small", synthetic_records(spec, 1, seed=9, prefix="x", source="small", length=7))
    writer.publish()
    sample = take_sample(teachercache.open(tmp_path), 3)
    assert sample.files == 3
    assert len(sample.parts["train", "small"].values("top1")) == 7
    _, weights = sample.weighted("top1")
    assert weights.sum() == pytest.approx(teachercache.open(tmp_path).manifest.rows)


def test_lengths_say_what_each_setting_loses(tmp_path):
    spec, rng = synthetic_spec(), np.random.default_rng(0)
    writer = teachercache.create(tmp_path, spec)
    writer.commit("s", [synthetic_record(rng, spec, f"d{i}", length=n) for i, n in enumerate((8, 8, 8, 40))])
    writer.publish()
    lines = losses_by_length(take_sample(teachercache.open(tmp_path), 1))
    # learnt rows: 7 + 7 + 7 + 39; of the long record those at positions 8 to 38, 16 to 38, 32 to 38
    expected = [
        (8, 1 / 4, 31 / 60, 39 / 60),
        (16, 1 / 4, 23 / 60, 39 / 60),
        (32, 1 / 4, 7 / 60, 39 / 60),
        (64, 0, 0, 0),
    ]
    np.testing.assert_allclose(lines, expected, atol=1e-6)


def test_calibration_of_known_rows():
    believed, hit = np.array([0.15, 0.15, 0.95, 1.0]), np.array([0.0, 1.0, 1.0, 1.0])
    points, error = calibration_bins(believed, hit, np.ones(4))
    assert points == [(0.15, 0.5, 2), (pytest.approx(0.975), 1.0, 2)]
    assert error == pytest.approx((0.35 + 0.025) / 2)


def test_a_cost_needs_plausible_seconds(tmp_path):
    spec = synthetic_spec()
    writer = teachercache.create(tmp_path, spec)
    good = {"shard_seconds": 9.0, "teacher_seconds": 3.6, "tensor_parallel": 2}
    for i, said in enumerate([good, {}, *({"shard_seconds": value} for value in ("2", True, -1.0, 1e300, [1]))]):
        writer.commit(f"s{i}", synthetic_records(spec, 2, seed=i, prefix=f"s{i}"), provenance=said)
    (line,) = costs(teachercache.Ledger.open(tmp_path).commits())
    assert line.hours == pytest.approx(2 * 3.6 / 3600)
    assert line.median_rate == pytest.approx(line.rows / 9)
