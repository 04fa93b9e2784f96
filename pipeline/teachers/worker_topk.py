"""Rows taken in vLLM's worker: its top-K and log-softmax of prompt rows are replaced.

vLLM mixes RowsExtension into its worker class (`worker_extension_cls`); the front end then calls
`collective_rpc("teachercache_install")`, which swaps one module global of the V2 model runner in each worker:
  * on one GPU, `prompt_logprob.compute_topk_scores`: topk.row_top_k reads the logits once;
  * tensor-parallel, `prompt_logprob.compute_prompt_logprobs_with_chunking`: vocab_parallel.py merges the ranks' own top-K, so
    that the logits are never gathered.
Where a name is missing (the V1 runner, another release), nothing is swapped and the answer says so. The rows that come
out have the shape and the meaning of vLLM's, so everything behind them is the same code; ranks of tokens stay zero,
since nothing reads them.
"""

from __future__ import annotations

import importlib
from typing import Any

QUALIFIED_NAME = "pipeline.teachers.worker_topk.RowsExtension"
ACTIVE = "active"
CHUNK_ROWS = 1024  # rows whose whole-vocabulary logits vLLM holds at a time; over n ranks n times as many rows


class RowsExtension:
    """Methods that appear on vLLM's worker."""

    def teachercache_install(self, shards: bool = True) -> str:
        """Swap our top-K in and return what is active, beginning with ACTIVE, else why nothing is.

        shards=False keeps the gathered logits of a tensor-parallel teacher: a benchmark compares both.
        """
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
        if not getattr(plain, "_teachercache", False):
            prompt_logprob.compute_topk_scores = make_topk_scores(plain)
        return install_shards(prompt_logprob, runner) if shards else ACTIVE


def install_shards(prompt_logprob: Any, runner: Any) -> str:
    """Take the top-K of each rank's slice where there are several ranks and this release allows it; return what is active."""
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
        tensor_model_parallel_all_gather,
    )
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    ranks = get_tensor_model_parallel_world_size()
    if ranks == 1:
        return ACTIVE
    plain = getattr(prompt_logprob, "compute_prompt_logprobs_with_chunking", None)
    processors = [m for m in runner.model.modules() if isinstance(m, LogitsProcessor)]
    if plain is None or len(processors) != 1 or not hasattr(processors[0], "_gather_logits"):
        return f"{ACTIVE}, gathered logits: this release or model hides its shards"
    if getattr(runner, "lora_config", None) is not None:
        return f"{ACTIVE}, gathered logits: an adapter is in use"

    def all_gather(x: Any) -> Any:
        return tensor_model_parallel_all_gather(x, dim=0).view(ranks, *x.shape)

    if not getattr(plain, "_teachercache", False):
        prompt_logprob.compute_prompt_logprobs_with_chunking = make_sharded_chunking(
            plain, processors[0], get_tensor_model_parallel_rank(), ranks, all_gather
        )
    return f"{ACTIVE}, vocabulary-parallel over {ranks}"


def make_topk_scores(plain: Any) -> Any:
    """Return a stand-in for vLLM's compute_topk_scores; calls with other options go to `plain`."""
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


def make_sharded_chunking(plain: Any, processor: Any, rank: int, ranks: int, all_gather: Any) -> Any:
    """Return a stand-in for vLLM's compute_prompt_logprobs_with_chunking, for each of `ranks` workers at once.

    Every decision depends on what all ranks share, so that all of them meet in `all_gather` or none does.
    """
    import torch

    from pipeline.teachers.vocab_parallel import sharded_row_top_k

    def compute_prompt_logprobs_with_chunking(
        prompt_token_ids: Any,
        prompt_hidden_states: Any,
        logits_fn: Any,
        num_prompt_logprobs: int,
        logprobs_mode: str = "raw_logprobs",
    ) -> Any:
        def as_vllm_does() -> Any:
            return plain(prompt_token_ids, prompt_hidden_states, logits_fn, num_prompt_logprobs, logprobs_mode)

        if logprobs_mode != "raw_logprobs" or num_prompt_logprobs < 1 or not len(prompt_token_ids):
            return as_vllm_does()
        parts = []
        for start in range(0, len(prompt_token_ids), CHUNK_ROWS * ranks):
            chunk = slice(start, start + CHUNK_ROWS * ranks)
            rows = sharded_row_top_k(
                own_logits(processor, logits_fn, prompt_hidden_states[chunk]),
                num_prompt_logprobs,
                prompt_token_ids[chunk],
                rank=rank,
                ranks=ranks,
                vocab=processor.org_vocab_size,
                all_gather=all_gather,
            )
            if rows is None:
                return as_vllm_does()
            parts.append(rows)
        ids, logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
        return ids, logprobs, torch.zeros(len(ids), dtype=torch.int32, device=ids.device)

    compute_prompt_logprobs_with_chunking._teachercache = True  # type: ignore[attr-defined]
    return compute_prompt_logprobs_with_chunking


def own_logits(processor: Any, logits_fn: Any, hidden_states: Any) -> Any:
    """Return this rank's slice of the logits [N, v], soft cap and scale applied, padding included.

    The model's compute_logits runs with a logits processor that does not gather: whatever a model does before and
    behind the head stays in.
    """
    processor._gather_logits = lambda logits: logits
    try:
        return logits_fn(hidden_states)
    finally:
        del processor._gather_logits
