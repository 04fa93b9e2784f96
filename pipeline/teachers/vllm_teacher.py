"""The product: vLLM, offline, rows from its prompt log-probabilities.

Three ways out of the engine, same numbers:
  * the public path: `flat_logprobs`, lists of Python floats, 82 % of plain prefill on an H200 (dictionaries: 10 %). Rows of
    the most probable tokens alone; the row after the last token comes from `logprobs=K` of the one token that the engine
    samples;
  * the tensors that the engine sends, kept before Python objects are built from them (raw_tensors.py);
  * rows of either kind, made from the logits in the worker (worker_rows.py), which travel in these tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import GenerateConfig, TeacherConfig
from pipeline.errors import EngineDied, RowsInvalid
from pipeline.teachers import orphans, raw_tensors, worker_rows
from pipeline.teachers.base import (
    Columns,
    Generated,
    PendingInput,
    Prompt,
    RowsWanted,
    Scored,
    Teacher,
    end_tokens,
    scored,
)
from teachercache.errors import UsageError
from teachercache.format.record import key_uniforms

SPARE = 16  # more columns than K that the public path asks for where a head is padded beyond the tokenizer
Read = Callable[[PendingInput, Any], Scored]  # from a finished request to rows
ENVIRONMENT = {  # what vLLM reads when it is imported, where the environment has no other value
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TOKENIZERS_PARALLELISM": "true",
}


def _columns_of_flat(flat: Any, first: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids int32 [r, width], logprobs float32 [r, width]) of the positions from `first` on."""
    begin = flat.start_indices[first] if first < len(flat.start_indices) else len(flat.token_ids)
    ids = np.asarray(flat.token_ids[begin:], dtype=np.int32)
    logprobs = np.asarray(flat.logprobs[begin:], dtype=np.float32)
    if ids.size % width:
        raise RowsInvalid("shape", f"expected {width} entries a position, found {ids.size} in all")
    return ids.reshape(-1, width), logprobs.reshape(-1, width)


