"""Sampled rows in a worker: sorted whole, in groups, on several ranks and by the format's definition, they are the same."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pipeline.teachers.sampled_rows import reference_sampled_rows, sampled_rows, uniforms  # noqa: E402
from pipeline.teachers.vocab_parallel import sharded_sampled_rows  # noqa: E402
from teachercache.format.record import key_uniforms  # noqa: E402
from teachercache.format.spec import SampledRows  # noqa: E402
from tests.pipeline.gloo_ranks import Batches, draws_that_differ  # noqa: E402
from tests.pipeline.sampled_checks import MOST_DIFFERENT, by_definition, cases, compare, on_shards  # noqa: E402

VOCAB, N = 1003, 64  # not a multiple of 32
ROWS = SampledRows(entries=12)


def inputs(logits, seed=3):
    rng = torch.Generator().manual_seed(seed)
    n, vocab = logits.shape
    return torch.randint(0, vocab, (n,), generator=rng), torch.rand(n, generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("name", cases(64, 1))
def test_every_way_gives_the_rows_of_the_definition(name):
    logits = cases(VOCAB, N)[name]
    target, u = inputs(logits)
    wanted = by_definition(logits, ROWS, target, u)
    for found in (
        reference_sampled_rows(logits, ROWS, target, u),
        sampled_rows(logits, ROWS, target, u),
        *on_shards(logits, ROWS, target, u, 2),
        *on_shards(logits, ROWS, target, u, 3),
    ):
        differ, _ = compare(found, wanted, ROWS)
        assert differ == 0


@pytest.mark.parametrize("name", ["normal", "bf16", "nearly flat"])
def test_few_draws_differ_where_the_vocabulary_is_large(name):
    rows = SampledRows(entries=24)
    logits = cases(60_000, 128, seed=1)[name]
    target, u = inputs(logits)
    wanted = reference_sampled_rows(logits, rows, target, u)
    differ, draws = compare(sampled_rows(logits, rows, target, u), wanted, rows)
    assert differ <= MOST_DIFFERENT * draws
    for found in on_shards(logits, rows, target, u, 2):
        differ, draws = compare(found, wanted, rows)
        assert differ <= MOST_DIFFERENT * draws


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_draws_of_two_processes_differ(dtype, tmp_path):
    """Two ranks over gloo against the whole row, over more than a hundred thousand draws."""
    batches = Batches(vocab=20_011, entries=100, spread=2.0, dtype=dtype, rows=256, count=6)
    differ, draws = draws_that_differ(2, batches, "cpu", tmp_path)
    print(f"{differ} of {draws:,} draws differ")
    assert draws >= 100_000
    assert differ < MOST_DIFFERENT * draws


@pytest.mark.parametrize("entries", [2, 40, 1003])
def test_any_number_of_entries(entries):
    rows = SampledRows(entries=entries)
    logits = cases(VOCAB, 8)["normal"]
    target, u = inputs(logits)
    assert compare(sampled_rows(logits, rows, target, u), by_definition(logits, rows, target, u), rows)[0] == 0


def test_draws_of_the_worker_are_unbiased():
    logits = cases(131, 1)["normal"]
    p = torch.softmax(logits[0].double(), dim=0)
    seeds = 20_000
    rows = SampledRows(entries=12)
    u = torch.rand(seeds, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found = sampled_rows(logits.expand(seeds, -1), rows, torch.zeros(seeds, dtype=torch.long), u)
    weights = found.logprobs[:, 1:].double().exp()
    assert float((weights.sum(dim=1) - 1).abs().max()) < 1e-6
    mean = torch.zeros(131, dtype=torch.float64).scatter_add(
        0, found.ids[:, 1:].reshape(-1).long(), weights.reshape(-1)
    )
    tau = weights[0, -1]
    deviation = torch.sqrt((p * (tau - p)).clamp(min=1e-12) / seeds)
    assert float(((mean / seeds - p).abs() / deviation).max()) < 5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_row_stays_broken_and_alone(value):
    logits = cases(VOCAB, 4)["normal"]
    target, u = inputs(logits)
    wanted = sampled_rows(logits, ROWS, target, u)
    logits[2, 17] = value
    found = sampled_rows(logits, ROWS, target, u)
    assert bool(found.logprobs[2].isnan().any())
    assert 0 <= int(found.ids.min()) <= int(found.ids.max()) < VOCAB
    others = [0, 1, 3]
    assert torch.equal(found.ids[others], wanted.ids[others])


def test_u_is_the_formats():
    keys = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0]
    for key in keys:
        signed = torch.tensor(key - 2**64 if key >= 2**63 else key).expand(1000)
        np.testing.assert_array_equal(uniforms(signed, torch.arange(1000)).numpy(), key_uniforms(key, np.arange(1000)))


def test_slices_too_narrow_for_the_entries_are_left_to_the_whole_row():
    logits = cases(40, 2)["normal"]
    target, u = inputs(logits)
    call = {"rank": 0, "ranks": 4, "vocab": 40, "all_gather": None}
    assert sharded_sampled_rows(logits[:, :10], ROWS, target, u, **call) is None
