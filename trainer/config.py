"""The typed configuration of a training run: one YAML file plus `key=value` overrides.

Every key but `cache` and `student` has a default, so a file only states what differs. An unknown key is refused with
its nearest neighbour, because a misspelt option that is silently ignored costs a training run. Nothing in here imports
torch. `python -m trainer config` prints all keys.
"""

from __future__ import annotations

import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from teachercache import configfile
from teachercache.configfile import Section
from teachercache.format.layout import NAME
from teachercache.format.spec import Rows, SampledRows, TopKRows
from teachercache.urls import check_url, refuse_read_only
from trainer.losses.options import LossOptions, Method, Objective

OTHER_NAMES = {"learning_rate": "lr"}
"""Common names of keys of ours that no distance of spelling finds."""


class RowChoice(Section):
    """Rows that the loss takes, by the teacher's entropy; the tokens of the others stay as context."""

    entropy_above: float | None = Field(None, description="Only rows whose teacher has more entropy, in nats.")
    entropy_below: float | None = Field(None, description="Only rows whose teacher has less entropy, in nats.")

    @model_validator(mode="after")
    def _not_empty(self) -> RowChoice:
        above, below = self.entropy_above, self.entropy_below
        if above is not None and below is not None and above >= below:
            raise ValueError(
                f"data.rows keeps nothing: entropy_above {above} is not below entropy_below {below}; swap or drop one"
            )
        return self

    @property
    def chooses(self) -> bool:
        """Whether any row is left out."""
        return self.entropy_above is not None or self.entropy_below is not None


class CacheConfig(Section):
    """One of the caches of a run."""

    url: str = Field(description="URL of the cache, as `cache`.")
    weight: float = Field(gt=0, description="Its share of the sequences is this over the sum of all weights.")
    split: str | None = Field(None, description="The split to train on; default: `split`.")
    manifest: int | None = Field(None, description="Pin one manifest by number, as `manifest`.")
    name: str = Field("", description="What logs call it; default: the last folder of its URL.")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, tree: Any) -> Any:
        """Name a cache by its folder, and check what is to be a part of metrics' names."""
        if not isinstance(tree, dict) or not isinstance(tree.get("url"), str):
            return tree
        check_url(tree["url"])
        name = tree.get("name") or tree["url"].rstrip("/").rpartition("/")[2]
        if isinstance(name, str) and not NAME.fullmatch(name):
            raise ValueError(f"{name!a} cannot be a name in logs, which matches {NAME.pattern}: set data.caches.*.name")
        return {**tree, "name": name}

    @property
    def suffix(self) -> str:
        """Return what follows the names of its metrics: `/web`; nothing where the run has one cache."""
        return f"/{self.name}" if self.name else ""


