"""The product: vLLM, offline, rows from its prompt log-probabilities.

Two ways out of the engine, same numbers:
  * the public path: `flat_logprobs`, lists of Python floats, 82 % of plain prefill on an H200 (dictionaries: 10 %);
  * the fast path (raw_tensors.py): the tensors that the engine sends are kept before Python objects are built from them.
The row after the last token comes from `logprobs=K` of the one token that the engine samples.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from pipeline.config import GenerateConfig, TeacherConfig
from pipeline.errors import EngineDied, RowsInvalid
from pipeline.teachers import raw_tensors, worker_topk
from pipeline.teachers.base import Columns, Generated, PendingInput, Prompt, RowsWanted, Scored, Teacher, end_tokens
from teachercache.errors import UsageError

# what vLLM reads when it is imported, where the environment has no other value
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "TOKENIZERS_PARALLELISM": "true"}


def _columns_of_flat(flat: Any, first: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids int32 [r, width], logprobs float32 [r, width]) of the positions from `first` on."""
    begin = flat.start_indices[first] if first < len(flat.start_indices) else len(flat.token_ids)
    ids = np.asarray(flat.token_ids[begin:], dtype=np.int32)
    logprobs = np.asarray(flat.logprobs[begin:], dtype=np.float32)
    if ids.size % width:
        raise RowsInvalid("shape", f"expected {width} entries a position, found {ids.size} in all")
    return ids.reshape(-1, width), logprobs.reshape(-1, width)


class VllmTeacher(Teacher):
    """vLLM's `LLM` in this process, tensor-parallel inside the node. Raises UsageError where it cannot load the model."""

    def __init__(self, config: TeacherConfig, model_path: str, wanted: RowsWanted) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if config.threads:
            os.environ["OMP_NUM_THREADS"] = str(config.threads)
        import vllm
        from vllm import LLM, SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        self.wanted, top_k = wanted, wanted.rows.entries
        if wanted.rows.kind == "sampled":
            raise UsageError(
                "teacher.engine vllm cannot sample rows in this version; use rows.kind=top_k, or engine hf"
            )
        self._config = config
        reason = raw_tensors.unsupported()
        if config.fast_path == "require" and reason:
            raise UsageError(f"teacher.fast_path is `require`, but this vLLM ({vllm.__version__}) has none: {reason}")
        fast = config.fast_path != "off" and reason is None
        if fast:
            raw_tensors.install()
        try:
            self._arguments = engine_arguments(config, model_path, top_k)
            self.llm: Any = LLM(**self._arguments)
        except (OSError, ValueError) as error:
            raise UsageError(f"{model_path}: vLLM cannot load it: {str(error).strip().splitlines()[0]}") from error
        self.engine: Any = self.llm.llm_engine
        asked: dict[str, Any] = {"prompt_logprobs": top_k, "logprobs": top_k, "flat_logprobs": True}
        sampling = partial(SamplingParams, temperature=0.0, max_tokens=1, detokenize=False, **asked)
        self._public_sampling = sampling()
        self._sampling = sampling(extra_args={raw_tensors.FLAG: True} if fast else None)
        self._dead: type[Exception] = EngineDeadError
        self._inside: dict[str, PendingInput] = {}
        self._serial = 0
        self.provenance = {
            "engine": f"vllm {vllm.__version__}",
            "path": "raw" if fast else "flat",
            "fast_path_missing": reason,
            "device": _device_name(),
            "tensor_parallel": config.tensor_parallel,
        }

    def accelerate(self) -> None:
        """Take the rows in vLLM's worker where the job file, this release and this machine allow it."""
        if self._config.fast_path == "off":
            return
        if "worker_extension_cls" not in self._arguments:
            self.provenance["worker_top_k"] = "no CUDA device"
            return
        answers = [str(a) for a in self.llm.collective_rpc("teachercache_install")]
        missing = next((a for a in answers if not a.startswith(worker_topk.ACTIVE)), None)
        if missing and self._config.fast_path == "require":
            raise UsageError(f"teacher.fast_path is `require`, but the worker's top-K cannot be had: {missing}")
        self.provenance["worker_top_k"] = missing or answers[0]

    # -- the interface -------------------------------------------------------------------------------------------

    def submit(self, key: int, input_ids: np.ndarray, row_pos: np.ndarray) -> None:
        """Add a request to the engine."""
        self._submit(PendingInput(key, input_ids, row_pos), self._sampling)

    def submit_public(self, key: int, input_ids: np.ndarray, row_pos: np.ndarray) -> None:
        """Add a request that takes vLLM's public path, whatever path is active: for the canary and for tests."""
        self._submit(PendingInput(key, input_ids, row_pos), self._public_sampling)

    def _submit(self, item: PendingInput, sampling: Any) -> None:
        self._serial += 1
        name = str(self._serial)
        try:
            self.engine.add_request(name, {"prompt_token_ids": item.input_ids.tolist()}, sampling)
        except self._dead as error:
            raise self._died(error) from error
        self._inside[name] = item

    def collect(self) -> list[Scored]:
        """Run one step of the engine and return the requests that it finished."""
        if not self._inside:
            return []
        try:
            outputs = self.engine.step()
        except self._dead as error:
            raise self._died(error) from error
        done = ((self._inside.pop(output.request_id), output) for output in outputs if output.finished)
        return [self.scored(item, partial(columns_of, output, self.wanted.rows.entries)) for item, output in done]

    def _died(self, error: Exception) -> EngineDied:
        return EngineDied(f"vLLM's engine died: {error}", [item.key for item in self._inside.values()])

    def generate(
        self, prompts: Sequence[Prompt], config: GenerateConfig, stop_ids: Sequence[int] = ()
    ) -> list[Generated]:
        """Return continuations of all prompts, decoded together."""
        from vllm import SamplingParams

        own = self.engine.model_config.try_get_generation_config().get("eos_token_id")
        params = [
            SamplingParams(
                temperature=config.temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                max_tokens=prompt.most,
                seed=prompt.seed if config.temperature > 0 else None,
                detokenize=False,
                stop_token_ids=end_tokens(own, stop_ids),
            )
            for prompt in prompts
        ]
        try:
            outputs = self.llm.generate([{"prompt_token_ids": p.ids.tolist()} for p in prompts], params, use_tqdm=False)
        except self._dead as error:
            raise EngineDied(f"vLLM's engine died while generating: {error}") from error
        made = (output.outputs[0] for output in outputs)
        return [Generated(np.asarray(m.token_ids, dtype=np.int32), str(m.finish_reason)) for m in made]

    def close(self) -> None:
        """Shut the engine's processes down."""
        core: Any = getattr(self.engine, "engine_core", None)
        if hasattr(core, "shutdown"):
            core.shutdown()


