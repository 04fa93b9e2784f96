"""What known models need of a GPU when they are trained: the tables of docs/OPERATIONS.md and docs/MODELS.md.

    python scripts/students.py        print the table of docs/OPERATIONS.md

The sizes are those of each model's public config.json; `python -m trainer plan` computes everything else.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trainer.config import TrainerConfig
from trainer.limits import POLICIES
from trainer.memory import on_meta, plan_of

SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
)
STUDENTS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "SmolLM2-135M": ("llama", (576, 1536, 30, 9, 3, 64, 49_152), {"tie_word_embeddings": True}),
    "gemma-3-270m": ("gemma3_text", (640, 2048, 18, 4, 1, 256, 262_144), {}),
    "Qwen3-0.6B": ("qwen3", (1024, 3072, 28, 16, 8, 128, 151_936), {"tie_word_embeddings": True}),
    "gemma-3-1b": ("gemma3_text", (1152, 6912, 26, 4, 1, 256, 262_144), {}),
    "Llama-3.2-1B": ("llama", (2048, 8192, 16, 32, 8, 64, 128_256), {"tie_word_embeddings": True}),
    "Llama-3.2-3B": ("llama", (3072, 8192, 28, 24, 8, 128, 128_256), {"tie_word_embeddings": True}),
    "Qwen3-4B": ("qwen3", (2560, 9728, 36, 32, 8, 128, 151_936), {"tie_word_embeddings": True}),
    "Llama-3.1-8B": ("llama", (4096, 14_336, 32, 32, 8, 128, 128_256), {}),
    "Qwen3-14B": ("qwen3", (5120, 17_408, 40, 40, 8, 128, 151_936), {}),
    "gpt-oss-20b": ("gpt_oss", (2880, 2880, 24, 64, 8, 64, 201_088), {"num_local_experts": 32}),
    "Qwen3-32B": ("qwen3", (5120, 25_600, 64, 64, 8, 128, 151_936), {}),
}
GPUS = {"80 GB": 79.1, "H200": 139.7}
"""GiB that torch counts."""
LENGTHS = (8192, 32_768)


@cache
def student(name: str) -> Any:
    """Return a model without values, in bf16."""
    model_type, sizes, rest = STUDENTS[name]
    return on_meta(CONFIG_MAPPING[model_type](**dict(zip(SIZES, sizes, strict=True)), **rest), settings(8192))


def settings(tokens: int, **optim: Any) -> TrainerConfig:
    """Return the defaults of a run at a length."""
    return TrainerConfig.model_validate({"cache": "any", "student": "any", "data": {"seq_len": tokens}, "optim": optim})


def fewest(name: str, tokens: int, gib: float) -> str:
    """Return the fewest GPUs, of 1, 2, 4 and 8, that hold a step with float32 moments, and how."""
    for gpus in (1, 2, 4, 8):
        found = plan_of(settings(tokens), student(name), gpus, gib)
        if found["fits"]:
            return f"{gpus}: `{found['checkpointing']}`, {found['peak_gib']:.0f} GiB"
    return "more than 8"


def fits() -> str:
    """Return the table of the fewest GPUs for each student, kind of GPU and length."""
    columns = [(kind, tokens) for kind in GPUS for tokens in LENGTHS]
    header = ["student", "parameters", *(f"{kind}, {tokens:,} tokens" for kind, tokens in columns)]
    lines = [header, ["---", "---:", *["---"] * len(columns)]]
    for name in STUDENTS:
        parameters = sum(parameter.numel() for parameter in student(name).parameters())
        cells = [fewest(name, tokens, GPUS[kind]) for kind, tokens in columns]
        lines.append([name, f"{parameters / 1e9:.2f} B", *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def memory(name: str, tokens: int) -> str:
    """Return the least and the most memory that a step takes on one GPU, by checkpointing policy."""
    peaks = plan_of(settings(tokens), student(name), 1, 1e6)["peak_gib_by_checkpointing"]
    return f"{peaks['full']:.0f} to {peaks[POLICIES[0]]:.0f} GiB"


if __name__ == "__main__":
    print(fits(), end="")