class DataConfig(Section):
    """How records become packed sequences."""

    caches: list[CacheConfig] = Field(
        [],
        description="Several caches instead of `cache`, mixed by weight: [{url, weight, split, manifest, name}, ...].",
    )
    combine: Literal["mean"] | None = Field(
        None,
        description="`mean` trains on the mean, by weight, of the rows that several sampled caches have of the same documents.",
    )
    seq_len: int = Field(2048, ge=2, description="Tokens in one packed sequence.")
    batch_tokens: int | None = Field(
        None,
        description="Tokens of one optimiser step, a multiple of seq_len times the number of GPUs; the default is one sequence.",
    )
    long_documents: Literal["split", "truncate", "drop", "refuse"] = Field(
        "split",
        description="A record longer than seq_len: train on all of it in pieces, keep its head, leave it out (all are counted), "
        "or stop.",
    )
    top_k: int | None = Field(
        None,
        ge=1,
        description="Use only the first K' entries; the rest moves into the tail. On a sampled cache at most rows.exact.",
    )
    weights: dict[str, float] = Field(
        {},
        description="Mix sources: each document is kept with the probability weight / largest weight of its source. "
        "Sources that are not named are left out.",
    )
    rows: RowChoice = RowChoice.model_validate({})
    length_curriculum: list[tuple[float, int]] = Field(
        [], description="[[share, length], ...]: from this share of the run on, pack to this length (at most seq_len)."
    )

    @model_validator(mode="after")
    def _several_caches(self) -> DataConfig:
        names, urls = [cache.name for cache in self.caches], [cache.url.rstrip("/") for cache in self.caches]
        if repeated := next((url for url in urls if urls.count(url) > 1), None):
            raise ValueError(
                f"data.caches has the same cache twice, {repeated}: give it once; data.weights mixes the sources in it"
            )
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"data.caches has two caches that logs would call {repeated}: set a name for one of them")
        if self.combine is not None and len(self.caches) < 2:
            raise ValueError(f"data.combine averages rows of several data.caches, found {len(self.caches)}")
        if self.combine is not None and (self.top_k is not None or self.rows.chooses):
            key, why = ("top_k", "the first K' entries") if self.top_k is not None else ("rows", "the entropy")
            raise ValueError(
                f"data.combine goes without data.{key}: of a mean of sampled rows, {why} of the mean cannot be known"
            )
        return self

    @model_validator(mode="after")
    def _whole_sequences(self) -> DataConfig:
        seq_len, stages = self.seq_len, self.length_curriculum
        if self.batch_tokens is not None and (self.batch_tokens < seq_len or self.batch_tokens % seq_len):
            raise ValueError(
                f"data.batch_tokens is {self.batch_tokens}; expected a multiple of data.seq_len = {seq_len}"
            )
        if self.weights and (min(self.weights.values()) < 0 or max(self.weights.values()) <= 0):
            raise ValueError(f"data.weights needs numbers of 0 or more, one of them above 0; found {self.weights}")
        shares, lengths = [share for share, _ in stages], [length for _, length in stages]
        if shares != sorted(shares) or any(not 0 <= share < 1 for share in shares):
            raise ValueError(f"data.length_curriculum needs rising shares in [0, 1), found {shares}")
        if lengths != sorted(lengths) or any(not 2 <= length <= seq_len for length in lengths):
            raise ValueError(
                f"data.length_curriculum needs lengths that do not fall, in [2, seq_len = {seq_len}], found {lengths}"
            )
        return self

    @property
    def sequences_per_step(self) -> int:
        """Packed sequences in one optimiser step."""
        return (self.batch_tokens or self.seq_len) // self.seq_len

    def length_at(self, progress: float) -> int:
        """Return the length to pack to at a share of the run."""
        reached = [length for share, length in self.length_curriculum if progress >= share]
        return reached[-1] if reached else self.seq_len


class LiveRows(Section):
    """Rows as a cache would have them, for comparison; sampled ones are drawn anew in each step."""

    kind: Literal["top_k", "sampled"] = Field("top_k", description="As in a job's `rows`.")
    entries: int = Field(100, ge=1, le=4096, description="Entries of a row.")
    exact: int | None = Field(
        None, ge=1, description="Least number of a sampled row's exact entries; null: a quarter of them."
    )

    @property
    def spec(self) -> Rows:
        """Return the rows as a cache's identity has them."""
        named = {"entries": self.entries, **({} if self.exact is None else {"exact": self.exact})}
        return SampledRows.model_validate(named) if self.kind == "sampled" else TopKRows.model_validate(named)

    @model_validator(mode="after")
    def _exists(self) -> LiveRows:
        if self.kind == "top_k" and self.exact is not None:
            raise ValueError("loss.rows.exact goes with kind=sampled: all entries of top-K rows are exact")
        _ = self.spec
        return self


