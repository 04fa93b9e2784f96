"""What `fit` and `eval` do before the first step: device, attention, cache, models, what is recomputed."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import teachercache
from teachercache import Cache
from teachercache.console import note
from teachercache.errors import UsageError
from teachercache.format.spec import CacheSpec, SampledRows
from trainer.checkpoint import resolve_model_folder, wait_for_store
from trainer.config import TrainConfig, TrainerConfig
from trainer.data.mean import check_averages
from trainer.limits import state_bytes
from trainer.model import Model, activation, attention, lora, parallel, student
from trainer.model.liger import apply_liger, describe_liger


@dataclass(frozen=True)
class Compute:
    """Where and in what a model computes."""

    device: torch.device
    dtype: torch.dtype
    attention: str
    """A kind of trainer.model.attention."""
    autocast: bool = False
    """Whether layers compute in bf16 whatever the weights' dtype."""

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU: sequences are then padded to equal shapes and pinned."""
        return self.device.type == "cuda"


def choose_compute(train: TrainConfig) -> Compute:
    """Return the device, dtype and attention that the configuration means. Raises UsageError for what is not there."""
    name, dtype, available = train.device, train.dtype, torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if available else "cpu"
    if name == "cuda" and not available:
        raise UsageError("train.device=cuda, but torch finds no CUDA device; use train.device=cpu or auto")
    if dtype == "auto":
        dtype = "bfloat16" if name == "cuda" else "float32"
    device = torch.device(name)
    try:
        kind = attention.choose_kind(device, train.attention)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return Compute(device, getattr(torch, dtype), kind, train.autocast == "bfloat16")


def configure_torch(train: TrainConfig) -> None:
    """Pin torch's CPU threads and let it use deterministic algorithms alone, where the configuration says so."""
    if train.threads:
        torch.set_num_threads(train.threads)
    if train.deterministic:
        # torch refuses cuBLAS otherwise, whose split products share workspaces; read when CUDA starts, which is later.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def open_caches(config: TrainerConfig, manifests: Sequence[int] | None = None) -> list[Cache]:
    """Open the caches, each at one manifest or its newest. Waits for a store that is away; refuses a wrong path at once.

    manifests  numbers to pin instead of the configuration's
    Raises UsageError for caches that one run cannot take together: of different tokenizers, or the same one twice.
    """
    caches: list[Cache] = []
    for number, entry in enumerate(config.caches):
        pin = manifests[number] if manifests and number < len(manifests) else entry.manifest
        cache = wait_for_store(partial(teachercache.open, entry.url, manifest=pin), f"opening {entry.url}")
        for other in caches:
            ours, theirs = other.spec.tokenizer, cache.spec.tokenizer
            if (ours.digest, ours.vocab_size) != (theirs.digest, theirs.vocab_size):
                raise UsageError(
                    f"the caches of a run have one tokenizer, but {other.url} was made with {ours.digest[:12]} "
                    f"({ours.vocab_size:,} tokens) and {cache.url} with {theirs.digest[:12]} ({theirs.vocab_size:,} "
                    "tokens): make one of them again with the other's tokenizer"
                )
            if other.url == cache.url or other.manifest.digest == cache.manifest.digest:
                raise UsageError(f"data.caches has the same cache twice, {other.url} and {cache.url}: give it once")
        caches.append(cache)
    return caches


def check_ranks(config: TrainerConfig) -> None:
    """Raise UsageError for what several ranks cannot do: batches that they cannot share, a length that follows the clock."""
    ranks, batch = parallel.count(), config.data.sequences_per_step
    if batch % ranks:
        raise UsageError(
            f"a step's {batch} sequences cannot be shared by {ranks} ranks: set data.batch_tokens to a multiple of {ranks} × "
            f"data.seq_len = {ranks * config.data.seq_len:,}"
        )
    if ranks > 1 and config.data.length_curriculum and config.train.max_steps:
        raise UsageError(
            "data.length_curriculum over several ranks goes by the data alone: set train.epochs in place of train.max_steps"
        )


