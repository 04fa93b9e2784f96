"""Model work of a training step, counted as the project counts it: 6·P·T + 6·L·Σ n²·d_attn.

P counts every weight that a token is multiplied with (the head included, an untied input embedding not), T tokens,
L layers, n the lengths of the documents (causal attention, forward and backward), d_attn heads times head size.
Recomputation is not counted, so checkpointing lowers the rate, as it should.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from trainer.model import Model, student


def matmul_parameters(model: Model) -> int:
    """Return P of the formula. Experts of which a token uses a few count in proportion."""
    config, head = model.config.get_text_config(), model.get_output_embeddings().weight
    # By identity: a tied head is one of the decoder's; what no text goes through (a vision tower) is in neither.
    weights = {id(p): (name, p) for name, p in student.decoder(model).named_parameters() if p.dim() >= 2}
    weights[id(head)] = ("head", head)
    for module in student.decoder(model).modules():
        if isinstance(module, torch.nn.Embedding) and module.weight is not head:  # looked up: tokens, GPT-2's positions
            weights.pop(id(module.weight), None)
    total = sum(parameter.numel() for _, parameter in weights.values())
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    used = getattr(config, "num_experts_per_tok", None)
    if experts and used:
        inside = sum(parameter.numel() for name, parameter in weights.values() if ".experts." in name)
        total -= int(inside * (1 - used / experts))
    return int(total)


def step_flops(config: Any, parameters: int, document_lengths: Sequence[int]) -> float:
    """Return the FLOP of forward and backward, from transformers' text configuration and matmul_parameters' count."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention: float = 6.0 * config.num_hidden_layers * config.num_attention_heads * head
    return 6.0 * parameters * sum(document_lengths) + attention * sum(float(n) ** 2 for n in document_lengths)


def measured_matmul_rate(device: torch.device, size: int = 8192, repeats: int = 5) -> float:
    """Measure the FLOP/s of this GPU's bf16 matrix product of `size`³: what a step's rate is compared with."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(2):
        a @ b
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        a @ b
    torch.cuda.synchronize(device)
    return repeats * 2.0 * size**3 / (time.perf_counter() - started)
