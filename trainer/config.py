"""The typed configuration of a training run: one YAML file plus `key=value` overrides.

Every field has a default, so a file only states what differs. An unknown key is refused with its nearest neighbour,
because a misspelt option that is silently ignored costs a training run. Nothing in here touches torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from teachercache import configfile
from trainer.losses.options import Method, Objective

OTHER_NAMES = {"learning_rate": "lr"}
"""Common names of keys of ours that no distance of spelling finds."""


class Section(BaseModel):
    """A part of the configuration: frozen, and strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DataConfig(Section):
    """How records become packed sequences."""

    seq_len: int = Field(2048, ge=2)
    """Tokens in one packed sequence."""
    batch_tokens: int | None = None
    """Tokens of one optimiser step; a multiple of seq_len (default: one sequence). The rest is gradient accumulation."""
    long_documents: Literal["truncate", "drop", "refuse"] = "truncate"
    """A record longer than seq_len: keep its head, leave it out (both counted), or stop."""
    pad: Literal["auto", "none", "seq_len"] = "auto"
    """Pad each sequence to seq_len: `auto` pads on a GPU, where equal shapes pay, and does not on a CPU."""
    block_sequences: int = Field(16, ge=1)
    """Sequences' worth of records that are packed together: more packs tighter and holds more rows in memory."""
    blocks_per_flush: int = Field(16, ge=1)
    """Blocks until the packer empties itself: a resumed run re-reads at most this much."""
    top_k: int | None = Field(None, ge=1)
    """Use only the first K' of the cached entries; the rest moves into the tail."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Mix sources by weight: for each sampled document, how likely its source is kept relative to the largest weight;
    sources that are not named are left out. A share of 0.25 beside 1.0 reads a quarter of that source in each epoch."""
    length_curriculum: list[tuple[float, int]] = Field(default_factory=list)
    """[(progress, seq_len), ...]: from this share of the run on, pack to this length (at most seq_len)."""
    prefetch: int = Field(4, ge=0)
    """Packed sequences prepared ahead on a thread of their own; 0 prepares them in the training thread."""

    @model_validator(mode="after")
    def _whole_sequences(self) -> DataConfig:
        if self.batch_tokens is not None and (self.batch_tokens < self.seq_len or self.batch_tokens % self.seq_len):
            raise ValueError(
                f"data.batch_tokens is {self.batch_tokens}; expected a multiple of data.seq_len = {self.seq_len}"
            )
        if self.weights and (min(self.weights.values()) < 0 or max(self.weights.values()) <= 0):
            raise ValueError(f"data.weights needs numbers of 0 or more, one of them above 0; found {self.weights}")
        shares = [share for share, _ in self.length_curriculum]
        if shares != sorted(shares) or any(not 0 <= share < 1 for share in shares):
            raise ValueError(f"data.length_curriculum needs rising shares in [0, 1), found {shares}")
        if any(not 2 <= length <= self.seq_len for _, length in self.length_curriculum):
            raise ValueError(f"data.length_curriculum has a length outside [2, seq_len = {self.seq_len}]")
        lengths = [length for _, length in self.length_curriculum]
        if lengths != sorted(lengths):
            raise ValueError(f"data.length_curriculum must not shorten sequences, found {lengths}")
        return self

    @property
    def sequences_per_step(self) -> int:
        return (self.batch_tokens or self.seq_len) // self.seq_len


