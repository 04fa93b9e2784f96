"""Rows taken in vLLM's worker, from the logits: its top-K and log-softmax of prompt rows are replaced.

vLLM mixes RowsExtension into its worker class (`worker_extension_cls`); the front end then calls
`collective_rpc("teachercache_install")`. A request that carries KEY in `SamplingParams.extra_args` gets our rows, every
other request is untouched:
  * V2 runner: around `prompt_logprobs_worker.compute_prompt_logprobs` the keys and positions of the batch's tokens are
    noted, and `prompt_logprob.compute_prompt_logprobs_with_chunking` is replaced. Chunked prefill, batching and preemption
    stay vLLM's own;
  * V1 runner (CPU machines): `_get_prompt_logprobs_dict` handles our requests by itself, the others by vLLM's code.
On one device topk.py and sampled_rows.py read the logits once; tensor-parallel, vocab_parallel.py merges the ranks' own
rows, so that the logits are never gathered.

Rows travel in the tensors that vLLM sends: behind column 0 and the K entries come EXTRA columns, see `packed`. The request
is one token longer than the input, so that the row after the last token is a prompt row like the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from pipeline.teachers import orphans
from teachercache.format.spec import Rows

QUALIFIED_NAME = "pipeline.teachers.worker_rows.RowsExtension"
KEY = "teachercache_key"  # in extra_args: the key of the input's random numbers, as a signed 64-bit integer
EXTRA = 2
ACTIVE = "active"
CHUNK_ROWS = 1024  # rows whose whole-vocabulary logits vLLM holds at a time; over n ranks n times as many rows


def unsupported() -> str | None:
    """Return why rows cannot be taken in the worker of this vLLM, or None; asked before an engine starts."""
    try:
        from vllm.v1.worker.gpu.sample import prompt_logprob

        if hasattr(prompt_logprob, "compute_prompt_logprobs_with_chunking"):
            return None
    except ImportError:
        pass
    try:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        return None if hasattr(GPUModelRunner, "_get_prompt_logprobs_dict") else "its runners have changed"
    except ImportError as error:
        return f"its runners have changed: {error}"


class RowsExtension:
    """Methods that appear on vLLM's worker."""

    def __new__(cls, *_args: Any, **_named: Any) -> RowsExtension:
        """Make a worker that ends with the front end. vLLM makes its workers before they load a model."""
        orphans.end_with_front_end()
        return super().__new__(cls)

    def teachercache_install(self, rows: dict[str, Any], vocab_size: int, shards: bool = True) -> str:
        """Take `rows`, a dumped spec.rows, in this worker; return what is active, beginning with ACTIVE, else why nothing is.

        shards=False keeps the gathered logits of a tensor-parallel teacher: a benchmark compares both.
        """
        wanted: Rows = TypeAdapter(Rows).validate_python(rows)
        runner: Any = getattr(self, "model_runner", None)
        make = RowsMaker(wanted, vocab_size)
        said = use_shards(make, runner) if shards else "gathered logits"
        missing = install_v2(runner, make) if hasattr(runner, "prompt_logprobs_worker") else install_v1(runner, make)
        return missing or f"{ACTIVE}{', ' * bool(said)}{said}"


