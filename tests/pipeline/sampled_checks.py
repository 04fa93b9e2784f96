"""Sampled rows of one implementation against another: equal but for draws within rounding of a boundary, which are counted."""

from __future__ import annotations

import numpy as np
import torch

from pipeline.teachers.sampled_rows import SampledColumns, sampled_rows
from pipeline.teachers.vocab_parallel import sharded_sampled_rows
from teachercache.format.sampled import sample_row
from teachercache.format.spec import SampledRows
from tests.pipeline.top_k_checks import on_ranks

MOST_DIFFERENT = 1e-4  # share of draws


def cases(vocab: int, rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Logits of every shape that has an edge of the definition; rows of each."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab, generator=rng)
    few = torch.full((rows, vocab), float("-inf"))
    few[:, 5 : 5 + 9 : 2] = x[:, :5]
    one = torch.full((rows, vocab), float("-inf"))
    one[:, vocab - 1] = 2.0
    sure = x.clone()
    sure[:, 7] += 25.0
    return {
        "normal": x * 3,
        "flat": torch.zeros(rows, vocab),
        "nearly flat": x * 0.1,
        "ties": (x * 2).round(),
        "bf16": (x * 3).bfloat16(),
        "few": few,
        "one": one,
        "sure": sure,
        "large": x * 3 + 3000.0,
        "long tail": x * 8 - 40.0,
    }


def compare(found: SampledColumns, wanted: SampledColumns, rows: SampledRows) -> tuple[int, int]:
    """Assert equal rows; return how many draws differ, and how many there are."""
    found, wanted = (SampledColumns(*(c.cpu() for c in s)) for s in (found, wanted))
    assert torch.equal(found.exact, wanted.exact)
    drawn = torch.arange(rows.entries) >= wanted.exact[:, None]
    ids, expected = found.ids[:, 1:], wanted.ids[:, 1:]
    assert torch.equal(ids[~drawn], expected[~drawn])
    assert torch.equal(found.ids[:, 0], wanted.ids[:, 0])
    torch.testing.assert_close(found.logprobs, wanted.logprobs, atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(found.tail, wanted.tail, atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(found.entropy, wanted.entropy, atol=1e-5, rtol=1e-5)
    ordered = ids.sort(dim=1).values
    assert bool((ordered[:, 1:] != ordered[:, :-1]).all()), "an id twice"
    both = drawn[:, 1:] & drawn[:, :-1]
    assert bool((ids[:, 1:] > ids[:, :-1])[both].all()), "drawn ids ascend"
    return int((ids != expected)[drawn].sum()), int(drawn.sum())


def by_definition(logits: torch.Tensor, rows: SampledRows, target: torch.Tensor, u: torch.Tensor) -> SampledColumns:
    """The rows of teachercache.format.sampled, one at a time."""
    p = torch.softmax(logits.cpu().double(), dim=1)
    made = [
        sample_row(np.arange(p.shape[1]), p[i].numpy(), rows.entries, rows.exact, float(u[i])) for i in range(len(p))
    ]
    target = target.cpu()
    ids = torch.cat([target[:, None].int(), torch.tensor(np.concatenate([m.ids for m in made]))], dim=1)
    first = p.gather(1, target.long()[:, None]).log().float()
    return SampledColumns(
        ids,
        torch.cat([first, torch.tensor(np.stack([m.logprobs for m in made]))], dim=1),
        torch.tensor([m.exact for m in made], dtype=torch.int32),
        torch.tensor(np.array([m.tail for m in made])),
        torch.special.entr(p).sum(dim=1).float(),
    )


def on_shards(
    logits: torch.Tensor, rows: SampledRows, target: torch.Tensor, u: torch.Tensor, ranks: int
) -> list[SampledColumns]:
    """What each of `ranks` threads makes of its slice, padded as vLLM pads it."""
    vocab = logits.shape[1]
    width = -(-vocab // ranks)
    padded = torch.nn.functional.pad(logits, (0, ranks * width - vocab), value=float("nan"))

    def run(rank, all_gather):
        own = padded[:, rank * width : (rank + 1) * width]
        return sharded_sampled_rows(own, rows, target, u, rank=rank, ranks=ranks, vocab=vocab, all_gather=all_gather)

    return on_ranks(ranks, run)


__all__ = ["MOST_DIFFERENT", "by_definition", "cases", "compare", "on_shards", "sampled_rows"]
