"""Top-K in one pass over the logits equals the plain twin."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.teachers.topk import reference_row_top_k, row_top_k
from pipeline.teachers.vocab_parallel import sharded_row_top_k

torch = pytest.importorskip("torch")

SHAPES = [(3, 4096, 20), (2, 49152, 100), (2, 50257, 100), (1, 8191, 7), (4, 300, 100)]


def check(logits: torch.Tensor, k: int) -> None:
    target = torch.randint(0, logits.shape[1], (logits.shape[0],), device=logits.device)
    compare(logits, k, target, *row_top_k(logits, k, target))


def compare(logits: torch.Tensor, k: int, target: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
    wanted_ids, wanted = reference_row_top_k(logits, k, target)
    torch.testing.assert_close(logprobs, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(ids[:, 0], wanted_ids[:, 0])
    # equal logits may come in another order: the ids must hold the values that they claim
    claimed = torch.log_softmax(logits.float(), dim=-1).gather(1, ids.long())
    torch.testing.assert_close(claimed, logprobs, rtol=1e-5, atol=1e-5)
    assert all(len(set(row.tolist())) == k for row in ids[:, 1:])


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
    ids, logprobs = row_top_k(logits, 50, torch.tensor([1, 2]))
    assert torch.isfinite(logprobs).all()
    assert int(ids.max()) < 4000


def on_ranks(ranks: int, work: Callable[[int, Any], Any]) -> list[Any]:
    """work(rank, all_gather) in one thread a rank; the all-gather stacks what the threads bring."""
    barrier, table, answers = threading.Barrier(ranks, timeout=20), [None] * ranks, [None] * ranks

    def run(rank: int) -> None:
        def all_gather(x: torch.Tensor) -> torch.Tensor:
            table[rank] = x
            barrier.wait()
            whole = torch.stack(table)
            barrier.wait()
            return whole

        answers[rank] = work(rank, all_gather)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def shards_of(logits: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Equal slices of the vocabulary, padded to a multiple of 64 a rank with logits that no one may take."""
    width = -(-logits.shape[1] // (64 * ranks)) * 64
    padding = logits.new_full((logits.shape[0], width * ranks - logits.shape[1]), 1e6)
    return list(torch.cat([logits, padding], dim=1).split(width, dim=1))


def check_shards(logits: torch.Tensor, k: int, ranks: int, target: torch.Tensor | None = None) -> None:
    vocab = logits.shape[1]
    if target is None:
        target = torch.randint(0, vocab, (logits.shape[0],), device=logits.device)
    slices = shards_of(logits, ranks)

    def work(rank: int, all_gather: Any) -> Any:
        return sharded_row_top_k(slices[rank], k, target, rank=rank, ranks=ranks, vocab=vocab, all_gather=all_gather)

    for ids, logprobs in on_ranks(ranks, work):
        assert (ids.dtype, logprobs.dtype) == (torch.int32, torch.float32)
        compare(logits, k, target, ids, logprobs)


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
