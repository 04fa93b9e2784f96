"""`bench-step`: time, rate and memory of whole optimiser steps by length, checkpointing policy and attention.

A step is forward, fused KL loss, backward, clipping and AdamW of a randomly initialised student of a named shape, on
synthetic teacher rows of K = 100. Model work is counted as in trainer/flops.py; recomputation is not counted. Each
row is measured after one warm-up step (which compiles and plans), and reports the fastest of `repeats`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from trainer.bench.measure import GIB, plot, release_memory, seconds
from trainer.bench.shapes import SHAPES
from trainer.config import TrainerConfig
from trainer.data.sequence import PackedSequence
from trainer.flops import matmul_parameters, step_flops
from trainer.model import Model, activation, attention
from trainer.model.liger import apply_liger
from trainer.optim import build_optimizer
from trainer.step import Step


@dataclass(frozen=True)
class StepCase:
    """What one row of the benchmark runs; `documents` equal ones share the sequence."""

    tokens: int
    policy: str = "none"
    attention: str = "mixed"
    documents: int = 1
    mlp_tile: int | None = None
    compile: bool = False

    def label(self) -> str:
        """Return the case in words."""
        parts = [f"{self.tokens:,} tokens", self.policy, self.attention, f"{self.documents} doc"]
        parts += [f"tile {self.mlp_tile}"] if self.mlp_tile else []
        parts += ["compiled"] if self.compile else []
        return ", ".join(parts)


@dataclass(frozen=True)
class StepFigures:
    """What a case took; None where it failed, and `error` says how. TFLOP/s are those of model work."""

    case: StepCase
    seconds: float | None = None
    tokens_per_s: float | None = None
    tflops: float | None = None
    memory_gib: float | None = None
    loss: float | None = None
    error: str = ""


class StepBench:
    """One model of a shape, re-used over many cases."""

    def __init__(
        self, shape: str, device: torch.device, dtype: torch.dtype, *, optim: dict[str, Any] | None = None
    ) -> None:
        torch.manual_seed(0)
        settings: dict[str, Any] = {"attn_implementation": attention.NAME, "use_cache": False, **SHAPES[shape]}
        rope = {"rope_type": "default", "rope_theta": 500_000.0}
        with torch.device(device):
            config = LlamaConfig(**settings, max_position_embeddings=2**20, rope_parameters=rope)
            self.model: Model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        self.uses_liger = apply_liger(self.model, "auto", device)
        self.layers = self.model.model.layers
        self.device, self.vocab_size = device, config.vocab_size
        self.config = TrainerConfig.model_validate({"cache": "synthetic", "student": shape, "optim": optim or {}})
        self.optimizer = build_optimizer(self.model, self.config.optim)
        self.parameters = matmul_parameters(self.model)

    def run(self, case: StepCase, *, repeats: int = 2, warmup: int = 1) -> StepFigures:
        """Measure one case; an error (out of memory, a kernel that refuses) becomes the row's text."""
        try:
            return self._measure(case, repeats, warmup)
        except Exception as error:
            return StepFigures(case, error=f"{type(error).__name__}: {str(error)[:160]}")
        finally:
            for parameter in self.model.parameters():
                parameter.grad = None
            release_memory(self.device)

    def step(self, attention_kind: str) -> Step:
        """Return a step of the model with that attention."""
        return Step(self.model, self.optimizer, self.config, attention_kind=attention_kind, vocab_size=self.vocab_size)

    def _measure(self, case: StepCase, repeats: int, warmup: int) -> StepFigures:
        activation.apply_policy(self.model, self.layers, case.policy)
        activation.tile_mlps(self.layers, case.mlp_tile or case.tokens)
        for layer in self.layers:
            layer._compiled_call_impl = None
            if case.compile:
                layer.compile(dynamic=False)
        sequence = synthetic_sequence(case.tokens, case.documents, self.vocab_size)
        step = self.step(case.attention)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        losses: list[float] = []

        def run() -> None:
            losses.append(step.run([sequence], lr=1e-5).loss)

        best = min([seconds(run, self.device) for _ in range(warmup + repeats)][warmup:])
        flops = step_flops(self.model.config, self.parameters, sequence.document_lengths)
        memory = torch.cuda.max_memory_allocated(self.device) / GIB if on_gpu else None
        return StepFigures(case, best, case.tokens / best, flops / best / 1e12, memory, losses[-1])


def synthetic_sequence(tokens: int, documents: int, vocab_size: int, top_k: int = 100) -> PackedSequence:
    """Return a packed sequence of equal documents with a random teacher row at every position but the last of each."""
    generator = torch.Generator().manual_seed(0)
    top_k = min(top_k, vocab_size // 2)
    length = tokens // documents
    position = torch.arange(length).repeat(documents)
    row_index = (position < length - 1).nonzero()[:, 0]
    rows = row_index.numel()
    # One id from each of K equal stretches of the vocabulary: distinct without a sort.
    stretch = vocab_size // top_k
    ids = torch.randint(0, stretch, (rows, top_k), generator=generator, dtype=torch.int32)
    ids += torch.arange(top_k, dtype=torch.int32) * stretch
    logprobs = (torch.rand(rows, top_k, generator=generator) * 8).sort(dim=1, descending=True).values
    input_ids = torch.randint(0, vocab_size, (length * documents,), generator=generator)
    return PackedSequence(
        input_ids=input_ids,
        position_ids=position,
        document_lengths=(length,) * documents,
        row_index=row_index,
        topk_ids=ids,
        topk_logprobs=logprobs.log_softmax(dim=1) + math.log(0.95),
        tail_logprob=torch.full((rows,), math.log(0.05)),
        labels=input_ids.roll(-1)[row_index],
        documents=tuple((f"synthetic-{index}", 0) for index in range(documents)),
        tokens_done=length * documents,
    )


def table(results: Sequence[StepFigures], title: str) -> Table:
    """Return the results for a terminal."""
    made = Table("case", "step", "tokens/s", "TFLOP/s", "peak memory", title=title)
    for r in results:
        if r.seconds is None:
            made.add_row(r.case.label(), r.error, "", "", "")
            continue
        memory = f"{r.memory_gib:.1f} GiB" if r.memory_gib is not None else ""
        made.add_row(r.case.label(), f"{r.seconds:.3f} s", f"{r.tokens_per_s:,.0f}", f"{r.tflops:.1f}", memory)
    return made


def plots(results: Sequence[StepFigures], path: Path) -> None:
    """Write TFLOP/s and memory over length, one line a policy."""
    points = [(r.case.policy, r.case.tokens, r.tflops, r.memory_gib) for r in results]
    plot(path, "", ("tokens", "TFLOP/s of model work", "peak GiB"), points, log_y=False)
