"""The fast front end: keep the tensors that vLLM's engine core sends, build no Python object per (token, k).

vLLM's front end turns a [n, 1+K] tensor into n·(1+K) Python floats, ints and ranks on one core; at K = 100 that caps a
process at 48 thousand tokens/s (flat lists) or 6 thousand (dictionaries), below an H200's prefill of a small teacher.
`LogprobsProcessor` is the one place where that happens. `install` wraps three of its methods: a request that carries
FLAG in `SamplingParams.extra_args` gets RawRows objects, every other request is untouched.

Bound by name to internals of vLLM 0.26 to 0.32; `unsupported` looks for each of them, and callers
then use the public path. The canary compares both at every start.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.errors import RowsInvalid

FLAG = "teachercache_raw"


class RawRows:
    """Pieces of (ids, logprobs) as they arrive; [r, 1+K] each. Looks empty to vLLM's own code."""

    __slots__ = ("ids", "logprobs")

    def __init__(self) -> None:
        self.ids: list[Any] = []
        self.logprobs: list[Any] = []

    def add(self, ids: Any, logprobs: Any) -> None:
        """Keep a piece, [n, 1+K] each."""
        self.ids.append(ids)
        self.logprobs.append(logprobs)

    def arrays(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids int32 [r, width], logprobs float32 [r, width]). Raises RowsInvalid where a piece is narrower."""
        if not self.ids:
            return np.empty((0, width), np.int32), np.empty((0, width), np.float32)
        ids = [np.asarray(piece)[:, :width] for piece in self.ids]
        logprobs = [np.asarray(piece)[:, :width] for piece in self.logprobs]
        if any(piece.shape[1] != width for piece in ids):
            raise RowsInvalid("shape", f"expected {width} columns, found {ids[0].shape[1]}")
        return (
            (ids[0] if len(ids) == 1 else np.concatenate(ids)).astype(np.int32, copy=False),
            (logprobs[0] if len(logprobs) == 1 else np.concatenate(logprobs)).astype(np.float32, copy=False),
        )


def unsupported() -> str | None:
    """Return why this vLLM has no fast path, or None."""
    try:
        from vllm.v1.engine import EngineCoreOutput
        from vllm.v1.engine.logprobs import LogprobsProcessor
    except ImportError as error:
        return f"vllm.v1.engine has changed: {error}"
    for name in ("from_new_request", "_update_prompt_logprobs", "_update_sample_logprobs"):
        if not callable(getattr(LogprobsProcessor, name, None)):
            return f"LogprobsProcessor.{name} is gone"
    fields = getattr(EngineCoreOutput, "__struct_fields__", ())
    if "new_prompt_logprobs_tensors" not in fields or "new_logprobs" not in fields:
        return "EngineCoreOutput carries no log-probability tensors"
    return None


def install() -> None:
    """Wrap LogprobsProcessor; harmless when called twice."""
    from vllm.v1.engine import logprobs

    LogprobsProcessor: Any = logprobs.LogprobsProcessor
    if getattr(LogprobsProcessor, "_teachercache", False):
        return
    plain_new = LogprobsProcessor.from_new_request.__func__
    plain_prompt = LogprobsProcessor._update_prompt_logprobs
    plain_sample = LogprobsProcessor._update_sample_logprobs

    def from_new_request(cls: Any, tokenizer: Any, request: Any) -> Any:
        processor = plain_new(cls, tokenizer=tokenizer, request=request)
        extra = request.sampling_params.extra_args if request.sampling_params else None
        if extra and extra.get(FLAG):
            processor.prompt_logprobs = RawRows()
            processor.logprobs = RawRows()
        return processor

    def update_prompt(self: Any, tensors: Any) -> None:
        if isinstance(self.prompt_logprobs, RawRows):
            self.prompt_logprobs.add(tensors[0], tensors[1])
        else:
            plain_prompt(self, tensors)

    def update_sample(self: Any, lists: Any) -> None:
        if isinstance(self.logprobs, RawRows):
            self.logprobs.add(lists[0], lists[1])
        else:
            plain_sample(self, lists)

    LogprobsProcessor.from_new_request = classmethod(from_new_request)
    LogprobsProcessor._update_prompt_logprobs = update_prompt
    LogprobsProcessor._update_sample_logprobs = update_sample
    LogprobsProcessor._teachercache = True