ON_CPU = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""The engine in this process. On a CPU vLLM would start two more, leave a core to the one that waits for the other, and
bind the threads of all engines of a machine to the same cores."""


class VllmTeacher(Teacher):
    """vLLM's `LLM`, tensor-parallel inside the node. Raises UsageError where it cannot load the model.

    On GPUs its engine is a process, on a CPU it runs in this one.
    """

    def __init__(self, config: TeacherConfig, model_path: str, wanted: RowsWanted) -> None:
        if config.threads:
            os.environ["OMP_NUM_THREADS"] = str(config.threads)
        on_cpu = config.tensor_parallel == 1 and not _has_cuda()
        for name, value in (ENVIRONMENT | (ON_CPU if on_cpu else {})).items():
            os.environ.setdefault(name, value)
        import vllm
        from vllm import LLM, SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        self.wanted = wanted
        spare = min(SPARE, max(0, _head_size(model_path) - wanted.vocab_size))
        self._asked = wanted.rows.entries + spare  # by the public path, which may rank a head's padding
        self._config = config
        reason = raw_tensors.unsupported()
        if wanted.rows.kind == "sampled":
            reason = reason or worker_rows.unsupported()
            if config.fast_path == "off" or reason:
                why = reason or "teacher.fast_path is off"
                raise UsageError(
                    f"sampled rows are made in vLLM's worker, which vLLM {vllm.__version__} cannot do here: {why}"
                )
        if config.fast_path == "require" and reason:
            raise UsageError(f"teacher.fast_path is `require`, but this vLLM ({vllm.__version__}) has none: {reason}")
        fast = config.fast_path != "off" and reason is None
        if fast:
            raw_tensors.install()
        orphans.announce()
        try:
            self._arguments = engine_arguments(config, model_path, self._asked + worker_rows.EXTRA)
            self.llm: Any = LLM(**self._arguments)
        except (OSError, ValueError, TypeError) as error:  # TypeError: an engine_args that vLLM does not know
            raise UsageError(f"{model_path}: vLLM cannot load it: {str(error).strip().splitlines()[0]}") from error
        self.engine: Any = self.llm.llm_engine
        _check_length(self.engine.model_config, config.max_model_len)
        asked: dict[str, Any] = {"prompt_logprobs": self._asked, "logprobs": self._asked, "flat_logprobs": True}
        sampling = partial(SamplingParams, temperature=0.0, max_tokens=1, detokenize=False, **asked)
        self._public_sampling = sampling()
        self._sampling = sampling(extra_args={raw_tensors.FLAG: True} if fast else None)
        self._dead: type[Exception] = EngineDeadError
        self._inside: dict[str, tuple[PendingInput, Read]] = {}
        self._worker_rows = False  # until `accelerate`
        self._serial = 0
        self.provenance = {
            "engine": f"vllm {vllm.__version__}",
            "path": "raw" if fast else "flat",
            "fast_path_missing": reason,
            "device": _device_name(),
            "tensor_parallel": config.tensor_parallel,
        }

    def accelerate(self) -> None:
        """Take the rows in vLLM's worker where the job file and this release allow it."""
        if self._config.fast_path == "off":
            return
        asked = (self.wanted.rows.model_dump(), self.wanted.vocab_size)
        answers = [str(a) for a in self.llm.collective_rpc("teachercache_install", args=asked)]
        missing = next((a for a in answers if not a.startswith(worker_rows.ACTIVE)), None)
        if missing and (self._config.fast_path == "require" or self.wanted.rows.kind == "sampled"):
            raise UsageError(f"rows cannot be made in this vLLM's worker, as the job file asks: {missing}")
        self._worker_rows = missing is None and self.provenance["path"] == "raw"
        self.provenance["worker_rows"] = missing or answers[0]

    # -- the interface -------------------------------------------------------------------------------------------

    def submit(self, key: int, input_ids: np.ndarray, row_pos: np.ndarray) -> None:
        """Add a request to the engine."""
        item = PendingInput(key, input_ids, row_pos)
        if not self._worker_rows:
            self._submit(item, item.input_ids, self._sampling, self._public_rows)
            return
        drawn_by = self.wanted.key(input_ids, row_pos)
        longer = np.append(input_ids, input_ids[-1])  # so that the row after the last token is a prompt row
        read = partial(self._rows_of_worker, drawn_by=drawn_by)
        self._submit(item, longer, self.worker_sampling(drawn_by), read)

    def worker_sampling(self, key: int) -> Any:
        """Return what asks the worker for rows, drawn by the key of an input's random numbers."""
        from vllm import SamplingParams

        extra = {raw_tensors.FLAG: True, worker_rows.KEY: worker_rows.signed(key)}
        width = self.wanted.rows.entries + worker_rows.EXTRA
        return SamplingParams(
            temperature=0.0, max_tokens=1, detokenize=False, prompt_logprobs=width, flat_logprobs=True, extra_args=extra
        )

    def submit_public(self, key: int, input_ids: np.ndarray, row_pos: np.ndarray) -> None:
        """Add a request that takes vLLM's public path, whatever path is active: for the canary and for tests.

        Its rows are the most probable tokens, whatever kind is wanted.
        """
        self._submit(PendingInput(key, input_ids, row_pos), input_ids, self._public_sampling, self._public_rows)

    def _submit(self, item: PendingInput, prompt: np.ndarray, sampling: Any, read: Read) -> None:
        self._serial += 1
        name = str(self._serial)
        try:
            self.engine.add_request(name, {"prompt_token_ids": prompt.tolist()}, sampling)
        except self._dead as error:
            raise self._died(error) from error
        self._inside[name] = (item, read)

    def collect(self) -> list[Scored]:
        """Advance the engine by one step."""
        if not self._inside:
            return []
        try:
            outputs = self.engine.step()
        except self._dead as error:
            raise self._died(error) from error
        done = ((*self._inside.pop(output.request_id), output) for output in outputs if output.finished)
        return [read(item, output) for item, read, output in done]

    def _public_rows(self, item: PendingInput, output: Any) -> Scored:
        wanted = self.wanted.plain
        return scored(item, lambda: without_padding(columns_of(output, self._asked), wanted), wanted)

    def _rows_of_worker(self, item: PendingInput, output: Any, drawn_by: int) -> Scored:
        return scored(item, lambda: columns_of_worker(output, self.wanted, drawn_by), self.wanted)

    def _died(self, error: Exception) -> EngineDied:
        return EngineDied(f"vLLM's engine died: {error}", [item.key for item, _ in self._inside.values()])

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