@dataclass
class RowsMaker:
    """Makes rows of hidden states; on every rank of a tensor-parallel teacher at once where `ranks` > 1."""

    rows: Rows
    vocab_size: int  # the tokenizer's: ids at or beyond it are a head's padding
    rank: int = 0
    ranks: int = 1
    processor: Any = None  # vLLM's LogitsProcessor, whose gather is left out
    all_gather: Any = None

    @property
    def width(self) -> int:
        """Return the columns of a row as it travels, column 0 included."""
        return self.rows.entries + 1 + EXTRA

    def __call__(self, hidden_states: Any, logits_fn: Callable[[Any], Any], target: Any, u: Any) -> tuple[Any, Any]:
        """Return (ids int32 [N, width], logprobs float32 [N, width]) of hidden states [N, d].

        target int [N] is the next token, u float64 [N] uniform. Every decision depends on what all ranks share, so that all
        of them meet in all_gather or none does.
        """
        import torch

        parts = []
        step = CHUNK_ROWS * self.ranks
        for start in range(0, len(target), step):
            chunk = slice(start, start + step)
            found = self._sharded(hidden_states[chunk], logits_fn, target[chunk], u[chunk]) if self.ranks > 1 else None
            if found is None:
                small = [slice(a, a + CHUNK_ROWS) for a in range(start, min(start + step, len(target)), CHUNK_ROWS)]
                parts += [self.of_logits(logits_fn(hidden_states[s]), target[s], u[s]) for s in small]
            else:
                parts.append(packed(found, u[chunk]))
        ids, logprobs = (torch.cat(column) if len(column) > 1 else column[0] for column in zip(*parts, strict=True))
        return ids, logprobs

    def of_logits(self, logits: Any, target: Any, u: Any) -> tuple[Any, Any]:
        """Return the rows of logits [N, V], V at or beyond the tokenizer's size."""
        from pipeline.teachers.sampled_rows import sampled_rows
        from pipeline.teachers.topk import row_top_k

        if self.rows.kind == "sampled":
            return packed(sampled_rows(logits[:, : self.vocab_size], self.rows, target, u), u)
        return packed(row_top_k(logits, self.rows.entries, target, self.vocab_size), u)

    def _sharded(self, hidden_states: Any, logits_fn: Any, target: Any, u: Any) -> Any:
        from pipeline.teachers.vocab_parallel import sharded_row_top_k, sharded_sampled_rows

        logits = own_logits(self.processor, logits_fn, hidden_states)
        head = self.processor.org_vocab_size
        ranks: dict[str, Any] = {"rank": self.rank, "ranks": self.ranks, "all_gather": self.all_gather}
        if self.rows.kind == "sampled":
            return sharded_sampled_rows(logits, self.rows, target, u, vocab=min(head, self.vocab_size), **ranks)
        return sharded_row_top_k(logits, self.rows.entries, target, vocab=head, tokens=self.vocab_size, **ranks)


def packed(columns: Any, u: Any) -> tuple[Any, Any]:
    """Return ids and logprobs [N, 1+K+EXTRA] of SampledColumns or TopColumns: as vLLM's tensors carry them.

    The first extra column: id -1 - exact (0 in a top-K row, and no real id is negative), and the tail. The second: the
    upper 31 bits of u, by which the front end knows that a row was drawn for it, and the entropy.
    """
    import torch

    exact = getattr(columns, "exact", None)
    if exact is None:
        exact, tail = torch.zeros_like(columns.ids[:, 0]), torch.full_like(columns.entropy, float("nan"))
    else:
        tail = columns.tail
    check = (u * 2.0**31).to(torch.int32)
    ids = torch.cat([columns.ids, (-1 - exact)[:, None], check[:, None]], dim=1)
    return ids, torch.cat([columns.logprobs, tail[:, None], columns.entropy[:, None]], dim=1)


def signed(key: int) -> int:
    """Return the bits of a 64-bit key as a signed integer: what torch and msgpack both take."""
    return key - (1 << 64) if key >> 63 else key


def use_shards(make: RowsMaker, runner: Any) -> str:
    """Let the ranks of a tensor-parallel teacher keep their slices where this release allows it; return what is used."""
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
        tensor_model_parallel_all_gather,
    )
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    ranks = get_tensor_model_parallel_world_size()
    if ranks == 1:
        return ""
    processors = [m for m in runner.model.modules() if isinstance(m, LogitsProcessor)]
    if len(processors) != 1 or not hasattr(processors[0], "_gather_logits"):
        return "gathered logits: this release or model hides its shards"
    if getattr(runner, "lora_config", None) is not None:
        return "gathered logits: an adapter is in use"

    def all_gather(x: Any) -> Any:
        return tensor_model_parallel_all_gather(x.contiguous(), dim=0).view(ranks, *x.shape)

    make.rank, make.ranks = get_tensor_model_parallel_rank(), ranks
    make.processor, make.all_gather = processors[0], all_gather
    return f"vocabulary-parallel over {ranks}"


