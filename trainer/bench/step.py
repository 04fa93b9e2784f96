"""`bench-step`: time, rate and memory of whole optimiser steps by length, checkpointing policy and attention.

A step is forward, fused KL loss, backward, clipping and AdamW of a randomly initialised student of a named shape, on
synthetic teacher rows of K = 100. Model work is counted as in trainer/flops.py; recomputation is not counted. Each
row is measured after one warm-up step (which compiles and plans), and reports the fastest of `repeats`.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.bench.loss import machine
from trainer.config import OptimConfig, TrainerConfig
from trainer.data.dataset import PackedSequence
from trainer.flops import matmul_parameters, step_flops
from trainer.model import activation, attention
from trainer.model.liger import apply_liger
from trainer.optim import build_optimizer
from trainer.step import Step

SHAPES: dict[str, dict[str, int]] = {
    "llama-3.2b": {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "num_key_value_heads": 8, "vocab_size": 128_256,
    },
    "llama-1.2b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128_256,
    },
    "smollm2-135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49_152,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1_000,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row of the benchmark."""

    tokens: int
    policy: str = "none"
    attention: str = "mixed"
    documents: int = 1
    """Equal documents in the sequence; 1 is one document as long as the sequence."""
    mlp_tile: int | None = None
    compile: bool = False

    def label(self) -> str:
        parts = [f"{self.tokens:,} tokens", self.policy, self.attention, f"{self.documents} doc"]
        parts += [f"tile {self.mlp_tile}"] if self.mlp_tile else []
        parts += ["compiled"] if self.compile else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Result:
    case: Case
    seconds: float | None
    tokens_per_s: float | None
    tflops: float | None
    memory_gib: float | None
    loss: float | None
    error: str = ""


