"""Bytes of a training step on each GPU, from the model's configuration alone: nothing is loaded, no GPU is needed.

The peak of a step is the largest of four moments (T tokens, L layers, V the head's rows, d its columns):
  loss      weights, states, activations of all layers, and the fused loss: float32 head gradient and a chunk of logits
  backward, last layer    activations of all layers, the head's gradient, one layer computed again and its gradients
  backward, first layer   all gradients, one layer computed again and its gradients
  update    weights, gradients, states
Held against every peak in benchmarks/results/step_h200*.json (tests/trainer/test_memory.py). Several GPUs share
weights, gradients and states evenly (FSDP2); each gathers two layers, or the head, at a time.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from teachercache.errors import UsageError
from trainer import hub
from trainer.checkpoint import CheckpointFolder
from trainer.config import TrainerConfig
from trainer.limits import POLICIES, state_bytes
from trainer.losses.fused import default_chunk_size
from trainer.model import Model, lora, student
from trainer.model.activation import layer_bytes
from trainer.setup import sums_in_float32, wanted_liger

GIB = 1 << 30
WORKSPACE = 64 << 20  # of cuBLAS
USABLE = 0.96
"""Share of a GPU's memory that a step may take: the rest is the CUDA context and fragments."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes on each GPU; `peak` is the largest of `moments`."""

    weights: int
    gradients: int
    states: int
    activations: int
    layer_backward: int
    """One layer in its backward pass: what is computed again, gradients of activations and of its weights."""
    loss: int
    gathered: int
    moments: dict[str, int]

    @property
    def peak(self) -> int:
        """Return the bytes that torch.cuda.max_memory_allocated would say."""
        return max(self.moments.values())


def read_config(url: str, *, trust_remote_code: bool = False) -> Any:
    """Return a student's transformers configuration. A folder needs no more than config.json; raises UsageError."""
    options = {"trust_remote_code": trust_remote_code}
    try:
        if hub.is_hub_id(url):
            name, _, revision = url.partition("@")
            return AutoConfig.from_pretrained(name, revision=revision or "main", **options)
        text = CheckpointFolder(url).get_text("config.json")
        if not text:
            raise UsageError(f"{url} holds no config.json: give the folder of a Hugging Face model")
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(text, encoding="utf-8")
            return AutoConfig.from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the configuration of {url}: {' '.join(str(error).split())[:300]}") from error


def on_meta(model_config: Any, config: TrainerConfig) -> Model:
    """Return the student as it would be trained, with shapes and dtypes but no values."""
    dtype = torch.float32 if config.train.dtype == "float32" else torch.bfloat16
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: Model = auto.from_config(model_config, dtype=dtype, trust_remote_code=config.trust_remote_code)
        if config.lora:
            model = lora.add(model, config.lora, saved=None)
    student.freeze_what_text_does_not_use(model)
    return model


