"""The job file: one typed YAML document, `key=value` overrides on the command line, unknown keys refused.

    cache: s3://bucket/name
    teacher: {model: /models/llama-8b, engine: vllm}
    rows: {kind: top_k, entries: 100}
    corpora:
      - {source: web, files: ["s3://corpus/web/*.jsonl.zst"], fields: {text: text, id: url}}
    recipe: {windows: {policy: window, size: 4096}}
    run: {actors: 8}

Everything under `recipe` (and the row-making keys of a corpus) changes rows and is therefore part of a shard's id;
everything under `run` may change between two runs of the same job without changing a single shard.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from teachercache import configfile
from teachercache.configfile import Section
from teachercache.format.layout import NAME
from teachercache.format.spec import Rows, SampledRows, TopKRows
from teachercache.urls import check_url, refuse_read_only

Kind = Literal["text", "messages", "input_ids", "prompt"]  # what a document is
_NAME = f"^{NAME.pattern}$"  # sources and splits are parts of object names
_OTHER_NAMES = {"top_k": "rows.entries"}  # keys of other tools and earlier versions
SET_BY: dict[str, dict[str, str]] = {
    "vllm": {
        "model": "teacher.model",
        "revision": "teacher.revision",
        "dtype": "teacher.dtype",
        "hf_overrides.head_dtype": "teacher.head_dtype",
        "max_model_len": "teacher.max_model_len",
        "tensor_parallel_size": "teacher.tensor_parallel",
        "trust_remote_code": "teacher.trust_remote_code",
        "max_logprobs": "rows.entries",
        "worker_extension_cls": "",
        "tokenizer": "teacher.model",
        "tokenizer_revision": "teacher.revision",
    },
    "hf": {
        "pretrained_model_name_or_path": "teacher.model",
        "revision": "teacher.revision",
        "dtype": "teacher.dtype",
        "torch_dtype": "teacher.dtype",
        "trust_remote_code": "teacher.trust_remote_code",
    },
}
"""By engine: arguments that teacher.engine_args may not name, and the key that sets each; "": the pipeline alone does."""


class TeacherConfig(Section):
    """Which model makes the rows, and how it runs."""

    model: str = Field(description="folder of a Hugging Face model, or an id on the hub")
    name: str | None = Field(None, description="name written into spec.json; the model's by default")
    revision: str | None = Field(None, description="branch, tag or commit on the hub")
    engine: Literal["vllm", "hf", "noop"] = Field(
        "vllm",
        description="`vllm` for real work, `hf` (transformers) as a slow reference, `noop` for made-up rows in tests",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="number type of weights and activations"
    )
    head_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="number type of the logits; bf16 adds 0.06 to 0.25 nat of noise and many ties to every row",
    )
    max_model_len: int = Field(2048, ge=8, description="longest input plus the one token that the engine samples")
    tensor_parallel: int = Field(1, ge=1, description="GPUs of one node over which a teacher is split")
    gpus_per_actor: float | None = Field(
        None, ge=0, description="GPUs that an actor reserves; tensor_parallel by default where there are GPUs"
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="OMP threads of an actor; by default the node's cores, divided among its actors, whatever "
        "OMP_NUM_THREADS says",
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="further arguments, passed to the engine as they are; those that other keys set are refused",
    )
    trust_remote_code: bool = Field(False, description="let transformers and vLLM run code of the model's folder")
    fast_path: Literal["auto", "off", "require"] = Field(
        "auto",
        description="keep vLLM's tensors instead of rebuilding Python objects, and make the rows in its worker; "
        "auto = where this release allows it; sampled rows need it",
    )
    canary: bool = Field(
        True,
        description="at every start compare the fast path with the public one, and a small model with transformers in float32",
    )

    @model_validator(mode="after")
    def _engine_arguments(self) -> TeacherConfig:
        named = set(self.engine_args)
        named |= {
            f"{key}.{part}" for key, value in self.engine_args.items() if isinstance(value, dict) for part in value
        }
        refused = [
            f"{name} ({f'set {key} instead' if key else 'leave it out, the pipeline sets it'})"
            for name, key in SET_BY.get(self.engine, {}).items()
            if name in named
        ]
        if refused:
            raise ValueError(f"engine_args names what other keys set, and would be ignored there: {', '.join(refused)}")
        return self


class RowsConfig(Section):
    """What is kept of the teacher's distribution at each position; part of the cache's identity."""

    kind: Literal["top_k", "sampled"] = Field(
        "top_k",
        description="`top_k`: the most probable tokens; `sampled`: an unbiased sample of the whole distribution",
    )
    entries: int | None = Field(
        None, ge=1, le=4096, description="tokens stored of each row; 100, or 24 where the rows are sampled"
    )
    exact: int | None = Field(
        None,
        ge=1,
        description="least number of a sampled row's entries that are not drawn; a quarter of them by default",
    )
    seed: int | None = Field(None, ge=0, lt=2**63, description="another sample of the same teacher; 0 by default")

    @property
    def spec(self) -> Rows:
        """Return the rows as the cache's identity has them."""
        named = self.model_dump(exclude_none=True)
        return SampledRows(**named) if self.kind == "sampled" else TopKRows(**named)

    @model_validator(mode="after")
    def _fits(self) -> RowsConfig:
        if self.kind == "sampled":
            entries = 24 if self.entries is None else self.entries
            if entries < 2 or (self.exact or 1) >= entries:
                raise ValueError(f"sampled rows need exact < entries, found exact {self.exact or 1} of {entries}")
        elif self.exact is not None or self.seed is not None:
            raise ValueError("exact and seed are of rows of kind sampled; set rows.kind=sampled or leave them out")
        return self