def without_padding(columns: Columns, wanted: RowsWanted) -> Columns:
    """Return the first K entries below the tokenizer's size.

    Where a head's padding fills more columns than there are to spare, what is left of it is refused later.
    """
    k = wanted.rows.entries
    padding = columns.ids[:, 1:] >= wanted.vocab_size
    if not padding.any():
        return Columns(columns.ids[:, : k + 1], columns.logprobs[:, : k + 1])
    order = np.argsort(padding, axis=1, kind="stable")[:, :k] + 1
    order = np.concatenate([np.zeros((len(order), 1), dtype=order.dtype), order], axis=1)
    return Columns(np.take_along_axis(columns.ids, order, 1), np.take_along_axis(columns.logprobs, order, 1))


def columns_of_worker(output: Any, wanted: RowsWanted, drawn_by: int) -> Columns:
    """Return the rows that a worker packed (worker_rows.packed), for every token of an input. Raises RowsInvalid.

    Each row carries 31 bits of the u that it was drawn for, which must be those of the key: a row of another request or
    position, or one that vLLM made by itself, is found here.
    """
    width = wanted.rows.entries + 1 + worker_rows.EXTRA
    if not isinstance(output.prompt_logprobs, raw_tensors.RawRows):
        raise RowsInvalid("no_rows", "the engine gave no tensors")
    ids, logprobs = output.prompt_logprobs.arrays(width)
    if (ids[:, -2] >= 0).any():
        raise RowsInvalid("not_ours", "a row was not made by this worker's own code")
    expected = (key_uniforms(drawn_by, np.arange(len(ids))) * 2.0**31).astype(np.int32)
    if not np.array_equal(ids[:, -1], expected):
        wrong = int(np.flatnonzero(ids[:, -1] != expected)[0])
        raise RowsInvalid("not_ours", f"row {wrong} was drawn for another input or position")
    columns = Columns(ids[:, :-2], logprobs[:, :-2], entropy=logprobs[:, -1])
    if wanted.rows.kind == "top_k":
        return columns
    return columns._replace(exact=-1 - ids[:, -2], tail=logprobs[:, -2])


def _head_size(model_path: str) -> int:
    """Return how many logits a model's head has, by its config.json; 0 where it does not say."""
    try:
        tree = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    sizes = [part.get("vocab_size") for part in (tree, tree.get("text_config") or {})]
    return max((size for size in sizes if isinstance(size, int)), default=0)


def engine_arguments(config: TeacherConfig, model_path: str, max_logprobs: int) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`: the job file's engine_args, and those of pipeline.config.SET_BY, which they lack."""
    arguments: dict[str, Any] = {
        "enable_prefix_caching": False,  # a cached prefix has no prompt log-probabilities
        "disable_log_stats": True,
        "skip_tokenizer_init": True,
        "seed": 0,
        **config.engine_args,
    }
    if config.tensor_parallel > 1:  # inside a Ray actor vLLM would otherwise ask Ray for placement groups
        arguments.setdefault("distributed_executor_backend", "mp")
    arguments.update(
        worker_extension_cls=worker_rows.QUALIFIED_NAME,
        model=model_path,
        dtype=config.dtype,
        max_model_len=config.max_model_len + 1,  # the worker's rows need one token behind the input
        max_logprobs=max(max_logprobs, 20),
        tensor_parallel_size=config.tensor_parallel,
        trust_remote_code=config.trust_remote_code,
        hf_overrides={**arguments.get("hf_overrides", {}), "head_dtype": config.head_dtype},
    )
    return arguments


def _check_length(model_config: Any, max_model_len: int) -> None:
    """Raise UsageError where a model is not made for inputs of that length. vLLM is asked for one more."""
    allowed = os.environ.pop("VLLM_ALLOW_LONG_MAX_MODEL_LEN", None)
    try:
        model_config.get_and_verify_max_len(max_model_len)
    except ValueError as error:
        raise UsageError(f"teacher.max_model_len {max_model_len}: {str(error).strip().splitlines()[0]}") from error
    finally:
        if allowed is not None:
            os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = allowed


def _has_cuda() -> bool:
    """Return whether there is a GPU, without initialising CUDA: vLLM's workers are forked."""
    import torch

    return torch.cuda.device_count() > 0


def _device_name() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name()) if _has_cuda() else "cpu"