def step_memory(config: TrainerConfig, model: Model, policy: str, gpus: int = 1) -> StepMemory:
    """Predict the bytes of a step with a checkpointing policy, one sequence of data.seq_len tokens at a time on a GPU.

    model  from `on_meta`

    Raises UsageError for a loss other than `fused`: it holds whole logits, or a teacher.
    """
    if config.loss.method != "fused":
        raise UsageError(f"the plan covers loss.method=fused, found {config.loss.method}")
    text, head = model.config.get_text_config(), student.head(model).weight
    (rows, d), size = head.shape, head.itemsize
    active = 2 if config.train.autocast == "bfloat16" else size  # of an activation
    tokens, tile = config.data.seq_len, config.train.mlp_tile or config.data.seq_len
    fused = wanted_liger(config.train) != "off" or config.train.compile
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    stack = student.layer_stack(model)[1]
    layer_weights = max(sum(p.numel() for p in layer.parameters()) for layer in stack)
    layer_trained = max(sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in stack)

    weights = sum(p.numel() * p.itemsize for p in model.parameters()) // gpus
    states = trained * state_bytes(config.optim, head.dtype) // gpus if config.optim.state != "offload" else 0
    summed = trained * 4 // gpus if sums_in_float32(config, head.dtype, gpus) else 0
    gradients = summed or trained * size // gpus
    head_gradient = rows * d * size if head.requires_grad and not summed else 0

    heads = text.num_attention_heads * (getattr(text, "head_dim", None) or d // text.num_attention_heads)
    keys = 2 * getattr(text, "num_key_value_heads", 1) * heads // text.num_attention_heads
    normed = further_norms(stack[0], d, {"q_norm": heads, "k_norm": keys // 2})
    kept_outside, kept_inside = layer_bytes(text, policy, active, fused=fused, normed=normed)
    all_outside, all_inside = layer_bytes(text, "none", active, fused=fused, normed=normed)
    inside = kept_inside if tile >= tokens else 0.0  # a tile keeps its input alone
    layers = text.num_hidden_layers
    # The final norm's input and output, the chosen rows and their gradients; teacher rows with ids and values of 4 bytes.
    ends = tokens * (4 * d * active + 8 * (config.data.top_k or 100) + 16)
    kept = int(layers * tokens * (kept_outside + inside))
    attention = tokens * (d + 4 * heads + keys) * active  # gradients of it, that of the queries summed in float32
    mlp = min(tokens, tile) * (all_inside - inside + all_inside / 3) + tokens * d * active
    layer = int(tokens * (all_outside - kept_outside) + max(attention, mlp)) + layer_trained * size

    chunk = config.loss.chunk_size or default_chunk_size(tokens, d, rows, head.dtype, torch.device("cuda"))
    wide = 4 if tokens > chunk or summed else size
    loss = (rows * d * wide if head.requires_grad else 0) + max(chunk * rows * size, head_gradient)

    # FSDP: the layer and the next one, float32 gradients; the head, until its float32 gradient has been shared out, which
    # for one that is tied to the embedding is at the end of the backward pass.
    layers_whole = layer_weights * 2 * size + layer_trained * 4 if gpus > 1 else 0
    head_whole = rows * d * (size + (4 if head.requires_grad else 0)) if gpus > 1 else head_gradient
    tied = model.get_input_embeddings().weight is head
    held, late = weights + states + summed + WORKSPACE, 0 if summed else gradients
    moments = {
        "loss": held + kept + ends + loss + (rows * d * size if gpus > 1 else 0),
        "backward, last layer": held + kept + head_whole + layer + layers_whole,
        "backward, first layer": held
        + late
        + kept // layers
        + layer
        + layers_whole
        + (head_whole if tied and gpus > 1 else 0),
        "update": held + late,
    }
    gathered = layers_whole + head_whole if gpus > 1 else 0
    return StepMemory(weights, gradients, states, kept + ends, layer, loss, gathered, moments=moments)


def further_norms(layer: torch.nn.Module, d: int, widths: dict[str, int]) -> int:
    """Return the elements of a token that a layer's norms see beyond the two of Llama; `widths` of those by name."""
    norms = [name for name, module in layer.named_modules() if type(module).__name__.endswith("Norm")]
    return sum(widths.get(name.rpartition(".")[2], d) for name in norms) - 2 * d


def plan(config: TrainerConfig, gpus: int, gpu_gib: float) -> dict[str, Any]:
    """Return what a step of the configuration takes of each of `gpus` GPUs of `gpu_gib` GiB, as JSON-able values.

    `train.checkpointing=auto` is the first policy, from the fastest to the smallest, that fits; the smallest where
    none does. Builds the model without values: seconds for the largest. Raises UsageError as `step_memory` does.
    """
    if gpus < 1 or gpu_gib <= 0:
        raise UsageError(f"expected --gpus of 1 or more and --gpu-gib above 0, found {gpus} and {gpu_gib}")
    model_config = read_config(config.student, trust_remote_code=config.trust_remote_code)
    return plan_of(config, on_meta(model_config, config), gpus, gpu_gib)


def plan_of(config: TrainerConfig, model: Model, gpus: int, gpu_gib: float) -> dict[str, Any]:
    """Return the plan of a model from `on_meta`, whatever config.student names."""
    by_policy = {policy: step_memory(config, model, policy, gpus) for policy in POLICIES}
    room = USABLE * gpu_gib * GIB
    policy: str = config.train.checkpointing
    if policy == "auto":
        policy = next((name for name, found in by_policy.items() if found.peak <= room), POLICIES[-1])
    found = by_policy[policy]
    return {
        "gpus": gpus,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "checkpointing": policy,
        "gib": {
            name: getattr(found, name) / GIB
            for name in ("weights", "gradients", "states", "activations", "layer_backward", "loss", "gathered")
        },
        "peak_at": max(found.moments, key=lambda name: found.moments[name]),
        "peak_gib": found.peak / GIB,
        "gpu_gib": gpu_gib,
        "fits": found.peak <= room,
        "peak_gib_by_checkpointing": {name: other.peak / GIB for name, other in by_policy.items()},
    }
