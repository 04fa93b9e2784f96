"""Students: load one, check that a cache fits it, call its parts.

A student is any causal language model that transformers loads. The trainer calls its decoder for hidden states and
passes the LM head's weight to the loss, so logits never exist. What else the model does to its logits (scaling, soft
cap, bias) is read from its configuration here and nowhere else.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from teachercache import Cache, fingerprint_tokenizer
from teachercache.errors import TeacherCacheError, UsageError
from teachercache.fingerprint import check_model_files, tokenizer_names
from trainer.model import Model, attention, parallel

T = TypeVar("T")
GENERATION = "generation_config.json"
LAYERS = ("layers", "h")
"""Names of the list of layers; the second is GPT-2's."""


@dataclass(frozen=True)
class Head:
    """How hidden states become logits: softcap(scale · hidden @ weight.T + bias)."""

    weight: Tensor  # [V, d]
    bias: Tensor | None  # [V]
    scale: float
    softcap: float | None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [N, V] of hidden states [N, d]: the naive twin of the fused loss's first product."""
        logits = (self.scaled(hidden) @ self.weight.to(hidden.dtype).T).float()
        if self.bias is not None:
            logits = logits + self.bias.float()
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap is not None else logits

    def scaled(self, hidden: Tensor) -> Tensor:
        """Return hidden states [N, d] times `scale`: what the loss multiplies with the weight."""
        return hidden if self.scale == 1.0 else hidden * self.scale


def load_student(folder: Path, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False) -> Model:
    """Load a causal LM with attention that keeps documents apart. Raises UsageError for none, or one with dropout."""
    model = load_whole(folder, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation=attention.NAME)
    for name, module in decoder(model).named_modules():
        rates = {"p": module.p} if isinstance(module, torch.nn.Dropout) else vars(module)
        for key, value in rates.items():
            if (key == "p" or key.endswith(("dropout", "pdrop"))) and isinstance(value, float) and value > 0:
                raise UsageError(
                    f"the model in {folder} has a dropout of {value} in {name}; packed training needs 0: set every dropout "
                    "in config.json to 0"
                )
    return model.to(device)


def load_whole(folder: Path, **options: Any) -> Model:
    """Load a causal LM of which every weight is in the folder, and which uses every weight that is.

    A weight that is missing would be random, one that is left over was trained for something else. Tied weights count
    once. Raises UsageError, which names the first few, and for files that are not whole.
    """
    check_folder(folder)
    auto: Any = AutoModelForCausalLM
    try:
        model, info = auto.from_pretrained(folder, output_loading_info=True, **options)
    except pickle.UnpicklingError as error:  # its message recommends to run what the file holds: not repeated
        raise TeacherCacheError(
            f"cannot load the model in {folder}: a .bin file holds more than tensors; nothing of it was run: use a folder with "
            "safetensors"
        ) from error
    except (OSError, ValueError, RuntimeError, EOFError, SafetensorError) as error:
        raise UsageError(f"cannot load the model in {folder}: {' '.join(str(error).split())[:500]}") from error
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    behind = _behind_the_stack(model.config.get_text_config())
    left_over = {key for key in info["unexpected_keys"] if not behind.search(key)} - tied
    for what, keys in (("lacks", set(info["missing_keys"]) - tied), ("has, unused,", left_over)):
        if keys:
            named = ", ".join(sorted(keys)[:3]) + (", …" if len(keys) > 3 else "")
            raise UsageError(
                f"{folder} {what} {len(keys)} weights of {type(model).__name__}: {named}; its config.json describes "
                "another model, or a file is missing. Download or make the folder again"
            )
    if (folder / GENERATION).is_file():  # it travels as it is: transformers refuses to write some that it reads
        model.generation_config = GenerationConfig()
    whole: Model = model
    return whole


def _behind_the_stack(text: Any) -> re.Pattern[str]:
    """Return a pattern of weights for speculative decoding, which transformers does not load."""
    count = text.num_hidden_layers
    extra = max(int(getattr(text, key, 0) or 0) for key in ("num_nextn_predict_layers", "num_mtp_layers"))
    numbers = "|".join(str(count + i) for i in range(extra)) or "none"
    return re.compile(rf"(^|\.)mtp[._]|\.layers\.({numbers})\.")


def check_folder(folder: Path) -> None:
    """Raise UsageError unless the folder holds a model's configuration, and whole files."""
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    check_model_files(folder)


def base(model: Model) -> Model:
    """Return the model without the wrapper that peft puts around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder(model: Model) -> Model:
    """Return the part of a causal LM that gives last hidden states: of one that also sees images, its text part."""
    inner = base(model).base_model
    inner = getattr(inner, "language_model", inner)
    has_layers = any(hasattr(inner, name) for name in LAYERS)
    return inner if has_layers else getattr(inner, "model", inner)  # Llama 4's text model names no base


def layer_stack(model: Model) -> tuple[str, Any]:
    """Return the name and the list of the decoder's layers. Raises UsageError for a model that keeps them elsewhere."""
    for name in LAYERS:
        found = getattr(decoder(model), name, None)
        if isinstance(found, torch.nn.ModuleList):
            return name, found
    raise UsageError(f"{type(model).__name__} keeps its layers in an unknown place: it can be neither trained nor cut")


