"""Rows taken in vLLM's worker: its top-K and log-softmax of prompt rows are replaced by topk.row_top_k.

vLLM mixes RowsExtension into its worker class (`worker_extension_cls`); the front end then calls
`collective_rpc("teachercache_install")`, which swaps one module global of the V2 model runner,
`prompt_logprob.compute_topk_scores`.  Where that name is missing (the V1 runner, another release), nothing is swapped
and the answer says so.  The rows that come out have the shape and the meaning of vLLM's own, so everything behind
them is the same code; ranks are left at zero, nobody reads them.
"""

from __future__ import annotations

import importlib
from typing import Any

QUALIFIED_NAME = "pipeline.teachers.worker_rows.RowsExtension"


class RowsExtension:
    """Methods that appear on vLLM's worker."""

    def teachercache_install(self) -> str:
        """Swaps the top-K in.  Returns "" when active, else why not."""
        try:
            prompt_logprob: Any = importlib.import_module("vllm.v1.worker.gpu.sample.prompt_logprob")
        except ImportError as error:
            return f"no V2 model runner: {error}"
        runner: Any = getattr(self, "model_runner", None)
        if not hasattr(runner, "prompt_logprobs_worker"):
            return "the V1 model runner is in use"
        plain = getattr(prompt_logprob, "compute_topk_scores", None)
        if plain is None:
            return "prompt_logprob.compute_topk_scores is gone"
        if getattr(plain, "_teachercache", False):
            return ""
        prompt_logprob.compute_topk_scores = make_topk_scores(plain)
        return ""


def make_topk_scores(plain: Any) -> Any:
    """A stand-in for vLLM's compute_topk_scores; calls with options that we do not need go to the plain one."""
    import torch
    from vllm.v1.outputs import LogprobsTensors

    from pipeline.teachers.topk import row_top_k

    def compute_topk_scores(logits: Any, num_logprobs: int, sampled_token_ids: Any, *args: Any, **named: Any) -> Any:
        if args or num_logprobs < 1 or num_logprobs >= logits.shape[1] or any(named.values()):
            return plain(logits, num_logprobs, sampled_token_ids, *args, **named)
        ids, logprobs = row_top_k(logits, num_logprobs, sampled_token_ids)
        return LogprobsTensors(
            logprob_token_ids=ids,
            logprobs=logprobs,
            selected_token_ranks=torch.zeros(len(ids), dtype=torch.int32, device=ids.device),
        )

    compute_topk_scores._teachercache = True  # type: ignore[attr-defined]
    return compute_topk_scores
