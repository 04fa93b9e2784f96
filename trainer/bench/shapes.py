"""The shapes that benches know by name, and the losses they compare. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple


class HeadShape(NamedTuple):
    """A student's LM head: hidden size and vocabulary."""

    hidden_size: int
    vocab_size: int


HEADS = {
    "llama-3.2-3b": HeadShape(3072, 128_256),
    "llama-3.1-8b": HeadShape(4096, 128_256),
    "gpt-oss": HeadShape(2880, 201_088),
    "qwen3-4b": HeadShape(2560, 151_936),
    "gemma-3-1b": HeadShape(1152, 262_144),
    "smollm2-135m": HeadShape(576, 49_152),
}
LENGTHS = (4_096, 8_192, 16_384, 32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576)
OUR_METHODS = ("fused", "fused_recompute", "forward_chunked", "dense")
METHODS = (*OUR_METHODS, "closed_form", "closed_form_lean", "liger_hard_label", "cce_hard_label", "torch_hard_label")
NEEDS_GPU = ("liger_hard_label", "cce_hard_label")
"""Peers whose kernels run nowhere else."""

_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)
SHAPES = {
    name: dict(zip(_SIZES, sizes, strict=True))
    for name, sizes in {
        "llama-3.2b": (3072, 8192, 28, 24, 8, 128_256),
        "llama-1.2b": (2048, 8192, 16, 32, 8, 128_256),
        "smollm2-135m": (576, 1536, 30, 9, 3, 49_152),
        "tiny": (64, 128, 2, 4, 2, 1_000),
    }.items()
}
