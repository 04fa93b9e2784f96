"""The job file: one typed YAML document, `key=value` overrides on the command line, unknown keys refused.

    cache: s3://bucket/name
    teacher: {model: /models/llama-8b, engine: vllm, top_k: 100}
    corpora:
      - {source: web, files: ["s3://corpus/web/*.jsonl.zst"], fields: {text: text, id: url}}
    recipe: {windows: {policy: window, size: 4096}}
    run: {actors: 8}

Everything under `recipe` (and the row-making keys of a corpus) changes rows and is therefore part of a shard's id;
everything under `run` may change between two runs of the same job without changing a single shard.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from teachercache import configfile
from teachercache.format.record import NAME

_NAME = f"^{NAME.pattern}$"  # sources and splits stand in object names


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TeacherConfig(_Strict):
    """Which model makes the rows, and how it runs."""

    model: str = Field(description="folder of a Hugging Face model, or an id on the hub")
    name: str | None = Field(default=None, description="name written into spec.json; the model's own by default")
    revision: str | None = Field(default=None, description="branch, tag or commit on the hub")
    engine: Literal["vllm", "hf", "noop"] = "vllm"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    head_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="bf16 logits put 0.06 to 0.25 nat of noise and many ties into every row"
    )
    top_k: int = Field(default=100, ge=1, le=4096)
    max_model_len: int = Field(
        default=2048, ge=8, description="longest input plus the one token that the engine samples"
    )
    tensor_parallel: int = Field(default=1, ge=1)
    gpus_per_actor: float | None = Field(
        default=None, ge=0, description="default: tensor_parallel where there are GPUs"
    )
    cpus_per_actor: float = Field(default=1, ge=0, description="what Ray reserves; threads are set by OMP_NUM_THREADS")
    threads: int | None = Field(default=None, ge=1, description="OMP threads of one teacher; default: the node's cores")
    engine_args: dict[str, Any] = Field(default_factory=dict, description="passed to the engine as they are")
    trust_remote_code: bool = False
    fast_path: Literal["auto", "off", "require"] = Field(
        default="auto", description="keep the engine's tensors instead of rebuilding Python objects"
    )
    worker_top_k: Literal["auto", "off", "require"] = Field(
        default="auto",
        description="take the rows in vLLM's worker by a top-K of our own that reads the logits once (CUDA)",
    )
    canary: bool = Field(default=True, description="compare the fast path with the public one at every actor start")
    canary_reference_parameters: int = Field(
        default=400_000_000,
        ge=0,
        description="also compare with transformers in float32 up to this size; 0 turns it off",
    )
    max_inflight_tokens: int = Field(
        default=65_536, ge=1, description="tokens given to the engine at a time; bounds memory"
    )


class Fields(_Strict):
    """Names of the columns that hold what we need. Exactly one of text, messages, input_ids is used."""

    text: str | None = None
    messages: str | None = Field(default=None, description="a conversation; in generate mode its last turn is answered")
    input_ids: str | None = None
    id: str | None = None
    loss_mask: str | None = Field(
        default=None, description="with input_ids: one bool per token, false = do not learn it"
    )
    tools: str | None = Field(default=None, description="with messages: the tools that the template renders")
    prompt: str | None = Field(default=None, description="in generate mode: raw text that the teacher continues")
    continuation: str | None = Field(default=None, description="scored after `text` with the loss mask on it alone")

    @property
    def kind(self) -> Literal["text", "messages", "input_ids", "prompt"]:
        """What a document is."""
        kinds: tuple[Literal["messages", "input_ids", "prompt"], ...] = ("messages", "input_ids", "prompt")
        for kind in kinds:
            if getattr(self, kind) is not None:
                return kind
        return "text"

    @model_validator(mode="after")
    def _one_kind(self) -> Fields:
        named = [k for k in ("text", "messages", "input_ids", "prompt") if getattr(self, k) is not None]
        if len(named) > 1:
            raise ValueError(f"one of text, messages, input_ids, prompt names the document, found {named}")
        if self.continuation is not None and self.kind != "text":
            raise ValueError("`continuation` follows a `text` field; name the prompt's column as `text`")
        return self

    @property
    def text_column(self) -> str:
        return self.text if self.text is not None else "text"


class CorpusConfig(_Strict):
    """One source of documents."""

    source: str = Field(default="default", pattern=_NAME)
    split: str = Field(default="train", pattern=_NAME)
    splits: dict[str, float] | None = Field(default=None, description="fractions by hash of the document's text; sum 1")
    files: list[str] = Field(min_length=1, description="paths or globs, any fsspec URL")
    format: Literal["jsonl", "parquet", "text"] | None = Field(
        default=None, description="from the file's name by default"
    )
    compression: Literal["none", "gzip", "zstd"] | None = Field(
        default=None, description="from the file's name by default"
    )
    text_unit: Literal["file", "line"] = Field(default="file", description="what a document is in a text file")
    fields: Fields = Fields()
    meta: list[str] = Field(default_factory=list, description="columns carried into the cache as they are")
    student: str | None = Field(
        default=None, description="revision of the student that wrote the continuations (on-policy)"
    )
    sample: float | None = Field(default=None, gt=0, le=1, description="fraction of this source; else filters.sample")
    limit_documents: int | None = Field(default=None, ge=1, description="at most so many documents of each file")

    @field_validator("splits")
    @classmethod
    def _fractions(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is not None and (abs(sum(value.values()) - 1) > 1e-6 or min(value.values()) < 0):
            raise ValueError(f"fractions of `splits` must be ≥ 0 and sum to 1, found {value}")
        return value

    @field_validator("files", mode="before")
    @classmethod
    def _one_file(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class WindowsConfig(_Strict):
    """What happens to a document longer than `size` tokens."""

    policy: Literal["window", "truncate", "skip"] = "window"
    size: int | None = Field(
        default=None, ge=2, description="tokens of one input, BOS included; max_model_len − 1 by default"
    )
    stride: int | None = Field(default=None, ge=1, description="distance of two windows; size − min_context by default")
    min_context: int | None = Field(
        default=None, ge=0, description="least context of a stored row; min(256, size/4) default"
    )
    bos_every_window: bool = Field(default=False, description="give windows after the first a BOS of their own")
    truncate_side: Literal["left", "right"] = Field(default="right", description="which end is cut off")

    @model_validator(mode="after")
    def _fits(self) -> WindowsConfig:
        if self.size is not None and self.stride is not None:
            if self.stride > self.size:
                raise ValueError(f"stride {self.stride} is larger than size {self.size}: rows would be missing")
            if self.min_context is not None and self.size - self.stride < self.min_context:
                raise ValueError(
                    f"size {self.size} − stride {self.stride} leaves {self.size - self.stride} tokens of context, "
                    f"less than min_context {self.min_context}"
                )
        return self


class ChatConfig(_Strict):
    """How messages become text."""

    template: str | None = Field(
        default=None, description="path of a Jinja file; the tokenizer's own template by default"
    )
    template_args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the template")
    system: str | None = Field(default=None, description="system prompt put before conversations that have none")
    mask: Literal["assistant", "all"] = Field(default="assistant", description="which tokens a student learns")
    rows: Literal["all", "masked"] = Field(
        default="all", description="`masked` stores rows only where the mask is true"
    )


class FiltersConfig(_Strict):
    min_chars: int = Field(default=0, ge=0)
    max_chars: int | None = Field(default=None, ge=1)
    min_tokens: int = Field(default=1, ge=1)
    max_tokens: int | None = Field(default=None, ge=1, description="longer documents are dropped before windowing")
    sample: float = Field(default=1.0, gt=0, le=1, description="fraction of documents kept, by hash of the text")
    sample_seed: int = 0
    dedup: Literal["none", "shard", "corpus"] = Field(
        default="none",
        description="`shard` needs no memory of other shards; `corpus` reads everything once while planning",
    )
    blank: Literal["drop", "keep"] = "drop"
    invalid_utf8: Literal["drop", "replace"] = "drop"
    control_characters: Literal["keep", "drop", "strip"] = "keep"


class GenerateConfig(_Strict):
    """The teacher continues prompts, then the whole is scored by prefill; the loss mask is on the continuation."""

    max_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0 = off")
    seed: int = 0


class RecipeConfig(_Strict):
    """What makes rows out of documents. Digested into every shard id."""

    mode: Literal["score", "generate"] = "score"
    bos: Literal["auto", "always", "never"] = Field(default="auto", description="auto = what the tokenizer itself does")
    eos: bool = Field(default=True, description="append EOS to raw text (chat templates bring their own end marker)")
    special_text: Literal["as_text", "as_tokens"] = Field(
        default="as_text", description="whether `<|eos|>` written in raw text is the special token or plain characters"
    )
    windows: WindowsConfig = WindowsConfig()
    chat: ChatConfig = ChatConfig()
    filters: FiltersConfig = FiltersConfig()
    generate: GenerateConfig = GenerateConfig()


class RunConfig(_Strict):
    """How the work is run; changes no shard, except `shard_tokens` and `shard_bytes`, which cut the inputs."""

    executor: Literal["ray", "inline"] = Field(
        default="ray", description="inline = in this process, one teacher, no Ray"
    )
    actors: int = Field(default=1, ge=1, description="most teachers at a time")
    min_actors: int = Field(default=1, ge=0, description="give up when fewer run after actor_start_timeout_s")
    shards_per_actor: int = Field(
        default=2, ge=1, le=8, description="shards an actor overlaps, so that the engine never waits"
    )
    shard_tokens: int = Field(
        default=2_000_000, ge=1, description="estimated tokens of a shard: one to three GPU-minutes"
    )
    shard_bytes: int | None = Field(default=None, ge=1, description="bytes of a shard instead (small machines)")
    shard_timeout_s: float = Field(
        default=3600,
        gt=0,
        description="a shard without a result is taken from its teacher; for each `shard_tokens` in it",
    )
    actor_start_timeout_s: float = Field(default=1800, gt=0)
    max_retries: int = Field(default=3, ge=0, description="failures of a shard after which it is quarantined")
    publish: bool = True
    allow_partial: bool = Field(default=False, description="publish although shards are quarantined or missing")
    allow_repeated_content: bool = Field(default=False, description="publish although equal text stands in two splits")
    retry_quarantined: bool = Field(default=False, description="give quarantined shards another chance")
    budget_gpu_hours: float | None = Field(
        default=None,
        gt=0,
        description="give out no shard once this run's teachers have held GPUs for so long, their starts included (a "
        "teacher without a GPU counts as one); what is in work is finished, and every run counts from zero",
    )
    on_truncated: Literal["quarantine", "keep"] = Field(
        default="quarantine",
        description="a compressed file that ends early: quarantine its shard, or keep what was read",
    )
    reuse: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="copy rows of inputs that another plan of this cache has committed instead of computing them again; "
        "auto = where there are commits of another plan (each actor then reads their keys once)",
    )
    leases: bool = Field(
        default=True, description="advisory: several jobs on one cache do not start with the same shards"
    )
    lease_s: float = Field(default=300, gt=0)
    refresh_s: float = Field(default=30, gt=0, description="how often commits of other jobs are looked up")
    log_every_s: float = Field(default=10, gt=0)


class JobConfig(_Strict):
    """A whole job file."""

    cache: str
    corpus_root: str | None = Field(default=None, description="folder or URL that relative `files` are looked up in")
    teacher: TeacherConfig
    corpora: list[CorpusConfig] = Field(min_length=1)
    recipe: RecipeConfig = RecipeConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _consistent(self) -> JobConfig:
        size = self.recipe.windows.size
        if size is not None and size + 1 > self.teacher.max_model_len:
            raise ValueError(
                f"recipe.windows.size {size} needs teacher.max_model_len ≥ {size + 1}, found "
                f"{self.teacher.max_model_len}: prompt log-probabilities need one token more than the input"
            )
        for corpus in self.corpora:
            kind, generates = corpus.fields.kind, self.recipe.mode == "generate"
            if generates and kind not in ("prompt", "messages"):
                raise ValueError(
                    f"corpus {corpus.source!r}: recipe.mode generate continues `fields.prompt` or `fields.messages`, "
                    f"found {kind}"
                )
            if kind == "prompt" and not generates:
                raise ValueError(f"corpus {corpus.source!r}: `fields.prompt` needs recipe.mode generate, found score")
        if self.recipe.mode == "generate" and self.recipe.chat.mask == "all":
            raise ValueError("recipe.chat.mask all: in mode generate the mask is on what the teacher writes")
        return self

    @property
    def window_size(self) -> int:
        """Most tokens of one input, BOS included."""
        return self.recipe.windows.size or self.teacher.max_model_len - 1

    def patterns(self, corpus: CorpusConfig) -> list[str]:
        """File patterns of a corpus, relative ones below corpus_root."""
        if self.corpus_root is None:
            return list(corpus.files)
        root = self.corpus_root.rstrip("/")
        return [f if "://" in f or f.startswith("/") else f"{root}/{f}" for f in corpus.files]


def parse_job(tree: dict[str, Any], where: str = "job") -> JobConfig:
    """Checks a tree of plain values. Raises UsageError with one sentence."""
    return configfile.validate(JobConfig, tree, where)


def load_job(path: str | Path, overrides: list[str] | None = None) -> JobConfig:
    """Reads a job file. Raises UsageError (exit status 2) with one sentence for anything wrong in it."""
    return configfile.load(JobConfig, path, overrides or ())


def canonical_json(value: Any) -> str:
    """One spelling per value, for digests of recipes and conversations.

    ASCII, where teachercache.format.spec.canonical_json is UTF-8: a conversation may hold half of a surrogate pair, which UTF-8
    cannot spell. The two give other digests for any text beyond ASCII, so neither can take the other's place.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