def freeze_what_text_does_not_use(model: Model) -> None:
    """Freeze everything but the decoder and the LM head.

    A vision tower gets no gradient from text. Trainable, it would be given moments and a float32 buffer of zeros in
    the gradient's place, and decay under `weight_decay`.
    """
    used = {id(p) for part in (decoder(model), model.get_output_embeddings()) for p in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in used:
            parameter.requires_grad_(False)


def head(model: Model) -> Head:
    """Return the model's LM head as the loss needs it; tensors are the model's own, not copies."""
    inner = base(model)
    config, layer = inner.config.get_text_config(), inner.get_output_embeddings()
    scale = 1.0
    if getattr(config, "logits_scaling", None):  # Granite divides
        scale = 1.0 / config.logits_scaling
    elif getattr(config, "logit_scale", None):  # Cohere multiplies
        scale = config.logit_scale
    return Head(layer.weight, getattr(layer, "bias", None), scale, getattr(config, "final_logit_softcapping", None))


def shard(model: Model) -> None:
    """Let each of several ranks hold its share of a model, in place; of one rank, do nothing."""
    inner = base(model)
    parallel.shard(model, layer_stack(model)[1], inner.get_input_embeddings(), inner.get_output_embeddings())


def at_head(model: Model, function: Callable[[Head, Tensor], T], hidden: Tensor) -> T:
    """Return function(head, hidden), computed inside the head's module: there its weight is whole on every rank."""
    layer = base(model).get_output_embeddings()
    if layer.weight is base(model).get_input_embeddings().weight:
        # Hidden from FSDP, which would take its gradient for the last one: the embedding's comes much later.
        return parallel.inside(layer, lambda: function(head(model), hidden))
    return parallel.inside(layer, lambda states: function(head(model), states), hidden)


def hidden_states(model: Model, input_ids: Tensor, position_ids: Tensor, layout: attention.DocumentLayout) -> Tensor:
    """Return the last hidden states [T, d] of one packed sequence of int64 [T] ids and [T] positions.

    Raises UsageError for a model with layers that mix tokens without `trainer.model.attention`.
    """
    if torch.is_grad_enabled():
        layout.plan(model.config.get_text_config(), next(model.parameters()).dtype)
    before = layout.calls
    output = decoder(model)(input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, layout=layout)
    calls, layers = layout.calls - before, model.config.get_text_config().num_hidden_layers
    if calls < layers:  # another attention, a recurrence or a convolution over time
        raise UsageError(
            f"{type(model).__name__} mixes tokens without trainer.model.attention: {calls} of its {layers} layers called it, so "
            "packed documents would see one another; choose a student with attention in every layer"
        )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


@torch.no_grad()
def row_logits(
    model: Model, input_ids: Tensor, position_ids: Tensor, row_index: Tensor, layout: attention.DocumentLayout
) -> Tensor:
    """Return a live model's float32 logits [R, V] at int64 [R] positions of a packed sequence: R · V · 4 bytes."""

    def whole() -> Tensor:
        hidden = hidden_states(model, input_ids, position_ids, layout).index_select(0, row_index)
        return at_head(model, Head.logits, hidden)

    return parallel.inside(model, whole)


def check_fits(folder: Path, cache: Cache, role: str = "student") -> None:
    """Refuse a cache whose rows mean something else to this student, or live teacher; reads no weights.

    The tokenizers must be the same, and every id that the teacher may give must have a row in the model's head.
    Raises UsageError with both values.
    """
    check_folder(folder)
    theirs = cache.spec.tokenizer
    mine = fingerprint_tokenizer(folder)
    if mine.digest != theirs.digest:
        raise UsageError(
            f"the cache {cache.url} was made with tokenizer {theirs.digest[:12]} ({theirs.vocab_size:,} tokens), the {role} "
            f"{folder} has {mine.digest[:12]} ({mine.vocab_size:,} tokens): take a {role} with the cache's tokenizer"
        )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rows = (config.get("text_config") or config).get("vocab_size")
    if rows is not None and rows < theirs.vocab_size:
        raise UsageError(
            f"the {role} {folder} has {rows} rows in its head, the cache {cache.url} has ids up to "
            f"{theirs.vocab_size - 1}: resize the {role}'s embeddings"
        )


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Return the tokenizer's files and the generation settings of a model folder: they go along to its checkpoints.

    In memory, because a resumed run's folder is a checkpoint that is removed once newer ones are kept.
    """
    return {
        name: (folder / name).read_bytes()
        for name in (*tokenizer_names(folder), GENERATION)
        if (folder / name).is_file()
    }


def write_files(files: dict[str, bytes], folder: Path) -> None:
    """Write files by name into a folder, in which nothing else of a tokenizer remains."""
    for name in tokenizer_names(folder):
        if name not in files:
            (folder / name).unlink()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
