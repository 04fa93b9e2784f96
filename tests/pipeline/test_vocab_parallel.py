"""Top-K merged from slices of the vocabulary equals the plain twin over the whole row."""

from __future__ import annotations

import pytest
import torch

from pipeline.teachers.vocab_parallel import sharded_row_top_k
from tests.pipeline.top_k_checks import check_shards


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("n", "vocab", "k"), [(3, 4096, 20), (2, 49152, 100), (2, 50257, 100), (1, 128_256, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_shards_equal_the_plain_twin_over_the_whole_row(n, vocab, k, ranks, dtype):
    torch.manual_seed(0)
    check_shards((torch.randn(n, vocab) * 4).to(dtype), k, ranks)


def test_all_of_the_top_in_one_shard_and_targets_at_every_edge():
    torch.manual_seed(0)
    logits = torch.randn(4, 1000)
    logits[:, 900:] += 50.0
    check_shards(logits, 64, 2, torch.tensor([0, 511, 512, 999]))


def test_a_shard_whose_vocabulary_is_masked_has_no_nan():
    logits = torch.randn(2, 1024)
    logits[:, 512:] = float("-inf")
    check_shards(logits, 64, 2, torch.tensor([0, 511]))


def test_a_split_that_does_not_cover_the_vocabulary_is_refused_before_anything_is_sent():
    def all_gather(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the other ranks are not here")

    whole, target = torch.randn(2, 1000), torch.tensor([1, 2])
    for vocab, k in [(1000, 10), (2001, 10), (1005, 10)]:  # a replicated head, too many ids, a last slice below k
        assert sharded_row_top_k(whole, k, target, rank=0, ranks=2, vocab=vocab, all_gather=all_gather) is None
