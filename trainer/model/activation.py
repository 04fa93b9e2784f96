"""Activation checkpointing: what the backward pass keeps and what it computes again.

  none            keep everything
  full            keep each layer's input, recompute the layer
  offload         the same, with the inputs in pinned CPU memory while they wait
  keep-attention  keep each layer's input and the outputs of its attention: long attention is not computed twice
  keep-matmuls    keep matrix products as well: only norms, activations and rotations are recomputed

On an H200, 3.2 B Llama shape, 32,768 tokens, whole steps: full 421 TFLOP/s at 50 GiB, keep-attention 474 at 55,
keep-matmuls 517 at 101, none 521 at 120 (benchmarks/step_h200.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer.model import Model

POLICIES = ("none", "full", "offload", "keep-attention", "keep-matmuls")

_aten = torch.ops.aten
ATTENTION_OPS = frozenset(
    {
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._flash_attention_forward.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.higher_order.flex_attention,
    }
)
MATMUL_OPS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.linear.default})


def apply_policy(model: Model, layers: Any, policy: str) -> None:
    """Wrap each layer; call again to change the policy. Raises ValueError for an unknown one and for other layers."""
    if policy not in POLICIES:
        raise ValueError(f"checkpointing policy {policy!r} is not one of {', '.join(POLICIES)}")
    for layer in layers:
        if not hasattr(layer, "gradient_checkpointing"):
            raise ValueError(f"{type(layer).__name__} cannot be checkpointed: it is no GradientCheckpointingLayer")
        layer.gradient_checkpointing = policy != "none"
        layer._gradient_checkpointing_func = _runner(policy, _draws(layers))


def _draws(layers: Any) -> bool:
    # An adapter's dropout: a recomputation must draw the same random numbers.
    return any(isinstance(part, torch.nn.Dropout) and part.p > 0 for layer in layers for part in layer.modules())


def _runner(policy: str, draws: bool) -> Callable[..., Any]:
    if policy == "offload":
        return partial(_offloaded, draws)
    kept = {"keep-attention": ATTENTION_OPS, "keep-matmuls": ATTENTION_OPS | MATMUL_OPS}.get(policy)
    options: dict[str, Any] = (
        {"context_fn": partial(create_selective_checkpoint_contexts, partial(_decide, kept))} if kept else {}
    )
    return partial(checkpoint, use_reentrant=False, preserve_rng_state=draws, **options)


def _offloaded(draws: bool, function: Callable[..., Any], hidden: torch.Tensor, *rest: Any) -> Any:
    pin = hidden.is_cuda
    # After a frozen embedding: a layer whose input needs no gradient would get none for its weights either.
    if not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()
    # Reentrant, so that only the layer's input is saved here: what the layer saves inside lives no longer than its
    # recomputation.
    with torch.autograd.graph.save_on_cpu(pin_memory=pin):
        return checkpoint(function, hidden, *rest, use_reentrant=True, preserve_rng_state=draws)


def _decide(kept: frozenset[Any], _context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


def tile_mlps(layers: Any, tile: int) -> None:
    """Run each layer's MLP over `tile` tokens at a time: its inner activations exist for one tile only.

    Costs one more forward pass of the MLP, which at the lengths that need it is small next to attention.
    """
    for layer in layers:
        mlp = layer.mlp
        if not hasattr(mlp, "untiled_forward"):
            mlp.untiled_forward = mlp.forward
        mlp.forward = partial(_tiled, mlp.untiled_forward, tile, _draws([mlp]))


def _tiled(forward: Callable[[torch.Tensor], Any], tile: int, draws: bool, hidden: torch.Tensor) -> Any:
    if hidden.shape[1] <= tile:
        return forward(hidden)
    run = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=draws)
    parts = [run(part) for part in hidden.split(tile, dim=1)]
    if isinstance(parts[0], tuple):  # gpt-oss returns its router's scores [tokens, experts] as well
        return tuple(torch.cat(pieces, dim=-2) for pieces in zip(*parts, strict=True))
    return torch.cat(parts, dim=1)


def layer_bytes(
    config: Any, policy: str, element_size: int = 2, *, fused: bool = False, normed: int = 0
) -> tuple[float, float]:
    """Return the bytes a token that one layer keeps until its backward pass: (all but the MLP's inside, that).

    config  a transformers text configuration
    fused   norms and gated MLPs are liger-kernel's, which keep fewer tensors than plain ones
    normed  elements that go through further norms: of queries and keys, or of what a block returns

    Counts tensors, not allocator overhead; exact for a Llama layer.
    """
    d, inner = config.hidden_size, getattr(config, "intermediate_size", 4 * config.hidden_size)
    head = getattr(config, "head_dim", None) or d // config.num_attention_heads
    q, kv = config.num_attention_heads * head, 2 * getattr(config, "num_key_value_heads", 1) * head
    statistics = config.num_attention_heads * 4 / element_size  # a float32 of each head's softmax
    norms = 4 * d + normed
    if not fused:
        norms += 2 * d * 4 / element_size + normed * 4 / element_size  # a float32 copy of the input
    mlp, mlp_products = (3 if fused else 4) * inner, 2 * inner
    if used := getattr(config, "num_experts_per_tok", None):  # each of them holds copies of a token, in and out
        inner = getattr(config, "moe_intermediate_size", None) or inner
        mlp, mlp_products = used * (3 * d + 6 * inner), used * (2 * d + 2 * inner)
    outside, inside = {
        "offload": (0, 0),
        "full": (d, 0),
        "keep-attention": (d + q + statistics, 0),
        "keep-matmuls": (3 * d + 2 * q + kv + statistics, mlp_products),
        "none": (norms + 2 * q + kv + statistics, mlp),
    }[policy]
    return outside * element_size, inside * element_size


def bytes_per_token(config: Any, policy: str, element_size: int = 2) -> int:
    """Estimate the bytes that plain layers keep per token until the backward pass, summed over layers."""
    return int(config.num_hidden_layers * sum(layer_bytes(config, policy, element_size)))


def choose_policy(config: Any, tokens: int, free_bytes: int, element_size: int = 2) -> str:
    """Return the policy that recomputes least and fits in `free_bytes`, what weights, gradients and optimiser leave.

    Keeps a fifth free for the loss, one layer's working memory and the allocator.
    """
    for policy in ("none", "keep-matmuls", "keep-attention", "full"):
        if bytes_per_token(config, policy, element_size) * tokens < 0.8 * free_bytes:
            return policy
    return "offload"