class LossConfig(Section, Objective):  # type: ignore[misc]  # pydantic freezes it; mypy sees only the dataclass
    """What is minimised; the mathematics is in docs/LOSSES.md."""

    method: Method | Literal["online"] = Field(
        "fused", description="`online` computes the teacher's logits live (needs `teacher`), the others read its rows."
    )
    chunk_size: int | None = Field(
        None, ge=1, description="Rows of logits that live at a time in the fused loss (default: chosen by the loss)."
    )
    recompute: bool = Field(
        False, description="Form the fused loss's gradients in the backward pass: one product more, nothing kept."
    )

    @model_validator(mode="after")
    def _accepted(self) -> LossConfig:
        self.__post_init__()
        return self


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(5e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    """Applied to matrices only: norms and biases are left alone."""
    clip_norm: float | None = Field(1.0, gt=0)
    warmup_steps: int = Field(20, ge=0)
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    decay_fraction: float = Field(0.2, gt=0, le=1)
    """Share of the run in which `wsd` decays."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    state: Literal["float32", "bfloat16", "8bit", "offload"] = "float32"
    """How Adam's moments are held: float32, bfloat16 (stochastically rounded), torchao's 8 bit, or `offload`: float32 in
    pinned CPU memory, streamed through the GPU at every step."""
    master: Literal["auto", "split", "stochastic", "float32"] = "auto"
    """bf16 weights: `split` keeps an exact float32 weight as bf16 + 16 low bits; `stochastic` keeps none and rounds
    stochastically; `float32` keeps a copy. `auto` is split for bf16 weights; float32 weights need none."""
    grad_dtype: Literal["auto", "param", "float32"] = "auto"
    """Accumulate gradients over micro-batches in float32 (auto: whenever there is more than one and weights are bf16)."""


class TrainConfig(Section):
    """Where and how a step runs."""

    epochs: int | None = Field(None, ge=1)
    max_steps: int | None = Field(None, ge=1)
    """Stop after so many optimiser steps; epochs or max_steps, whichever comes first (neither: one epoch)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights and compute: bfloat16 on a GPU, float32 on a CPU unless told."""
    autocast: Literal["none", "bfloat16"] = "none"
    """Keep the weights as `dtype` and run the matrix products in bfloat16 (pays on CPUs with AVX512-BF16 or AMX)."""
    attention: Literal["auto", "documents", "varlen", "flex", "mixed", "plain"] = "auto"
    """How documents are kept apart; see trainer/model/attention.py."""
    checkpointing: Literal["auto", "none", "full", "keep-attention", "keep-matmuls", "offload"] = "auto"
    """What the backward pass recomputes; see trainer/model/activation.py."""
    liger: Literal["auto", "on", "off"] = "auto"
    """Fused norms, rotary embeddings and SwiGLU from liger-kernel (auto: on a GPU where installed, without compile)."""
    compile: bool = False
    mlp_tile: int | None = Field(None, ge=1)
    """Run each MLP over tiles of so many tokens: for sequences whose MLP activations do not fit."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of torch: pin them for bitwise equal runs."""
    deterministic: bool = False
    """torch.use_deterministic_algorithms. Bitwise equal runs on a CPU need only `threads`; on an H200 runs were bitwise
    equal without it and to 3e-5 with it (docs/LOG.md), so it is for those who want torch's own refusals."""
    spike_factor: float | None = Field(None, gt=1)
    """Stop when a step's loss exceeds so many times the running mean (NaN and infinity always stop)."""
    store_patience_s: float = Field(600.0, ge=0)
    """How long the trainer waits for an object store that does not answer before it gives up."""


class LoraConfig(Section):
    """Low-rank adapters through peft, for students whose optimiser state does not fit."""

    rank: int = Field(16, ge=1)
    alpha: int = 32
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: list[str] | Literal["all-linear"] = "all-linear"


class CheckpointConfig(Section):
    every_steps: int | None = Field(200, ge=1)
    keep_last: int = Field(2, ge=1)
    keep_best: bool = True
    """Also keep the checkpoint with the lowest held-out KL: of those at a step that was evaluated too, so make one of
    `eval.every_steps` and `checkpoint.every_steps` a multiple of the other."""


class EvalConfig(Section):
    split: str = "heldout"
    every_steps: int | None = Field(None, ge=1)
    """Evaluate after so many steps, and at the end; null never does."""
    max_rows: int | None = Field(None, ge=1)
    """Stop after so many rows; the same rows every time."""
    chunk_size: int = Field(512, ge=1)
    """Rows of full logits that live at a time."""


class LogConfig(Section):
    every_steps: int = Field(1, ge=1)
    tensorboard: bool = True
    wandb: bool = False


class TrainerConfig(Section):
    """Everything that `python -m trainer fit` and `eval` read."""

    cache: str
    """URL of the cache: s3://bucket/path, or a folder."""
    manifest: int | None = None
    """Pin one manifest by number; default: the newest at the first start, the same one when resumed."""
    student: str
    """A Hugging Face folder or an output folder of this trainer (`final`, or its newest checkpoint), local or s3://…"""
    output: str | None = None
    """Where checkpoints and logs go: a folder or s3://…; required by fit."""
    teacher: str | None = None
    """A live teacher, for full-vocabulary KL in `eval` and for loss.method=online."""
    split: str = "train"
    seed: int = 0
    trust_remote_code: bool = False
    data: DataConfig = DataConfig.model_validate({})
    loss: LossConfig = LossConfig.model_validate({})
    optim: OptimConfig = OptimConfig.model_validate({})
    train: TrainConfig = TrainConfig.model_validate({})
    lora: LoraConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig.model_validate({})
    eval: EvalConfig = EvalConfig.model_validate({})
    log: LogConfig = LogConfig.model_validate({})

    @model_validator(mode="after")
    def _consistent(self) -> TrainerConfig:
        if self.loss.method == "online" and self.teacher is None:
            raise ValueError("loss.method=online computes the teacher's logits live: set teacher=FOLDER")
        if self.loss.method != "online" and self.loss.tail is None:
            raise ValueError("loss.tail is null, which means the full vocabulary: only loss.method=online has that")
        if self.loss.recompute and self.loss.method not in ("fused", "online"):
            raise ValueError(f"loss.recompute goes with loss.method=fused only, found {self.loss.method}")
        return self


def load_config(path: str | Path | None, overrides: list[str] | tuple[str, ...] = ()) -> TrainerConfig:
    """Read a YAML file and apply `a.b=value` overrides (values are YAML too, so `optim.clip_norm=null` works).

    Raises UsageError (exit status 2) for a missing file, an unknown key or a value of the wrong type.
    """
    return configfile.load(TrainerConfig, path, overrides, where="the configuration", other_names=OTHER_NAMES)