def install_v2(runner: Any, make: RowsMaker) -> str | None:
    """Install our hooks in the V2 runner; return why not. A second call replaces what the first one installed."""
    prompt_logprob: Any = importlib.import_module("vllm.v1.worker.gpu.sample.prompt_logprob")
    worker = runner.prompt_logprobs_worker
    if worker is None:
        return None  # a pipeline-parallel rank that has no head
    for owner, name in (
        (prompt_logprob, "compute_prompt_logprobs_with_chunking"),
        *((worker, name) for name in ("add_request", "remove_request", "compute_prompt_logprobs")),
    ):
        if not hasattr(owner, name):
            return f"{name} of the V2 runner is gone"
    hooks = getattr(worker, "_teachercache", None)
    if hooks is not None:
        hooks.make = make
        return None
    worker._teachercache = V2Hooks(worker, prompt_logprob, make)
    return None


class V2Hooks:
    """What is put around a V2 runner's PromptLogprobsWorker: it knows which tokens of a batch are whose."""

    def __init__(self, worker: Any, prompt_logprob: Any, make: RowsMaker) -> None:
        self.make = make
        self.keys: dict[str, int] = {}
        self._u: Any = None  # float64 [tokens] while a batch of ours is computed
        self._worker = worker
        self._add, self._remove = worker.add_request, worker.remove_request
        self._compute = worker.compute_prompt_logprobs
        self._chunking = prompt_logprob.compute_prompt_logprobs_with_chunking
        worker.add_request, worker.remove_request = self.add_request, self.remove_request
        worker.compute_prompt_logprobs = self.compute_prompt_logprobs
        prompt_logprob.compute_prompt_logprobs_with_chunking = self.chunking

    def add_request(self, req_id: str, req_idx: int, sampling_params: Any, *args: Any, **named: Any) -> Any:
        """Note the key of a request that is ours."""
        key = (sampling_params.extra_args or {}).get(KEY)
        if key is not None:
            self.keys[req_id] = key
        return self._add(req_id, req_idx, sampling_params, *args, **named)

    def remove_request(self, req_id: str, *args: Any, **named: Any) -> Any:
        """Forget a request."""
        self.keys.pop(req_id, None)
        return self._remove(req_id, *args, **named)

    def compute_prompt_logprobs(
        self, logits_fn: Any, hidden_states: Any, input_batch: Any, *args: Any, **named: Any
    ) -> Any:
        """Run vLLM's own code with the u of the batch's tokens at hand, where all that ask for rows are ours."""
        import torch

        from pipeline.teachers.sampled_rows import uniforms

        keys = [self.keys.get(req_id) for req_id in input_batch.req_ids]
        asks = self._worker.uses_prompt_logprobs[input_batch.idx_mapping_np]
        if any(key is not None for key in keys) and all(
            key is not None for key, a in zip(keys, asks, strict=True) if a
        ):
            counts = np.diff(input_batch.query_start_loc_np[: len(keys) + 1])
            starts = input_batch.num_computed_prefill_tokens_np[: len(keys)]
            position = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
            key = np.repeat(np.array([k or 0 for k in keys], dtype=np.int64), counts)
            both = torch.from_numpy(np.stack([key, position.astype(np.int64)])).to(hidden_states.device)
            self._u = uniforms(both[0], both[1])
        try:
            return self._compute(logits_fn, hidden_states, input_batch, *args, **named)
        finally:
            self._u = None

    def chunking(
        self,
        prompt_token_ids: Any,
        prompt_hidden_states: Any,
        logits_fn: Any,
        num_prompt_logprobs: int,
        logprobs_mode: str = "raw_logprobs",
    ) -> Any:
        """Take the place of vLLM's compute_prompt_logprobs_with_chunking."""
        import torch

        count, u = len(prompt_token_ids), self._u
        ours = (
            u is not None and num_prompt_logprobs + 1 == self.make.width and logprobs_mode == "raw_logprobs" and count
        )
        if not ours:
            return self._chunking(prompt_token_ids, prompt_hidden_states, logits_fn, num_prompt_logprobs, logprobs_mode)
        ids, logprobs = self.make(prompt_hidden_states[:count], logits_fn, prompt_token_ids, u[:count])
        return ids, logprobs, torch.zeros(len(ids), dtype=torch.int32, device=ids.device)