class Fields(Section):
    """Names of the columns that hold what is needed. Exactly one of text, messages, input_ids, prompt is used."""

    text: str | None = Field(None, description="raw text; the column `text` where no field names the document")
    messages: str | None = Field(None, description="a conversation; in generate mode its last turn is answered")
    input_ids: str | None = Field(None, description="token ids, taken as they are")
    id: str | None = Field(None, description="a document's id; by default made of its content and place")
    loss_mask: str | None = Field(None, description="with input_ids: one bool per token, false = do not learn it")
    tools: str | None = Field(None, description="with messages: the tools that the template renders")
    prompt: str | None = Field(None, description="in generate mode: raw text that the teacher continues")
    continuation: str | None = Field(None, description="scored after `text` with the loss mask on it alone")

    @property
    def _kinds(self) -> list[Kind]:
        return [kind for kind in get_args(Kind) if getattr(self, kind) is not None]

    @property
    def kind(self) -> Kind:
        """Return what a document is."""
        return self._kinds[0] if self._kinds else "text"

    @model_validator(mode="after")
    def _one_kind(self) -> Fields:
        if len(named := self._kinds) > 1:
            raise ValueError(f"one of text, messages, input_ids, prompt names the document, found {named}")
        if self.continuation is not None and self.kind != "text":
            raise ValueError("`continuation` follows a `text` field; name the prompt's column as `text`")
        return self

    @property
    def text_column(self) -> str:
        """Return the column of raw text."""
        return "text" if self.text is None else self.text


class StorageConfig(Section):
    """Where a corpus's object store is and by whose rights it is read; keys come from the environment or a profile."""

    endpoint: str | None = Field(None, description="URL of the store's endpoint; AWS_ENDPOINT_URL by default")
    profile: str | None = Field(None, description="profile of ~/.aws whose keys and region are used")
    anonymous: bool = Field(False, description="send no signature: for public buckets")

    @model_validator(mode="after")
    def _plain(self) -> StorageConfig:
        if self.endpoint is not None:
            check_url(self.endpoint)
            if not self.endpoint.startswith(("http://", "https://")):
                raise ValueError("corpora.N.storage.endpoint: expected http://host:port or https://host")
        if self.anonymous and self.profile is not None:
            raise ValueError("corpora.N.storage: a profile signs and anonymous does not; name one of them")
        return self