class LossConfig(Section, Objective):  # type: ignore[misc]  # pydantic freezes it; mypy sees only the dataclass
    """What is minimised; the mathematics is in docs/LOSSES.md."""

    ce_weight: float | dict[str, float] = Field(  # type: ignore[assignment]  # one number for each source, or for all
        0.0,
        description="Loss = (1 - ce_weight) · KD + ce_weight · cross-entropy on the real next token. A mapping has a weight "
        "for each source, 0 for those that it does not name.",
    )
    rows: LiveRows | None = Field(
        None, description="What loss.method=online keeps of a row of the live teacher's logits."
    )
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
        weights = self.ce_weight.values() if isinstance(self.ce_weight, dict) else [self.ce_weight]
        for weight in weights:
            self.for_head(None, weight)
        if self.rows is not None and (self.method != "online" or self.tail is None):
            raise ValueError(
                "loss.rows says how a live teacher's logits are cut: it goes with loss.method=online and a loss.tail"
            )
        if self.rows is not None:
            self.for_head(None, min(weights, default=0.0)).for_rows(self.rows.kind == "sampled")
        return self

    def weight_of(self, source: str) -> float:
        """Return the weight of cross-entropy in rows of a source."""
        return self.ce_weight.get(source, 0.0) if isinstance(self.ce_weight, dict) else self.ce_weight

    def for_head(self, softcap: float | None, ce_weight: float | None = None) -> LossOptions:
        """Return the options of this objective on a head with that soft-cap; `ce_weight`: of some sources' rows."""
        values = {f.name: getattr(self, f.name) for f in fields(Objective)}
        values |= {} if ce_weight is None else {"ce_weight": ce_weight}
        return LossOptions(**values, softcap=softcap)


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(5e-4, gt=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="Decay of AdamW's two moments.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.0, ge=0, description="Applied to matrices; norms and biases do not decay.")
    clip_norm: float | None = Field(1.0, gt=0, description="Largest norm of a step's gradient; null does not clip.")
    warmup_steps: int = Field(20, ge=0, description="Steps in which the learning rate rises from 0.")
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        "cosine", description="The learning rate after warm-up; `wsd` is constant, then falls linearly."
    )
    decay_fraction: float = Field(0.2, gt=0, le=1, description="Share of the run in which `wsd` decays.")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="Last learning rate, as a share of the peak.")
    state: Literal["float32", "bfloat16", "8bit", "offload"] = Field(
        "float32",
        description="Adam's moments: float32, bfloat16 (stochastically rounded), torchao's 8 bit, or `offload`: float32 in "
        "pinned CPU memory.",
    )
    master: Literal["auto", "split", "stochastic", "float32"] = Field(
        "auto",
        description="What bf16 weights lack: `split` (`auto`) keeps 16 low bits, exact; `float32` a copy; `stochastic` "
        "rounds stochastically. float32 weights need none.",
    )


# pydantic finds `register` on every class, as the method of its metaclass; no instance has it.
warnings.filterwarnings("ignore", message='Field name "register" in "TrainConfig"')


