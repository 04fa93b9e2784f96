"""Students: loading one, checking that a cache fits it, cutting one from its teacher, calling its parts.

A student is any causal language model that transformers loads. The trainer calls its decoder for hidden states and
hands the head's weight to the loss, so logits never exist; what else the model does to its logits (scaling, soft cap,
bias) is read from its configuration here and nowhere else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from teachercache.errors import UsageError
from teachercache.fingerprint import fingerprint_tokenizer
from trainer.model import attention
from trainer.model.types import Model

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files that go along from a student to its checkpoints."""


@dataclass(frozen=True)
class Head:
    """How hidden states become logits: softcap(scale · hidden @ weight.T + bias)."""

    weight: torch.Tensor  # [V, d]
    bias: torch.Tensor | None  # [V]
    scale: float
    softcap: float | None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, d] -> float32 [N, V]: the naive twin of the fused loss's first product."""
        logits = (self.scaled(hidden) @ self.weight.to(hidden.dtype).T).float()
        if self.bias is not None:
            logits = logits + self.bias.float()
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap is not None else logits

    def scaled(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.scale == 1.0 else hidden * self.scale


def load_student(folder: Path, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False) -> Model:
    """Load a causal LM from a Hugging Face folder, with attention that keeps documents apart.

    Raises UsageError when the folder holds no model.
    """
    check_folder(folder)
    try:
        model: Model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation=attention.NAME
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot load the model in {folder}: {' '.join(str(error).split())}") from error
    for name, module in decoder(model).named_modules():
        rates = {"p": module.p} if isinstance(module, torch.nn.Dropout) else vars(module)
        for key, value in rates.items():
            if (key == "p" or key.endswith(("dropout", "pdrop"))) and isinstance(value, float) and value > 0:
                raise UsageError(
                    f"the model in {folder} has a dropout of {value} in {name}; packed training needs 0: set every dropout "
                    "in config.json to 0"
                )
    return model.to(device)


def check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} is not a Hugging Face model folder: it has no config.json")


def decoder(model: Model) -> Model:
    """The part of a causal LM that returns last hidden states: of one that also sees images, its text part."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft wraps
    return getattr(base.base_model, "language_model", base.base_model)


def layer_stack(model: Model) -> tuple[str, Any]:
    """The decoder's list of layers, and the attribute under which it holds it.

    Raises UsageError for a model that keeps its layers elsewhere.
    """
    for name in ("layers", "h"):  # the second is GPT-2's
        found = getattr(decoder(model), name, None)
        if isinstance(found, torch.nn.ModuleList):
            return name, found
    raise UsageError(f"{type(model).__name__} keeps its layers in an unknown place: it can be neither trained nor cut")


def freeze_what_text_does_not_use(model: Model) -> None:
    """Train the decoder and the head alone: a vision tower gets no gradient, but it would get weight decay."""
    used = {
        id(parameter) for part in (decoder(model), model.get_output_embeddings()) for parameter in part.parameters()
    }
    for parameter in model.parameters():
        if id(parameter) not in used:
            parameter.requires_grad_(False)


def head(model: Model) -> Head:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config, layer = base.config.get_text_config(), base.get_output_embeddings()
    scale = 1.0
    if getattr(config, "logits_scaling", None):  # Granite divides
        scale = 1.0 / config.logits_scaling
    elif getattr(config, "logit_scale", None):  # Cohere multiplies
        scale = config.logit_scale
    return Head(layer.weight, getattr(layer, "bias", None), scale, getattr(config, "final_logit_softcapping", None))


def hidden_states(
    model: Model,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    documents: attention.DocumentLayout,
) -> torch.Tensor:
    """int64 [T], int64 [T] -> last hidden states [T, d] of one packed sequence."""
    before = documents.calls
    output = decoder(model)(
        input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, documents=documents
    )
    calls, layers = documents.calls - before, model.config.get_text_config().num_hidden_layers
    if calls < layers:  # attention of its own, a recurrence or a convolution over time
        raise UsageError(
            f"{type(model).__name__} mixes tokens without trainer.model.attention: {calls} of its {layers} layers called it, so "
            "packed documents would see one another; choose a student with attention in every layer"
        )
    return output.last_hidden_state[0]


def check_fits(folder: Path, cache: Any) -> None:
    """Refuse a cache whose rows mean something else to this student; reads no weights.

    The tokenizers must be the same, and every id that the teacher may give must have a row in the student's head.
    Raises UsageError with both values.
    """
    check_folder(folder)
    theirs = cache.spec.tokenizer
    mine = fingerprint_tokenizer(folder)
    if mine.digest != theirs.digest:
        raise UsageError(
            f"the cache {cache.url} was made with tokenizer {theirs.digest[:12]} ({theirs.vocab_size} tokens), the student "
            f"{folder} has {mine.digest[:12]} ({mine.vocab_size} tokens): train a student with the teacher's tokenizer"
        )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rows = (config.get("text_config") or config).get("vocab_size")
    if rows is not None and rows < theirs.vocab_size:
        raise UsageError(
            f"the student {folder} has {rows} rows in its head, the cache {cache.url} has ids up to "
            f"{theirs.vocab_size - 1}: resize the student's embeddings"
        )


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The tokenizer's files (and generation settings) of a model folder, held in memory.

    In memory, because a resumed run's folder is a checkpoint that is removed once newer ones are kept.
    """
    return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}


