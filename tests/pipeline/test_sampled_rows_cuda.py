"""The row sampler's Triton kernel against the plain twin, in float32 and bf16, on one GPU and on slices."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pipeline.teachers.sampled_rows import reference_sampled_rows, sampled_rows  # noqa: E402
from pipeline.teachers.topk import reference_row_top_k, row_top_k  # noqa: E402
from teachercache.format.spec import SampledRows  # noqa: E402
from tests.pipeline.gloo_ranks import Batches, draws_that_differ  # noqa: E402
from tests.pipeline.sampled_checks import MOST_DIFFERENT, cases, compare, on_shards  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def inputs(rows: int, vocab: int):
    rng = torch.Generator().manual_seed(3)
    target, u = torch.randint(0, vocab, (rows,), generator=rng), torch.rand(rows, generator=rng, dtype=torch.float64)
    return target.cuda(), u.cuda()


@pytest.mark.parametrize("name", cases(64, 1))
def test_shapes_with_an_edge(name):
    rows, logits = SampledRows(entries=12), cases(1003, 64)[name].cuda()
    target, u = inputs(64, 1003)
    wanted = reference_sampled_rows(logits, rows, target, u)
    assert compare(sampled_rows(logits, rows, target, u), wanted, rows)[0] == 0
    for found in on_shards(logits, rows, target, u, 2):
        assert compare(found, wanted, rows)[0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "entries"), [(128_256, 24), (262_144, 24), (128_256, 100), (50_257, 12)])
def test_few_draws_differ(vocab, entries, dtype):
    """Counted over a thousand rows of each: fewer than one draw in ten thousand."""
    rows = SampledRows(entries=entries)
    differ = draws = 0
    for seed in range(4):
        logits = (torch.randn(256, vocab, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype).cuda()
        target, u = inputs(256, vocab)
        wanted = reference_sampled_rows(logits, rows, target, u)
        for found in (sampled_rows(logits, rows, target, u), *on_shards(logits, rows, target, u, 2)):
            counts = compare(found, wanted, rows)
            differ, draws = differ + counts[0], draws + counts[1]
    print(f"{differ} of {draws:,} draws differ")
    assert differ <= MOST_DIFFERENT * draws


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "entries", "count"), [(128_256, 24, 32), (262_144, 100, 8), (50_257, 100, 8)])
def test_few_draws_of_two_processes_on_one_gpu_differ(vocab, entries, count, dtype, tmp_path):
    """Two ranks over gloo, each with the kernel on its slice, over more than a hundred thousand draws."""
    batches = Batches(vocab, entries, spread=2.0, dtype=dtype, rows=256, count=count)
    differ, draws = draws_that_differ(2, batches, "cuda", tmp_path)
    print(f"{differ} of {draws:,} draws differ")
    assert draws >= 100_000
    assert differ < MOST_DIFFERENT * draws


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entropy_of_top_k_rows(dtype):
    logits = (torch.randn(128, 128_256, generator=torch.Generator().manual_seed(0)) * 3).to(dtype).cuda()
    logits[:, 100_000:] += 2.0  # a padded head with a mass that counts
    target, _ = inputs(128, 100_000)
    found, wanted = (make(logits, 100, target, 100_000) for make in (row_top_k, reference_row_top_k))
    torch.testing.assert_close(found.entropy, wanted.entropy, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(found.logprobs, wanted.logprobs, atol=1e-5, rtol=1e-5)
    assert int(found.ids[:, 1:].max()) < 100_000