class TrainConfig(Section):
    """Where and how a step runs."""

    epochs: int | None = Field(None, ge=1, description="Passes over the split; default: one, unless max_steps is set.")
    max_steps: int | None = Field(
        None, ge=1, description="Stop after this many optimiser steps, or after `epochs`, whichever comes first."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto` is cuda where torch finds it.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Weights and compute; `auto` is bfloat16 on a GPU, float32 on a CPU."
    )
    autocast: Literal["none", "bfloat16"] = Field(
        "none", description="`bfloat16` computes the layers in bf16 under torch.autocast, over weights of `dtype`."
    )
    attention: Literal["auto", "documents", "varlen", "flex", "mixed", "plain"] = Field(
        "auto", description="How documents are kept apart; trainer/model/attention.py has the kinds."
    )
    checkpointing: Literal["auto", "none", "full", "keep-attention", "keep-matmuls", "offload"] = Field(
        "auto", description="What the backward pass recomputes (trainer/model/activation.py): the least that fits."
    )
    liger: Literal["auto", "on", "off"] = Field(
        "auto", description="Fused layers from liger-kernel: where it is installed, on a GPU, without compile."
    )
    compile: bool = Field(False, description="torch.compile each layer.")
    mlp_tile: int | None = Field(
        None, ge=1, description="Run each MLP over this many tokens at a time, where its activations do not fit."
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of torch: pin them for bitwise equal runs.")
    deterministic: bool = Field(False, description="Use torch's deterministic algorithms alone; for bitwise GPU runs.")
    spike_factor: float | None = Field(None, gt=1, description="Stop when a loss exceeds this times the running mean.")
    register: bool = Field(
        False,
        description="At the end, create an entry in the cache's `runs/`: student, steps, rows, held-out KL.",
    )


class LoraConfig(Section):
    """Low-rank adapters through peft."""

    rank: int = Field(16, ge=1, description="Rank of each adapter.")
    alpha: int = Field(32, description="Scale of the adapters: alpha / rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the adapters.")
    target_modules: list[str] | Literal["all-linear"] = Field(
        "all-linear", description="Names of the layers that get adapters; `all-linear` is all but the head."
    )


class CheckpointConfig(Section):
    """When a run is saved, and what is kept."""

    every_steps: int | None = Field(200, ge=1, description="Steps between two checkpoints; null: at the end alone.")
    keep_last: int = Field(
        2,
        ge=1,
        description="Newest checkpoints to keep, next to the best: the lowest held-out KL of those at a step that was "
        "evaluated too, so make one interval a multiple of the other.",
    )


class EvalConfig(Section):
    """Held-out evaluation during a run, and by `eval`."""

    split: str = Field("heldout", description="The split to evaluate on.")
    every_steps: int | None = Field(None, ge=1, description="Steps between evaluations; null: never, not at the end.")
    max_rows: int | None = Field(None, ge=1, description="Stop after this many rows; the same rows every time.")


class WandbConfig(Section):
    """Where a run's page is at Weights & Biases; the package's own settings and environment decide what is left out."""

    project: str | None = Field(None, description="Its project.")
    entity: str | None = Field(None, description="Its user or team.")
    tags: list[str] = Field([], description="Labels of the page.")


class MlflowConfig(Section):
    """Where a run is in MLflow."""

    tracking_uri: str | None = Field(None, description="A server or a folder; default: MLFLOW_TRACKING_URI.")
    experiment: str | None = Field(
        None,
        description="Its experiment, made where it is missing; default: MLFLOW_EXPERIMENT_NAME, else `Default`.",
    )


class LogConfig(Section):
    """Where a run's numbers go, next to metrics.jsonl."""

    every_steps: int = Field(1, ge=1, description="Steps between two lines.")
    tensorboard: bool = Field(True, description="Write TensorBoard's files.")
    wandb: WandbConfig | None = Field(
        None, description="Log to Weights & Biases; a resumed run continues its page. `true` takes the defaults."
    )
    mlflow: MlflowConfig | None = Field(
        None, description="Log to MLflow; a resumed run continues its run there. `true` takes the defaults."
    )

    @field_validator("wandb", "mlflow", mode="before")
    @classmethod
    def _switched(cls, value: object) -> object:
        return ({} if value else None) if isinstance(value, bool) else value


class TrainerConfig(Section):
    """Everything that `fit` and `eval` read."""

    cache: str | None = Field(
        None,
        description="URL of the cache: s3://bucket/path, hf://datasets/ORG/NAME[@REVISION] or a folder. Required, unless "
        "data.caches lists several.",
    )
    manifest: int | None = Field(None, description="Pin one manifest by number; default: the newest at first start.")
    student: str = Field(
        description="A Hugging Face folder or an output of this trainer, local or s3://…; or a Hub id, owner/model[@revision]."
    )
    output: str | None = Field(None, description="Checkpoints and logs: a folder or s3://…; `fit` requires it.")
    take_over: bool = Field(
        False,
        description="Continue a run whose machine is gone; refused while its heartbeat is younger than two minutes.",
    )
    teacher: str | None = Field(
        None,
        description="A live teacher, named as `student` is, for full-vocabulary KL in `eval` and for loss.method=online.",
    )
    split: str = Field("train", description="The split to train on.")
    seed: int = Field(0, description="Decides the order of the data, and new adapters.")
    trust_remote_code: bool = Field(False, description="Run code that a model's folder brings along.")
    data: DataConfig = DataConfig.model_validate({})
    loss: LossConfig = LossConfig.model_validate({})
    optim: OptimConfig = OptimConfig.model_validate({})
    train: TrainConfig = TrainConfig.model_validate({})
    lora: LoraConfig | None = Field(None, description="Train low-rank adapters instead of the weights.")
    checkpoint: CheckpointConfig = CheckpointConfig.model_validate({})
    eval: EvalConfig = EvalConfig.model_validate({})
    log: LogConfig = LogConfig.model_validate({})

    @field_validator("cache", "student", "output", "teacher")
    @classmethod
    def _right_urls(cls, url: str | None) -> str | None:
        check_url(url or "")
        return url

    @model_validator(mode="after")
    def _consistent(self) -> TrainerConfig:
        if self.cache is None and not self.data.caches:
            raise ValueError("lacks cache: set it in the YAML file or as cache=VALUE, or list several in data.caches")
        if self.data.caches and (self.cache is not None or self.manifest is not None):
            key = "cache" if self.cache is not None else "manifest"
            raise ValueError(
                f"{key} and data.caches are both set: drop one; an entry of data.caches has its own manifest"
            )
        for written in (self.output, *(cache.url for cache in self.caches if self.train.register)):
            refuse_read_only(written or "")
        if self.loss.method == "online" and self.data.combine is not None:
            raise ValueError("data.combine averages cached rows, and loss.method=online reads none: drop one")
        if self.loss.method == "online" and self.teacher is None:
            raise ValueError("loss.method=online computes the teacher's logits live: set teacher=FOLDER")
        if self.loss.method != "online" and self.loss.tail is None:
            raise ValueError("loss.tail is null, which means the full vocabulary: only loss.method=online has that")
        if self.loss.method == "online" and self.loss.tail is None and (self.data.top_k or self.loss.recompute):
            key = "data.top_k" if self.data.top_k else "loss.recompute"
            raise ValueError(f"{key} is of rows, and loss.tail=null takes the teacher's full vocabulary: drop one")
        if self.loss.rows is not None and self.data.top_k is not None:
            raise ValueError(
                "loss.rows and data.top_k both say how many entries the live teacher's rows have: drop one"
            )
        if self.loss.recompute and self.loss.method not in ("fused", "online"):
            raise ValueError(f"loss.recompute goes with loss.method=fused only, found {self.loss.method}")
        return self

    @property
    def without_effect(self) -> list[str]:
        """Return a line for each group of keys that are set and that other keys leave without effect in `fit`."""
        schedule, loss, caches = self.optim.schedule, self.loss, self.data.caches
        rules = [
            (schedule != "wsd", ["optim.decay_fraction"], f"optim.schedule is {schedule}"),
            (schedule == "constant", ["optim.min_lr_ratio"], "optim.schedule is constant"),
            (loss.divergence != "jsd", ["loss.jsd_beta"], f"loss.divergence is {loss.divergence}"),
            (loss.method == "dense", ["loss.chunk_size"], "loss.method=dense forms all logits at once"),
            (
                loss.method != "online",
                ["teacher"],
                f"loss.method={loss.method} reads cached rows; `eval` alone uses it",
            ),
            (
                bool(caches) and all(cache.split for cache in caches),
                ["split"],
                "every entry of data.caches has its own",
            ),
        ]
        return configfile.without_effect(self, rules)

    @property
    def caches(self) -> list[CacheConfig]:
        """Return the caches of the run: `cache` is a list of one, without a name."""
        if self.cache is not None:
            return [CacheConfig.model_construct(url=self.cache, weight=1.0, split=self.split, manifest=self.manifest)]
        return [cache.model_copy(update={"split": cache.split or self.split}) for cache in self.data.caches]

    @property
    def parts(self) -> list[CacheConfig]:
        """Return what the sequences are of: each cache, or the mean of all of them, which has no name."""
        caches = self.caches
        return caches if self.data.combine is None else [caches[0].model_copy(update={"name": "", "weight": 1.0})]


def load_config(path: str | Path | None, overrides: list[str] | tuple[str, ...] = ()) -> TrainerConfig:
    """Read a YAML file and apply `a.b=value` overrides (values are YAML too, so `optim.clip_norm=null` works).

    Raises UsageError (exit status 2) for a missing file, an unknown key or a value of the wrong type.
    """
    return configfile.load(
        TrainerConfig, path, overrides, where=None if path else "the command line", other_names=OTHER_NAMES
    )