class CorpusConfig(Section):
    """One source of documents."""

    source: str = Field("default", pattern=_NAME, description="name of this source in the cache")
    split: str = Field("train", pattern=_NAME, description="split of all its documents, unless `splits` is set")
    splits: dict[str, float] | None = Field(None, description="fractions by hash of the document's text; sum 1")
    files: list[str] = Field(min_length=1, description="paths or globs, any fsspec URL")
    storage: StorageConfig = Field(
        StorageConfig.model_validate({}), description="the store of `files` where that is another one than the cache's"
    )
    format: Literal["jsonl", "parquet", "text"] | None = Field(None, description="from the file's name by default")
    compression: Literal["none", "gzip", "zstd"] | None = Field(None, description="from the file's name by default")
    text_unit: Literal["file", "line"] = Field("file", description="what a document is in a text file")
    fields: Fields = Field(Fields.model_validate({}), description="columns; one of text, messages, input_ids, prompt")
    meta: list[str] = Field(default_factory=list, description="columns carried into the cache as they are")
    id_scope: Literal["source", "file"] = Field(
        "source",
        description="where `fields.id` is unique; `file` puts the file's name before it, for files that all count from 0",
    )
    student: str | None = Field(None, description="revision of the student that wrote the continuations (on-policy)")
    sample: float = Field(1.0, gt=0, le=1, description="fraction of documents kept, by hash of the content")
    limit_documents: int | None = Field(None, ge=1, description="at most this many documents of each file")

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


class WindowsConfig(Section):
    """What happens to a document longer than `size` tokens."""

    policy: Literal["window", "truncate", "skip"] = Field(
        "window", description="cut it into overlapping windows, keep its beginning, or drop it"
    )
    size: int | None = Field(None, ge=2, description="tokens of one input, BOS included; max_model_len − 1 by default")
    min_context: int | None = Field(
        None, ge=0, description="least context of a stored row, by which windows overlap; min(256, size/4) by default"
    )
    bos_every_window: bool = Field(False, description="give windows after the first a BOS too")

    @model_validator(mode="after")
    def _fits(self) -> WindowsConfig:
        if self.size is not None and self.min_context is not None and self.min_context >= self.size:
            raise ValueError(
                f"min_context {self.min_context} leaves no room for new rows in windows of {self.size} tokens"
            )
        return self


GIVEN_TO_TEMPLATE = (
    "messages",
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "tokenize",
)
"""What the pipeline gives to a chat template: recipe.chat.template_args may not."""


class ChatConfig(Section):
    """How messages become text."""

    template: str | None = Field(None, description="path of a Jinja file; the tokenizer's template by default")
    template_args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the template")
    date: datetime.date | None = Field(
        None, description="day that the template prints, if it prints one; by default the day of the cache's first plan"
    )
    system: str | None = Field(None, description="system prompt put before conversations that have none")
    mask: Literal["assistant", "all"] = Field("assistant", description="which tokens a student learns")
    rows: Literal["all", "masked"] = Field("all", description="`masked` stores rows only where the mask is true")

    @field_validator("template_args")
    @classmethod
    def _arguments(cls, value: dict[str, Any]) -> dict[str, Any]:
        if ours := [name for name in GIVEN_TO_TEMPLATE if name in value]:
            raise ValueError(f"the pipeline itself gives {', '.join(ours)} to a template: leave that out")
        return value


class FiltersConfig(Section):
    """Which documents are left out; empty and blank ones and invalid UTF-8 always are. Every drop is counted by reason."""

    min_tokens: int = Field(1, ge=1, description="shorter documents are dropped")
    max_tokens: int | None = Field(None, ge=1, description="longer documents are dropped before windowing")
    dedup: Literal["none", "shard", "corpus"] = Field(
        "none",
        description="drop equal texts: `shard` needs no memory of other shards; `corpus` reads everything once while planning",
    )


