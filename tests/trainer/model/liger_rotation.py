"""Run by test_liger.py with TRITON_INTERPRET=1: prints, as JSON, each policy's gradient error under liger's rotation.

liger-kernel's rotary embedding runs in Triton's interpreter on a CPU; its other layers do not.
"""

from __future__ import annotations

import json

import torch
import transformers.models.llama.modeling_llama as llama
from liger_kernel.transformers.rope import liger_rotary_pos_emb

from trainer.model import activation, attention, student
from trainer.model.liger import rotate_copies

THEIRS = llama.apply_rotary_pos_emb


def gradients(policy: str, rotation: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = llama.LlamaForCausalLM(
        llama.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, initializer_range=0.3, attn_implementation=attention.NAME,
        )
    ).train()  # fmt: skip
    llama.apply_rotary_pos_emb = THEIRS if rotation == "transformers" else liger_rotary_pos_emb
    if rotation == "copies":
        rotate_copies(model)
        rotate_copies(model)  # a second model of the same module
    activation.apply_policy(model, student.decoder(model).layers, policy)
    layout = attention.DocumentLayout((16, 8), "documents", torch.device("cpu"))
    position_ids = torch.cat([torch.arange(16), torch.arange(8)])
    hidden = student.hidden_states(model, torch.arange(3, 27), position_ids, layout)
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def error(policy: str, rotation: str) -> float:
    found = gradients(policy, rotation)
    return max(((found[name] - exact).norm() / exact.norm()).item() for name, exact in PLAIN.items())


PLAIN = gradients("none", "transformers")
print(
    json.dumps(
        {
            "in place": error("keep-matmuls", "liger"),
            "copies": {policy: error(policy, "copies") for policy in activation.POLICIES},
        }
    )
)
