"""The stand-ins in vLLM's worker give what vLLM would have given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.pipeline.top_k_checks import compare, on_ranks


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