class GenerateConfig(Section):
    """The teacher continues prompts, then the whole is scored by prefill; the loss mask is on the continuation."""

    max_tokens: int = Field(256, ge=1, description="longest continuation")
    temperature: float = Field(1.0, ge=0, description="0 = greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus of the sampling; 1 = off")
    top_k: int = Field(0, ge=0, description="sample among this many tokens; 0 = off")
    seed: int = Field(0, description="with a document's content it seeds the sampling")


class RecipeConfig(Section):
    """What makes rows out of documents. Digested into every shard id."""

    mode: Literal["score", "generate"] = Field(
        "score", description="score documents as they are, or let the teacher continue them first"
    )
    bos: Literal["auto", "always", "never"] = Field("auto", description="auto = what the tokenizer does by itself")
    eos: bool = Field(True, description="append EOS to raw text (chat templates bring their end marker)")
    special_text: Literal["as_text", "as_tokens"] = Field(
        "as_text", description="whether `<|eos|>` written in raw text is the special token or plain characters"
    )
    windows: WindowsConfig = Field(WindowsConfig.model_validate({}), description="documents longer than one input")
    chat: ChatConfig = Field(ChatConfig.model_validate({}), description="how conversations become text")
    filters: FiltersConfig = Field(FiltersConfig.model_validate({}), description="which documents are left out")
    generate: GenerateConfig = Field(GenerateConfig.model_validate({}), description="how the teacher continues prompts")


class RunConfig(Section):
    """How the work is run; changes no shard, except `shard_tokens` and `shard_bytes`, which cut the inputs."""

    executor: Literal["ray", "inline"] = Field("ray", description="inline = in this process, one teacher, no Ray")
    actors: int = Field(1, ge=1, description="most actors (processes with one teacher) at a time")
    shards_per_actor: int = Field(
        2, ge=1, le=8, description="shards an actor has open at a time, so that the engine never waits"
    )
    shard_tokens: int = Field(2_000_000, ge=1, description="estimated tokens of a shard: one to three GPU-minutes")
    shard_bytes: int | None = Field(None, ge=1, description="bytes of a shard instead (small machines)")
    shard_timeout_s: float = Field(
        3600,
        gt=0,
        description="end an actor whose shard has no result by then; longer for a shard of more than `shard_tokens`",
    )
    actor_start_timeout_s: float = Field(1800, gt=0, description="give up when no actor is ready by then")
    max_retries: int = Field(3, ge=0, description="failures of a shard after which it is quarantined")
    max_drop_share: float = Field(
        0.2,
        ge=0,
        le=1,
        description="stop after the first shards where more documents than this share cannot be used; those that filters, "
        "sampling or de-duplication leave out do not count; 1 = go on whatever is lost",
    )
    check_ids: bool = Field(
        True,
        description="where `fields.id` is set, read all inputs once before a run and leave out documents whose id an earlier "
        "one has; false = within each shard alone, and at publishing",
    )
    allow_partial: bool = Field(False, description="publish although shards are quarantined or missing")
    allow_repeated_content: bool = Field(False, description="publish although equal text is in two splits")
    retry_quarantined: bool = Field(False, description="give quarantined shards another chance")
    budget_gpu_hours: float | None = Field(
        None,
        gt=0,
        description="stop dispatching shards after this many GPU-hours (start-up included; an actor without a GPU counts "
        "as one); shards in progress finish, and the budget is per run",
    )
    on_truncated: Literal["quarantine", "keep"] = Field(
        "quarantine", description="a compressed file that ends early: quarantine its shard, or keep what was read"
    )
    reuse: Literal["auto", "on", "off"] = Field(
        "auto",
        description="copy rows of inputs that another plan of this cache has committed instead of computing them again; "
        "auto = where there are commits of another plan (each actor then reads their keys once)",
    )
    leases: bool = Field(
        True, description="take shards by advisory leases, so that jobs on one cache do not repeat work"
    )
    log_every_s: float = Field(10, gt=0, description="seconds between two lines of progress")


