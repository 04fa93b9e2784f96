"""The stand-ins in vLLM's worker give what vLLM would have given."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.teachers.topk import reference_row_top_k

torch = pytest.importorskip("torch")


def compare(logits: torch.Tensor, k: int, target: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
    wanted_ids, wanted = reference_row_top_k(logits, k, target)
    torch.testing.assert_close(logprobs, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(ids[:, 0], wanted_ids[:, 0])
    # equal logits may come in another order: the ids must hold the values that they claim
    claimed = torch.log_softmax(logits.float(), dim=-1).gather(1, ids.long())
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


@pytest.mark.slow
@pytest.mark.parametrize(("soft_cap", "scale"), [(None, 1.0), (5.0, 0.5)])
def test_worker_without_the_gather_gives_what_vllm_would_have_gathered(soft_cap, scale, monkeypatch):
    """vLLM's own LogitsProcessor on two ranks: soft cap, scale and padding as in the gathered logits."""
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    from pipeline.teachers import worker_topk

    torch.manual_seed(0)
    ranks, vocab, width, hidden_size, k, rows = 2, 1000, 512, 16, 20, 70
    weight = torch.nn.functional.pad(torch.randn(vocab, hidden_size), (0, 0, 0, ranks * width - vocab))
    hidden, target = torch.randn(rows, hidden_size), torch.randint(0, vocab, (rows,))
    with set_current_vllm_config(VllmConfig()):
        processors = [LogitsProcessor(vocab, scale=scale, soft_cap=soft_cap) for _ in range(ranks)]
    monkeypatch.setattr(worker_topk, "CHUNK_ROWS", 16)  # three chunks, the last one short

    def work(rank: int, all_gather: Any) -> Any:
        part = weight[rank * width : (rank + 1) * width]
        head = SimpleNamespace(tp_size=ranks, quant_method=SimpleNamespace(apply=lambda head, x, bias=None: x @ part.T))
        chunking = worker_topk.make_sharded_chunking(None, processors[rank], rank, ranks, all_gather)
        return chunking(target, hidden, lambda x: processors[rank](head, x), k)

    logits = hidden @ weight[:vocab].T
    logits = (logits if soft_cap is None else torch.tanh(logits / soft_cap) * soft_cap) * scale
    for ids, logprobs, zeros in on_ranks(ranks, work):
        compare(logits, k, target, ids, logprobs)
        assert zeros.shape == (rows,)
    assert all("_gather_logits" not in vars(p) for p in processors)