class Bench:
    """One model of a shape, re-used over many cases."""

    def __init__(
        self,
        shape: str,
        device: torch.device,
        dtype: torch.dtype,
        *,
        optim: dict[str, Any] | None = None,
        liger: str = "auto",
        layers: int | None = None,
        seed: int = 0,
    ) -> None:
        settings: dict[str, Any] = dict(SHAPES[shape])
        if layers is not None:
            settings["num_hidden_layers"] = layers
        torch.manual_seed(seed)
        settings |= {"attn_implementation": attention.NAME, "use_cache": False}
        model_config = LlamaConfig(
            **settings,
            max_position_embeddings=2**20,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        )
        with _default(device, dtype):
            self.model = LlamaForCausalLM(model_config)
        self.model.train()
        self.uses_liger = apply_liger(self.model, liger, device)
        self.layers = self.model.model.layers
        self.device, self.vocab_size = device, settings["vocab_size"]
        self.config = TrainerConfig(cache="synthetic", student=shape, optim=OptimConfig.model_validate(optim or {}))
        self.optimizer = build_optimizer(self.model, self.config.optim)
        self.parameters = matmul_parameters(self.model)

    def run(self, case: Case, *, repeats: int = 2, warmup: int = 1) -> Result:
        """Measure one case; an error (out of memory, a kernel that refuses) becomes the row's text."""
        try:
            return self._measure(case, repeats, warmup)
        except Exception as error:
            return Result(case, None, None, None, None, None, f"{type(error).__name__}: {str(error)[:160]}")
        finally:
            for parameter in self.model.parameters():
                parameter.grad = None
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _measure(self, case: Case, repeats: int, warmup: int) -> Result:
        activation.apply_policy(self.model, self.layers, case.policy)
        activation.tile_mlps(self.layers, case.mlp_tile or case.tokens)
        for layer in self.layers:
            layer._compiled_call_impl = None
            if case.compile:
                layer.compile(dynamic=False)
        sequence = synthetic_sequence(case.tokens, case.documents, self.vocab_size)
        step = Step(self.model, self.optimizer, self.config, attention_kind=case.attention, vocab_size=self.vocab_size)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        times, loss = [], 0.0
        for _ in range(warmup + repeats):
            self._synchronize()
            started = time.perf_counter()
            loss = step.run([sequence], lr=1e-5).loss
            self._synchronize()
            times.append(time.perf_counter() - started)
        seconds = min(times[warmup:])
        flops = step_flops(self.model.config, self.parameters, sequence.document_lengths)
        memory = torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else None
        return Result(case, seconds, case.tokens / seconds, flops / seconds / 1e12, memory, loss)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def _default(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Build a model directly on a device in a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def synthetic_sequence(tokens: int, documents: int, vocab_size: int, top_k: int = 100, seed: int = 0) -> PackedSequence:
    """A packed sequence of equal documents with a random teacher row at every position but the last of each."""
    generator = torch.Generator().manual_seed(seed)
    top_k = min(top_k, vocab_size // 2)
    length = tokens // documents
    lengths = (length,) * documents
    position = torch.arange(length).repeat(documents)
    row_index = torch.arange(length * documents)
    row_index = row_index[position < length - 1]
    rows = row_index.numel()
    # One id from each of K equal stretches of the vocabulary: distinct without a sort.
    stretch = vocab_size // top_k
    ids = torch.randint(0, stretch, (rows, top_k), generator=generator, dtype=torch.int32)
    ids += torch.arange(top_k, dtype=torch.int32) * stretch
    logprobs = (torch.rand(rows, top_k, generator=generator) * 8).sort(dim=1, descending=True).values
    logprobs = logprobs.log_softmax(dim=1) + torch.log(torch.tensor(0.95))
    tail = torch.full((rows,), 0.05).log()
    input_ids = torch.randint(0, vocab_size, (length * documents,), generator=generator)
    return PackedSequence(
        input_ids=input_ids,
        position_ids=position,
        document_lengths=lengths,
        row_index=row_index,
        topk_ids=ids,
        topk_logprobs=logprobs,
        tail_logprob=tail,
        labels=input_ids.roll(-1)[row_index],
        documents=tuple((f"synthetic-{index}", 0) for index in range(documents)),
        tokens_done=length * documents,
    )


def table(results: Sequence[Result], title: str) -> Table:
    made = Table("case", "step", "tokens/s", "TFLOP/s", "peak memory", title=title)
    for result in results:
        if result.seconds is None:
            made.add_row(result.case.label(), result.error, "", "", "")
            continue
        memory = f"{result.memory_gib:.1f} GiB" if result.memory_gib is not None else ""
        made.add_row(
            result.case.label(),
            f"{result.seconds:.3f} s",
            f"{result.tokens_per_s:,.0f}",
            f"{result.tflops:.1f}",
            memory,
        )
    return made


def bench_step(
    shape: Annotated[str, typer.Option(help=f"Model shape, of {', '.join(SHAPES)}.")] = "llama-3.2b",
    tokens: Annotated[list[int] | None, typer.Option(help="Sequence lengths; repeat. Default 8,192 to 32,768.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Checkpointing policies; repeat. Default all.")] = None,
    attention_kind: Annotated[str, typer.Option("--attention", help="mixed, documents, flex or plain.")] = "auto",
    documents: Annotated[int, typer.Option(help="Equal documents in the sequence.")] = 1,
    device: Annotated[str, typer.Option(help="cuda or cpu. Default: cuda if there is one.")] = "",
    repeats: Annotated[int, typer.Option(help="Timed steps; the fastest counts.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Folder for step.json and a plot.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Step time, tokens/s, TFLOP/s of model work and memory by length and policy, for a named shape.

    Example: python -m trainer bench-step --shape llama-3.2b --tokens 32768 --policy none --policy keep-attention
    """
    if shape not in SHAPES:
        raise typer.BadParameter(f"{shape!r} is not a shape; expected one of {', '.join(SHAPES)}")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind = attention.choose_kind(where, attention_kind)
    bench = Bench(shape, where, torch.bfloat16 if where.type == "cuda" else torch.float32)
    results = []
    for length in tokens or [8_192, 16_384, 32_768]:
        for name in policy or activation.POLICIES:
            results.append(bench.run(Case(length, name, kind, documents), repeats=repeats))
    report = {"machine": machine(where), "shape": shape, "results": [asdict(result) for result in results]}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "step.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        plot(results, out / "step.png")
    if as_json:
        print(json.dumps(report))
    else:
        Console().print(table(results, f"{shape} on {report['machine']}"))


def plot(results: Sequence[Result], path: Path) -> None:
    """TFLOP/s and memory over length, one line a policy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for axis, field, label in zip(axes, ("tflops", "memory_gib"), ("TFLOP/s of model work", "peak GiB"), strict=True):
        for policy in dict.fromkeys(result.case.policy for result in results):
            points = [(r.case.tokens, getattr(r, field)) for r in results if r.case.policy == policy]
            points = [(x, y) for x, y in points if y is not None]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=policy)
        axis.set(xlabel="tokens", ylabel=label, xscale="log")
        if axis.get_legend_handles_labels()[0]:
            axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
