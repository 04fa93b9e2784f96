"""Sampled rows of tensor-parallel ranks that are processes over gloo, against the plain twin over the whole row.

The ranks may share one GPU, which NCCL refuses: what they gather then goes through CPU memory.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch

from pipeline.teachers.sampled_rows import SampledColumns, reference_sampled_rows
from pipeline.teachers.vocab_parallel import sharded_sampled_rows
from teachercache.format.spec import SampledRows
from tests.pipeline.sampled_checks import compare
from tests.pipeline.top_k_checks import shards_of


class Batches(NamedTuple):
    """Random logits: `count` batches of `rows` rows, normal with standard deviation `spread`."""

    vocab: int
    entries: int
    spread: float
    dtype: torch.dtype
    rows: int
    count: int


def draws_that_differ(ranks: int, batches: Batches, device: str, folder: Path) -> tuple[int, int]:
    """Return how many draws differ from the twin's, and how many there are; assert that the ranks have equal rows."""
    with ProcessPoolExecutor(ranks, multiprocessing.get_context("spawn")) as pool:
        meeting = f"file://{folder}/meeting"
        found = [pool.submit(_rank, rank, ranks, batches, device, meeting) for rank in range(ranks)]
        differ, draws, digests = zip(*(f.result(timeout=280) for f in found), strict=True)
    assert len(set(digests)) == 1, "the ranks do not agree"
    return sum(differ), sum(draws)


def _rank(rank: int, ranks: int, batches: Batches, device: str, meeting: str) -> tuple[int, int, str]:
    """Make every row together with the other ranks; compare every ranks-th batch with the twin."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist = torch.distributed
    dist.init_process_group("gloo", meeting, timedelta(seconds=120), world_size=ranks, rank=rank)

    def all_gather(x: torch.Tensor) -> torch.Tensor:
        own = x.cpu().contiguous()
        every = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(every, own)
        return torch.stack(every).to(device)

    rows, differ, draws, digest = SampledRows(entries=batches.entries), 0, 0, hashlib.sha256()
    for number in range(batches.count):
        rng = torch.Generator().manual_seed(number)
        logits = torch.randn(batches.rows, batches.vocab, generator=rng) * batches.spread
        logits = logits.to(device, batches.dtype)
        target = torch.randint(0, batches.vocab, (batches.rows,), generator=rng).to(device)
        u = torch.rand(batches.rows, generator=rng, dtype=torch.float64).to(device)
        own = shards_of(logits, ranks)[rank].contiguous()
        ours = sharded_sampled_rows(
            own, rows, target, u, rank=rank, ranks=ranks, vocab=batches.vocab, all_gather=all_gather
        )
        assert isinstance(ours, SampledColumns)
        for column in ours:
            digest.update(column.cpu().numpy().tobytes())
        if number % ranks == rank:
            counts = compare(ours, reference_sampled_rows(logits, rows, target, u), rows)
            differ, draws = differ + counts[0], draws + counts[1]
    dist.destroy_process_group()
    return differ, draws, digest.hexdigest()