def write_files(files: dict[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def choose_layers(rule: str, num_layers: int) -> list[int]:
    """Which of the teacher's layers a student keeps.

    "every-2" keeps 0, 2, 4, …; "first-8" the first eight; "0,3-5,9" those; the order is the teacher's.
    Raises UsageError for a rule that names no layer or one that does not exist.
    """
    try:
        if rule.startswith("every-"):
            layers = list(range(0, num_layers, int(rule.removeprefix("every-"))))
        elif rule.startswith("first-"):
            layers = list(range(int(rule.removeprefix("first-"))))
        else:
            layers = []
            for part in rule.split(","):
                low, _, high = part.partition("-")
                layers.extend(range(int(low), int(high or low) + 1))
    except ValueError as error:
        raise UsageError(f"expected layers as every-2, first-8 or 0,3-5,9; found {rule!r}") from error
    layers = sorted(set(layers))
    if not layers or layers[-1] >= num_layers:
        raise UsageError(f"--layers {rule} means {layers}, but the teacher has layers 0 to {num_layers - 1}")
    return layers


def init_student(
    teacher: Path, out: Path, *, layers: str = "every-2", mlp: int | None = None, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Cut a student from its teacher: keep chosen layers and, if told, the strongest `mlp` units of each MLP.

    Everything else (embeddings, head, norms, tokenizer) is the teacher's own. Returns what was made, for printing.
    Raises UsageError when `out` exists already or the teacher is not a Llama-like model that can be cut.
    """
    check_folder(teacher)
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty: choose another --out, or remove it")
    config = AutoConfig.from_pretrained(teacher, trust_remote_code=trust_remote_code)
    kept = choose_layers(layers, config.get_text_config().num_hidden_layers)
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype="auto", trust_remote_code=trust_remote_code)
    name, stack = layer_stack(model)
    cut: Any = torch.nn.ModuleList(stack[index] for index in kept)
    setattr(decoder(model), name, cut)
    text = model.config.get_text_config()
    text.num_hidden_layers = len(kept)
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[index] for index in kept]
    for new_index, layer in enumerate(cut):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = new_index
    if mlp is not None:
        _cut_mlps(cut, text, mlp)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    write_files(tokenizer_files(teacher), out)
    return {
        "student": str(out),
        "teacher": str(teacher),
        "layers": kept,
        "intermediate_size": getattr(text, "intermediate_size", None),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


@torch.no_grad()
def _cut_mlps(layers: Any, config: Any, width: int) -> None:
    """Keep the units of each gated MLP whose three weight vectors have the largest product of norms."""
    if not 0 < width <= config.intermediate_size:
        raise UsageError(f"--mlp {width}: expected 1 to {config.intermediate_size}, the teacher's own width")
    for layer in layers:
        mlp = getattr(layer, "mlp", None)
        if not all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")):
            raise UsageError(f"--mlp needs gated MLPs (gate_proj, up_proj, down_proj); found {type(mlp).__name__}")
        gate, up, down = (getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))
        strength = gate.weight.float().norm(dim=1) * up.weight.float().norm(dim=1) * down.weight.float().norm(dim=0)
        keep = strength.topk(width).indices.sort().values
        for linear in (gate, up):
            linear.weight = torch.nn.Parameter(linear.weight[keep].clone())
            if linear.bias is not None:
                linear.bias = torch.nn.Parameter(linear.bias[keep].clone())
            linear.out_features = width
        down.weight = torch.nn.Parameter(down.weight[:, keep].clone())
        down.in_features = width
    config.intermediate_size = width