class JobConfig(Section):
    """A whole job file."""

    cache: str = Field(description="folder or URL of the cache; made where it is missing")
    corpus_root: str | None = Field(None, description="folder or URL that relative `files` are looked up in")
    teacher: TeacherConfig = Field(description="which model makes the rows, and how it runs")
    rows: RowsConfig = Field(RowsConfig.model_validate({}), description="what is kept of the teacher's distribution")
    corpora: list[CorpusConfig] = Field(min_length=1, description="sources of documents")
    recipe: RecipeConfig = Field(RecipeConfig.model_validate({}), description="what makes rows out of documents")
    run: RunConfig = Field(RunConfig.model_validate({}), description="how the work is run")

    @model_validator(mode="after")
    def _consistent(self) -> JobConfig:
        inputs = (file for corpus in self.corpora for file in corpus.files)
        for url in (self.cache, self.corpus_root or "", self.teacher.model, *inputs):
            check_url(url)
        refuse_read_only(self.cache)
        if self.rows.kind == "sampled" and self.teacher.engine == "vllm" and self.teacher.fast_path == "off":
            raise ValueError("rows of kind sampled are made in vLLM's worker; set teacher.fast_path to auto or require")
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
    def without_effect(self) -> list[str]:
        """Return a line for each group of keys that are set and that other keys leave without effect."""
        recipe, teacher, run = self.recipe, self.teacher, self.run
        chat = [f"recipe.chat.{name}" for name in ChatConfig.model_fields if name != "rows"]
        inline = ("run.actors", "run.shards_per_actor", "run.shard_timeout_s", "run.actor_start_timeout_s")
        windows = ("recipe.windows.min_context", "recipe.windows.bos_every_window")
        drawn = [f"recipe.generate.{name}" for name in ("top_p", "top_k", "seed")]
        greedy = recipe.mode == "generate" and recipe.generate.temperature == 0
        rules: list[tuple[bool, Sequence[str], str]] = [
            (recipe.mode == "score", ["recipe.generate"], "recipe.mode is score"),
            (greedy, drawn, "recipe.generate.temperature is 0, which draws nothing"),
            (all(c.fields.kind != "messages" for c in self.corpora), chat, "no corpus has fields.messages"),
            (recipe.windows.policy != "window", windows, f"recipe.windows.policy is {recipe.windows.policy}"),
            (run.executor == "inline", inline, "run.executor is inline: one teacher in this process, and no watchdog"),
            (
                teacher.engine == "hf",
                ("teacher.tensor_parallel", "teacher.fast_path"),
                "teacher.engine is hf, which has one device and one path",
            ),
        ]
        for number, corpus in enumerate(self.corpora):
            key, fields = f"corpora.{number}", corpus.fields
            rules += [
                (corpus.splits is not None, [f"{key}.split"], f"{key}.splits decides"),
                (fields.id is None, [f"{key}.id_scope"], f"{key}.fields.id is not set"),
                (fields.kind != "input_ids", [f"{key}.fields.loss_mask"], f"{key} has no fields.input_ids"),
                (fields.kind != "messages", [f"{key}.fields.tools"], f"{key} has no fields.messages"),
            ]
        return configfile.without_effect(self, rules)

    @property
    def window_size(self) -> int:
        """Return the most tokens of one input, BOS included."""
        return self.recipe.windows.size or self.teacher.max_model_len - 1

    def patterns(self, corpus: CorpusConfig) -> list[str]:
        """Return the file patterns of a corpus, relative ones below corpus_root."""
        if self.corpus_root is None:
            return list(corpus.files)
        root = self.corpus_root.rstrip("/")
        return [f if "://" in f or f.startswith("/") else f"{root}/{f}" for f in corpus.files]


def parse_job(tree: dict[str, Any], where: str = "job") -> JobConfig:
    """Check a tree of plain values. Raises UsageError with one sentence."""
    return configfile.validate(JobConfig, tree, where, _OTHER_NAMES)


def load_job(path: str | Path, overrides: list[str] | None = None) -> JobConfig:
    """Read a job file. Raises UsageError (exit status 2) with one sentence for anything wrong in it."""
    return configfile.load(JobConfig, path, overrides or (), other_names=_OTHER_NAMES)