def columns_of(output: Any, top_k: int) -> Columns:
    """Return the rows of a finished request, whichever path it took. Raises RowsInvalid."""
    width = top_k + 1
    completion = output.outputs[0]
    if output.prompt_logprobs is None or completion.logprobs is None:
        raise RowsInvalid("no_rows", f"the engine gave no log-probabilities (finish: {completion.finish_reason})")
    if isinstance(output.prompt_logprobs, raw_tensors.RawRows):
        first, first_lp = output.prompt_logprobs.arrays(width)
        last, last_lp = completion.logprobs.arrays(width)
    else:
        first, first_lp = _columns_of_flat(output.prompt_logprobs, 1, width)
        last, last_lp = _columns_of_flat(completion.logprobs, 0, width)
    return Columns(np.concatenate([first, last[:1]]), np.concatenate([first_lp, last_lp[:1]]))


def engine_arguments(config: TeacherConfig, model_path: str, top_k: int) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`; the job file's engine_args win, except over what rows depend on."""
    arguments: dict[str, Any] = {
        "enable_prefix_caching": False,  # a cached prefix has no prompt log-probabilities
        "disable_log_stats": True,
        "skip_tokenizer_init": True,
        "seed": 0,
        **config.engine_args,
    }
    if config.tensor_parallel > 1:  # inside a Ray actor vLLM would otherwise ask Ray for placement groups
        arguments.setdefault("distributed_executor_backend", "mp")
    if config.fast_path != "off" and _has_cuda():
        arguments["worker_extension_cls"] = worker_topk.QUALIFIED_NAME
    arguments.update(
        model=model_path,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_logprobs=max(top_k, 20),
        tensor_parallel_size=config.tensor_parallel,
        trust_remote_code=config.trust_remote_code,
        hf_overrides={**arguments.get("hf_overrides", {}), "head_dtype": config.head_dtype},
    )
    return arguments


def _has_cuda() -> bool:
    """Return whether there is a GPU, without initialising CUDA: vLLM's workers are forked."""
    import torch

    return torch.cuda.device_count() > 0


def _device_name() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name()) if _has_cuda() else "cpu"