def check_names(config: TrainerConfig, caches: Sequence[Cache]) -> None:
    """Raise UsageError for splits, sources and rows that the caches lack, before the first of some hundred steps."""
    sources: dict[str, set[str]] = {}
    for number, (entry, cache) in enumerate(zip(config.caches, caches, strict=True)):
        assert entry.split is not None
        check_rows(config, cache.spec, cache.url)
        if config.data.combine is not None:
            check_averages(cache)
        own = number < len(config.data.caches) and config.data.caches[number].split is not None
        check_split(cache, entry.split, f"data.caches.{number}.split" if own else "split")
        if config.eval.every_steps or "split" in config.eval.model_fields_set:
            check_split(cache, config.eval.split, "eval.split")
        if number < len(config.parts):  # of a mean, the first cache's sources count
            sources[f"split {entry.split} of {cache.url}"] = {found.source for found in cache.files(split=entry.split)}
    known = set().union(*sources.values())
    mixes = {"data.weights": config.data.weights}
    if isinstance(config.loss.ce_weight, dict):
        mixes["loss.ce_weight"] = config.loss.ce_weight
    for key, named in mixes.items():
        if unknown := sorted(named.keys() - known):
            raise UsageError(
                f"{key} names {', '.join(unknown)}, but {' and '.join(sources)} has the sources "
                f"{', '.join(sorted(known))}{did_you_mean(unknown[0], known)}"
            )
    if config.data.weights:
        for where, found in sources.items():
            if not any(config.data.weights.get(source) for source in found):
                raise UsageError(
                    f"data.weights leaves nothing of {where}, which has the sources {', '.join(sorted(found))}: name one "
                    "of them, or drop the cache"
                )
        if left_out := sorted(known - config.data.weights.keys()):
            note(f"data.weights leaves out the sources {', '.join(left_out)}", "note")


def check_rows(config: TrainerConfig, spec: CacheSpec, cache: str = "the cache") -> None:
    """Raise UsageError where the loss cannot take the kind of rows of a cache."""
    rows, loss, top_k, vocab_size = spec.rows, config.loss, config.data.top_k, spec.tokenizer.vocab_size
    if loss.method == "online":  # the teacher's rows are cut as the configuration says
        key, entries = ("loss.rows.entries", loss.rows.entries) if loss.rows else ("data.top_k", top_k or 1)
        if entries > vocab_size:
            raise UsageError(f"{key} = {entries}, but the tokenizer of {cache} has {vocab_size} tokens: set it to less")
        return
    sampled = isinstance(rows, SampledRows) and top_k is None
    if isinstance(rows, SampledRows) and top_k is not None and top_k > rows.exact:
        raise UsageError(
            f"data.top_k = {top_k}, but only {rows.exact} entries of a sampled row of {cache} are surely the most probable "
            f"ones (rows.exact); expected at most {rows.exact}, or no data.top_k and all {rows.entries} entries"
        )
    if top_k is not None and top_k > rows.entries:
        raise UsageError(
            f"data.top_k = {top_k}, but a row of {cache} has {rows.entries} entries: set it to less, or leave it out"
        )
    try:
        loss.for_head(None, 0.0).for_rows(sampled)
    except ValueError as error:
        kind = f"sampled, {rows.entries} entries" if isinstance(rows, SampledRows) else f"top-{rows.entries}"
        raise UsageError(f"{cache} has {kind} rows: {error}") from error


