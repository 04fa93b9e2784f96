"""Checks of top-K rows against the plain twin, on one rank and on several that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from pipeline.teachers.topk import reference_row_top_k
from pipeline.teachers.vocab_parallel import sharded_row_top_k


def compare(
    logits: torch.Tensor, k: int, target: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor, entropy: torch.Tensor
) -> None:
    wanted_ids, wanted, spread = reference_row_top_k(logits, k, target)
    torch.testing.assert_close(entropy, spread, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logprobs, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(ids[:, 0], wanted_ids[:, 0])
    # equal logits may come in another order: the ids must hold the values that they claim
    claimed = torch.log_softmax(logits.double(), dim=-1).gather(1, ids.long()).float()
    torch.testing.assert_close(claimed, logprobs, rtol=1e-5, atol=1e-5)
    assert all(len(set(row.tolist())) == k for row in ids[:, 1:])


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

    for ids, logprobs, entropy in on_ranks(ranks, work):
        assert (ids.dtype, logprobs.dtype) == (torch.int32, torch.float32)
        compare(logits, k, target, ids, logprobs, entropy)