def install_v1(runner: Any, make: RowsMaker) -> str | None:
    """Install our hooks in the V1 runner; return why not. A second call replaces what the first one installed."""
    for name in ("_get_prompt_logprobs_dict", "num_prompt_logprobs", "requests", "input_batch", "query_start_loc"):
        if not hasattr(runner, name):
            return f"{name} of the V1 runner is gone"
    hooks = getattr(runner, "_teachercache", None)
    if hooks is not None:
        hooks.make = make
        return None
    runner._teachercache = V1Hooks(runner, make)
    return None


class V1Hooks:
    """What is put around a V1 runner's _get_prompt_logprobs_dict."""

    def __init__(self, runner: Any, make: RowsMaker) -> None:
        self.runner, self.make = runner, make
        self._plain = runner._get_prompt_logprobs_dict
        runner._get_prompt_logprobs_dict = self.get_prompt_logprobs_dict

    def get_prompt_logprobs_dict(self, hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        """Return the finished rows of a step; vLLM's own code never sees our requests."""
        table = self.runner.num_prompt_logprobs
        ours = {r: key for r in table if (key := self._key(r)) is not None}
        asked = {r: table.pop(r) for r in ours}
        done: dict[str, Any] = self._plain(hidden_states, num_scheduled_tokens)
        for r, key in ours.items():
            rows = self._rows_of(r, key, hidden_states, num_scheduled_tokens.get(r))
            if rows is None:
                table[r] = asked[r]  # more of its prompt is to come
            else:
                done[r] = rows
        return done

    def _key(self, req_id: str) -> int | None:
        params = self.runner.requests[req_id].sampling_params
        key: int | None = (params.extra_args or {}).get(KEY) if params is not None else None
        return key if params is not None and params.prompt_logprobs == self.make.width - 1 else None

    def _rows_of(self, req_id: str, key: int, hidden_states: Any, scheduled: int | None) -> Any:
        """Compute the rows of this step's part of a prompt; return all of them behind its last part, else None."""
        import torch
        from vllm.v1.outputs import LogprobsTensors

        from pipeline.teachers.sampled_rows import uniforms

        if scheduled is None:  # preempted
            return None
        request = self.runner.requests[req_id]
        prompt = request.prompt_token_ids
        held = request.in_progress_prompt_logprobs_cpu
        if held is None:
            held = LogprobsTensors.empty_cpu(len(prompt) - 1, self.make.width)
            request.in_progress_prompt_logprobs_cpu = held
        start = request.num_computed_tokens
        count = min(scheduled, len(prompt) - 1 - start)
        if count > 0:
            offset = int(self.runner.query_start_loc.np[self.runner.input_batch.req_id_to_index[req_id]])
            device = hidden_states.device
            position = torch.arange(start, start + count, device=device)
            u = uniforms(torch.full_like(position, key), position)
            target = torch.tensor(prompt[start + 1 : start + 1 + count], device=device)
            part = hidden_states[offset : offset + count]
            ids, logprobs = self.make(part, self.runner.model.compute_logits, target, u)
            rows = slice(start, start + count)
            held.logprob_token_ids[rows], held.logprobs[rows] = ids.cpu(), logprobs.cpu()
            held.selected_token_ranks[rows] = 0
        if start + scheduled < len(prompt):
            return None
        request.in_progress_prompt_logprobs_cpu = None
        return held


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