def check_split(cache: Cache, name: str, key: str) -> None:
    """Raise UsageError, with the nearest name, where a cache lacks the split that a key names."""
    if name not in cache.splits:
        raise UsageError(
            f"{key}: {cache.url} has no records of split {name!r}; it has {', '.join(cache.splits) or 'none'}"
            f"{did_you_mean(name, cache.splits)}"
        )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with the nearest of the known names, or "" where none is near."""
    alike = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {alike[0]}?" if alike else ""


def load_frozen(folder: Path, compute: Compute, *, trust_remote_code: bool) -> Model:
    """Load a model that is not trained: frozen, in evaluation mode."""
    return _load(folder, compute, trust_remote_code).eval().requires_grad_(False)


def _load(folder: Path, compute: Compute, trust_remote_code: bool) -> Model:
    place = (
        compute.device if parallel.count() == 1 else torch.device("cpu")
    )  # `student.shard` moves it, a unit at a time
    model = student.load_student(folder, dtype=compute.dtype, device=place, trust_remote_code=trust_remote_code)
    if compute.autocast:
        layers = student.decoder(model)
        layers.forward = torch.autocast(compute.device.type, dtype=torch.bfloat16)(layers.forward)
    return model


def load_teacher(config: TrainerConfig, compute: Compute, cache: Cache) -> Model:
    """Load the live teacher that the configuration names, in shares.

    Raises UsageError where it is no model, or one of another tokenizer than the cache's.
    """
    assert config.teacher is not None
    folder = resolve_model_folder(config.teacher)
    student.check_fits(folder, cache, "teacher")
    teacher = load_frozen(folder, compute, trust_remote_code=config.trust_remote_code)
    student.shard(teacher)
    return teacher


def load_for_training(config: TrainerConfig, folder: Path, compute: Compute, *, resumed: bool) -> Model:
    """Load the student as the configuration trains it: adapters, fused layers, checkpointing, tiling, compilation.

    folder  the student's, or with `resumed` a checkpoint's, which holds adapters alone where there are some
    """
    base = resolve_model_folder(config.student) if config.lora and resumed else folder
    model = _load(base, compute, config.trust_remote_code)
    apply_liger(model, wanted_liger(config.train), compute.device)
    if config.lora:
        model = lora.add(model, config.lora, saved=folder if resumed else None)
    student.freeze_what_text_does_not_use(model)
    _name, layers = student.layer_stack(model)
    if config.train.mlp_tile:
        activation.tile_mlps(layers, config.train.mlp_tile)
    policy: str = config.train.checkpointing
    if policy == "auto":
        policy = choose_policy(model, config, compute)
    activation.apply_policy(model, layers, policy)
    if config.train.compile:
        # Attention follows each batch's documents: traced into a layer, it would be compiled again for every batch.
        ALL_ATTENTION_FUNCTIONS.register(attention.NAME, torch.compiler.disable(attention.document_attention))
        for layer in layers:
            layer.compile(dynamic=True)
    student.shard(model)
    return model.train()


def wanted_liger(train: TrainConfig) -> str:
    """Return auto, on or off: torch.compile fuses the same layers itself, and torch 2.11 cannot trace liger's."""
    return "off" if train.compile and train.liger == "auto" else train.liger


def kernels_line(config: TrainerConfig, model: Model, optimizer: torch.optim.Optimizer, compute: Compute) -> str:
    """Return one line that says which implementations of layers, attention, loss and optimiser run."""
    layers = describe_liger(model, wanted_liger(config.train), compute.device)
    if config.train.compile:
        layers = "compiled by torch.compile"
    loss: str = config.loss.method
    if loss in ("fused", "online"):
        loss += " (Triton)" if compute.on_gpu else " (PyTorch)"
    return (
        f"kernels: layers {layers}; attention {compute.attention}; loss {loss}; optimiser {type(optimizer).__name__}, state "
        f"{config.optim.state}"
    )


def sums_in_float32(config: TrainerConfig, dtype: torch.dtype, ranks: int) -> bool:
    """Return whether micro-batches add up in float32 buffers next to the gradients: bf16 ones that accumulate do."""
    return dtype == torch.bfloat16 and config.data.sequences_per_step > ranks


def choose_policy(model: Model, config: TrainerConfig, compute: Compute) -> str:
    """Return the checkpointing policy that recomputes least and fits.

    Counted is free memory less gradients and optimiser state, which do not exist yet.
    """
    if not compute.on_gpu:
        return "none"
    free, _total = torch.cuda.mem_get_info(compute.device)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    dtype = compute.dtype
    state = 0 if config.optim.state == "offload" else state_bytes(config.optim, dtype)
    ranks = parallel.count()
    reserved = trained * (state + dtype.itemsize + (4 if sums_in_float32(config, dtype, ranks) else 0)) // ranks
    if ranks > 1:  # the model is still in CPU memory; two layers, or the head and its gradient, are whole at a time
        layer = max(sum(p.numel() for p in layer.parameters()) for layer in student.layer_stack(model)[1])
        whole = max(2 * dtype.itemsize * layer, (dtype.itemsize + 4) * student.head(model).weight.numel())
        reserved += dtype.itemsize * sum(p.numel() for p in model.parameters()) // ranks + whole
        free = min(parallel.gathered(free))
    return activation.choose_policy(
        model.config.get_text_config(), config.data.seq_len, free - reserved, element_size=dtype.itemsize
    )
