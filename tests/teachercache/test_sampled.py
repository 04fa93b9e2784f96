"""Sampled rows: their definition step by step, unbiasedness, variance, both codecs, invariants, one u for a row everywhere."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import teachercache
from teachercache.errors import InvalidRecord, UnsupportedFormat
from teachercache.format.record import (
    TAIL_FLOOR,
    check_record,
    content_key,
    key_uniforms,
    row_key,
    row_uniforms,
)
from teachercache.format.sampled import LOG_ZERO, sample_row
from teachercache.format.spec import SampledRows
from teachercache.testing import synthetic_records, synthetic_spec
from teachercache.upkeep.optimize import optimize
from teachercache.upkeep.verify import verify

ROWS = SampledRows(entries=12)
SPEC = synthetic_spec(vocab_size=5000, rows=ROWS)


def naive(p, n, k_min, u):
    """The definition, a step at a time: ids by (-p, id), the threshold, the points u + j on the cumulative p / tau."""
    order = sorted(range(len(p)), key=lambda v: (-p[v], v))
    k = k_min
    while p[order[k]] * (n - k) > sum(p[v] for v in order[k:]) * (1 + 1e-12):
        k += 1
    mass = sum(p[v] for v in order[k:])
    if mass < 2.0**-23:
        return order[:n], [p[v] for v in order[:n]], n
    tau, drawn, reached = mass / (n - k), [], 0.0
    for v in sorted(order[k:]):
        while len(drawn) < n - k and u + len(drawn) < reached + p[v] / tau:
            drawn.append(v)
        reached += p[v] / tau
    return order[:k] + drawn, [p[v] for v in order[:k]] + [tau] * (n - k), k


def distributions(vocab):
    """Name -> p, of every shape that has an edge of the definition."""
    rng = np.random.default_rng(0)

    def soft(x):
        p = np.exp(x - x.max())
        return p / p.sum()

    one, few = np.zeros(vocab), np.zeros(vocab)
    one[vocab // 2] = 1.0
    few[rng.permutation(vocab)[:7]] = np.array([0.4, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05])
    nearly = np.full(vocab, 1e-8 / vocab)
    nearly[3] = 1 - 1e-8
    return {
        "peaked": soft(rng.normal(size=vocab) * 4),
        "flat": np.full(vocab, 1 / vocab),
        "ties": soft(np.round(rng.normal(size=vocab) * 2)),
        "one": one,
        "few": few,
        "nearly one": nearly / nearly.sum(),
    }


@pytest.mark.parametrize("name", distributions(131))
@pytest.mark.parametrize("u", [0.0, 0.3, 0.999999])
def test_a_row_is_the_definition(name, u):
    p = distributions(131)[name]
    row = sample_row(np.arange(131), p, 12, 3, u)
    ids, weights, exact = naive(p, 12, 3, u)
    assert row.exact == exact
    assert row.ids[0].tolist() == ids
    np.testing.assert_allclose(np.exp(row.logprobs), weights, rtol=1e-5, atol=1e-30)
    assert row.logprobs.min() >= LOG_ZERO
    assert row.tail >= np.float32(TAIL_FLOOR)


@pytest.mark.parametrize(
    ("given", "exact"),
    [
        ([0.5, 0.2, 0.1, 0.1, 0.05, 0.05], 2),  # 0.1 · 2 <= 0.3: ends at k_min... with n = 4
        ([0.9, 0.05, 0.03, 0.01, 0.005, 0.005], 3),
        ([1.0, 0, 0, 0, 0, 0], 4),  # nothing to draw from: all four are the top four
        ([1 - 1e-7, 1e-7, 0, 0, 0, 0], 4),
        ([1 / 6] * 6, 1),
    ],
)
def test_where_the_exact_part_ends(given, exact):
    row = sample_row(np.arange(6), np.array(given), 4, 1, 0.5)
    assert row.exact == exact


SEEDS = 100_000
Z = 5.0  # two-sided 6e-7 a token: 3e-3 for all tokens of all cases together


@pytest.mark.parametrize("vocab", [131, pytest.param(262_144, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", distributions(131))
def test_the_mean_over_many_seeds_is_the_distribution(name, vocab):
    p = distributions(vocab)[name]
    n, k_min = (12, 3) if vocab == 131 else (24, 6)
    u = np.random.default_rng(1).random(SEEDS)
    row = sample_row(np.arange(vocab), p, n, k_min, u)
    weights = np.exp(row.logprobs.astype(np.float64))
    assert abs(weights.sum() - 1) <= 1e-6
    ordered = np.sort(row.ids, axis=1)
    assert np.all(ordered[:, 1:] != ordered[:, :-1])
    drawn = row.ids[:, row.exact :]
    counts = np.bincount(drawn.reshape(-1), minlength=vocab)
    kept = np.zeros(vocab)
    kept[row.ids[0, : row.exact]] = weights[: row.exact]
    np.testing.assert_allclose(kept[kept > 0], p[kept > 0], rtol=1e-5, atol=1e-30)
    if row.exact == n:
        assert p.sum() - p[row.ids[0]].sum() < 2.0**-23
        print(f"{name}, V = {vocab:,}: all {n} entries exact, nothing drawn")
        return
    tail = np.where(kept > 0, 0, p)
    tail[row.ids[0, : row.exact]] = 0
    tau = tail.sum() / (n - row.exact)
    expected = tail / tau
    assert expected.max() <= 1 + 1e-9
    off = np.abs(counts - SEEDS * expected) / np.sqrt(np.maximum(SEEDS * expected * (1 - expected), 1))
    many = SEEDS * expected * (1 - expected) >= 20  # normal enough; the others by neighbours that are drawn 500 times
    assert off[many].max(initial=0) < Z
    rare = ~many & (expected < 0.5)
    block = (np.cumsum(expected[rare]) * SEEDS // 500).astype(int)
    wanted = np.bincount(block, expected[rare] * SEEDS)
    # systematic draws of neighbours exclude each other, so that this sum varies less than a Poisson count would
    together = np.abs(np.bincount(block, counts[rare]) - wanted) / np.sqrt(wanted + 1)
    assert together.max(initial=0) <= Z
    # variance: of each token's weight, summed, against P^2 / m - sum of p^2
    found = (tau**2 * (counts / SEEDS) * (1 - counts / SEEDS)).sum()
    formula = tail.sum() ** 2 / (n - row.exact) - (tail**2).sum()
    print(
        f"{name}, V = {vocab:,}: {row.exact} exact; |z| at most {off[many].max(initial=0):.2f} of {many.sum():,} tokens and "
        f"{together.max(initial=0):.2f} of {len(wanted):,} groups of rarer ones, limit {Z}; "
        f"variance {found / max(formula, 1e-300):.4f} of the formula's"
    )
    if formula > 1e-12:
        assert found == pytest.approx(formula, rel=0.02)


def test_a_sparse_row_is_thinned_without_bias():
    """What `thin` does: 12 entries from the 24 of a sampled row, twice unbiased."""
    p = distributions(1000)["peaked"]
    rng = np.random.default_rng(2)
    mean = np.zeros(1000)
    rounds = 4000
    for u in rng.random(rounds):
        row = sample_row(np.arange(1000), p, 24, 6, u)
        thin = sample_row(row.ids[0], np.exp(row.logprobs.astype(np.float64)), 12, 3, rng.random())
        mean[thin.ids[0]] += np.exp(thin.logprobs)
    mean /= rounds
    deviation = np.sqrt((p * 0.2 + 1e-9) / rounds)  # a weight is at most tau of 12 entries
    assert (np.abs(mean - p) / deviation).max() < 6


def test_impossible_requests_are_refused():
    for n, exact in ((4, 0), (4, 4), (7, 2)):
        with pytest.raises(ValueError, match="expected 1 <= exact"):
            sample_row(np.arange(6), np.full(6, 1 / 6), n, exact, 0.5)


def test_u_is_a_hash_of_spec_key_and_position():
    key = content_key(SPEC.digest, np.arange(5, dtype=np.int32), np.arange(5, dtype=np.int32))
    u = row_uniforms(SPEC.digest, key, np.arange(5))
    assert u.dtype == np.float64
    np.testing.assert_array_equal(u[2:4], row_uniforms(SPEC.digest, key, np.array([2, 3], dtype=np.int32)))
    assert not np.array_equal(u, row_uniforms(SPEC.digest, b"x" * 16, np.arange(5)))
    assert not np.array_equal(u, row_uniforms("f" * 64, key, np.arange(5)))

    def splitmix64(state):  # the published algorithm, on Python's integers
        mask = 2**64 - 1
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    start = row_key(SPEC.digest, key)
    states = [(start + (i + 1) * 0x9E3779B97F4A7C15) % 2**64 for i in range(5)]
    assert u.tolist() == [(splitmix64(s) >> 11) * 2.0**-53 for s in states]
    assert splitmix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the first output for seed 0, as published
    many = key_uniforms(start, np.arange(200_000))
    assert abs(many.mean() - 0.5) < 5 / np.sqrt(12 * 200_000)
    assert 0 <= many.min() < many.max() < 1


@pytest.mark.parametrize("codec", ["open", "compact"])
def test_sampled_records_come_back(tmp_path, codec):
    records = synthetic_records(SPEC, 20)
    writer = teachercache.create(tmp_path, SPEC, codec=codec)
    writer.commit("s", records)
    writer.publish()
    cache = teachercache.open(tmp_path)
    assert cache.spec.rows == ROWS
    assert cache.spec.top_k == 12
    for wrote, got in zip(records, cache.records(), strict=True):
        drawn = np.arange(12) >= wrote.exact[:, None]
        same = (wrote.topk_ids == got.topk_ids).all(axis=1)
        assert same.all() or codec == "compact"  # equal levels come back ordered by frequency
        np.testing.assert_array_equal(np.where(drawn, wrote.topk_ids, 0), np.where(drawn, got.topk_ids, 0))
        np.testing.assert_array_equal(np.sort(wrote.topk_ids, axis=1), np.sort(got.topk_ids, axis=1))
        np.testing.assert_array_equal(wrote.exact, got.exact)
        assert got.exact.dtype == np.uint16
        np.testing.assert_array_equal(wrote.entropy, got.entropy)
        np.testing.assert_array_equal(wrote.tail_logprob, got.tail_logprob)
        np.testing.assert_allclose(np.exp(got.topk_logprobs).sum(1), 1, atol=1e-2)
        if codec == "compact":  # a drawn weight is not rounded at all
            np.testing.assert_allclose(got.topk_logprobs[drawn], wrote.topk_logprobs[drawn], atol=2e-6)
        check_record(got, SPEC)
    assert verify(cache.store, SPEC).problems == []
    few = next(cache.records(columns={"topk_logprobs"}))
    np.testing.assert_allclose(np.exp(few.topk_logprobs).sum(1), 1, atol=1e-2)
    assert next(cache.records(columns={"exact"})).exact is not None


def test_optimize_recodes_sampled_rows_and_back(tmp_path):
    writer = teachercache.create(tmp_path, SPEC)
    for i in range(3):
        writer.commit(f"s{i}", synthetic_records(SPEC, 10, seed=i, prefix=f"s{i}"))
    writer.publish()
    before = {r.doc_id: r for r in teachercache.open(tmp_path).records()}
    assert (done := optimize(writer, codec="compact")).bytes_after < done.bytes_before
    optimize(writer, codec="open")
    after = {r.doc_id: r for r in teachercache.open(tmp_path).records()}
    assert before.keys() == after.keys()
    for name, record in before.items():
        drawn = np.arange(12) >= record.exact[:, None]
        np.testing.assert_array_equal(record.topk_ids[drawn], after[name].topk_ids[drawn])
        np.testing.assert_array_equal(record.topk_logprobs[drawn], after[name].topk_logprobs[drawn])
        np.testing.assert_array_equal(record.entropy, after[name].entropy)
    assert verify(writer.store, SPEC).ok


GOOD = synthetic_records(SPEC, 1, length=10)[0]
PLAIN = synthetic_spec(vocab_size=5000)


def changed(name, where, value):
    array = getattr(GOOD, name).copy()
    array[where] = value
    return dataclasses.replace(GOOD, **{name: array})


def test_the_good_record_is_good():
    check_record(GOOD, SPEC)
    assert (GOOD.exact < 12).all()


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (dataclasses.replace(GOOD, exact=None), "exact"),
        (dataclasses.replace(GOOD, entropy=None), "entropy"),
        (dataclasses.replace(GOOD, exact=GOOD.exact[:-1]), "shape"),
        (dataclasses.replace(GOOD, exact=GOOD.exact.astype(np.float32)), "dtype"),
        (changed("exact", 2, 0), "exact"),
        (changed("exact", 2, 2), "exact"),  # below the spec's least, 3
        (changed("exact", 2, 13), "exact"),
        (changed("exact", 2, GOOD.exact[2] + 1), "weights"),
        (changed("entropy", 2, np.nan), "nan"),
        (changed("entropy", 2, np.inf), "inf"),
        (changed("entropy", 2, GOOD.entropy[2] + 5), "entropy"),
        (changed("entropy", 2, 0.0), "entropy"),
        (changed("topk_ids", (2, 0), GOOD.topk_ids[2, -1]), "repeated_id"),
        (changed("topk_ids", (2, 0), 5000), "id_out_of_range"),
        (changed("topk_ids", (2, slice(-2, None)), GOOD.topk_ids[2, :-3:-1]), "unsorted"),
        (changed("topk_logprobs", (2, 0), -20.0), "unsorted"),
        (changed("topk_logprobs", (2, -1), GOOD.topk_logprobs[2, -1] - 0.5), "weights"),
        (changed("tail_logprob", 2, GOOD.tail_logprob[2] - 0.5), "weights"),
        (changed("tail_logprob", 2, 0.5), "mass_above_one"),
        (changed("tail_logprob", 2, -30.0), "tail_floor"),
    ],
)
def test_each_broken_invariant_is_named(record, reason):
    with pytest.raises(InvalidRecord) as caught:
        check_record(record, SPEC)
    assert caught.value.reason == reason


def test_a_record_of_the_other_kind_is_refused():
    with pytest.raises(InvalidRecord):
        check_record(GOOD, synthetic_spec(vocab_size=5000, top_k=12))
    with pytest.raises(InvalidRecord):
        check_record(synthetic_records(PLAIN, 1)[0], synthetic_spec(vocab_size=5000, rows=SampledRows(entries=8)))


def test_the_kind_of_rows_is_part_of_the_identity():
    assert SPEC.digest != synthetic_spec(vocab_size=5000, top_k=12).digest
    other = SPEC.model_copy(update={"rows": SampledRows(entries=12, seed=1)})
    assert [d[0] for d in SPEC.differences(other)] == ["rows.seed"]
    assert SampledRows(entries=24).exact == 6
    assert SampledRows(entries=2).exact == 1
    with pytest.raises(ValueError, match="exact must be below entries"):
        SampledRows(entries=4, exact=4)


def test_a_cache_of_the_earlier_format_is_refused_in_one_sentence(tmp_path):
    import hashlib

    from teachercache.format.sealed import canonical_json

    teachercache.create(tmp_path, PLAIN).commit("s", synthetic_records(PLAIN, 1))
    tree = json.loads((tmp_path / "spec.json").read_text())
    del tree["rows"], tree["seal"]
    body = canonical_json(tree | {"top_k": 8})
    seal = hashlib.sha256(body).hexdigest()
    (tmp_path / "spec.json").write_bytes(body[:-1] + f',"seal":"{seal}"}}\n'.encode())
    with pytest.raises(UnsupportedFormat, match=r"made by an earlier format, without `rows`; make the cache again"):
        teachercache.open(tmp_path)
