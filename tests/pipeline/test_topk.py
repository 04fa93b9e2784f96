"""Top-K in one pass over the logits equals the plain twin."""

from __future__ import annotations

import pytest
import torch

from pipeline.teachers.topk import row_top_k
from tests.pipeline.top_k_checks import check_shards, compare

SHAPES = [(3, 4096, 20), (2, 49152, 100), (2, 50257, 100), (1, 8191, 7), (4, 300, 100)]


def check(logits: torch.Tensor, k: int) -> None:
    target = torch.randint(0, logits.shape[1], (logits.shape[0],), device=logits.device)
    compare(logits, k, target, *row_top_k(logits, k, target))


@pytest.mark.parametrize(("n", "vocab", "k"), SHAPES)
def test_equals_the_plain_twin(n, vocab, k):
    torch.manual_seed(0)
    check(torch.randn(n, vocab) * 4, k)


def test_all_of_the_top_in_one_group_and_ties():
    logits = torch.zeros(2, 8192)
    logits[:, 640:672] = torch.arange(32.0)
    check(logits, 100)


def test_masked_vocabulary_has_no_nan():
    logits = torch.randn(2, 8192)
    logits[:, 4000:] = float("-inf")
    ids, logprobs, _ = row_top_k(logits, 50, torch.tensor([1, 2]))
    assert torch.isfinite(logprobs).all()
    assert int(ids.max()) < 4000


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_equals_the_plain_twin(dtype):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    for n, vocab, k in [(64, 128_256, 100), (33, 50_257, 100), (8, 201_088, 64)]:
        logits = (torch.randn(n, vocab, device="cuda") * 4).to(dtype)
        check(logits, k)
        check_shards(logits, k, 2)
