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


FILES = {
    "SmolLM2": ("deploy/examples/demo-job.yaml", "deploy/examples/demo-train.yaml"),
    "Llama": ("deploy/examples/llama-3.1-8b.job.yaml", "deploy/examples/llama-3.1-8b.train.yaml"),
    "Qwen3": ("deploy/examples/qwen3-32b.job.yaml", "deploy/examples/qwen3-32b.train.yaml"),
    "gemma": ("deploy/examples/gemma-3-27b.job.yaml", "deploy/examples/gemma-3-27b.train.yaml"),
    "gpt-oss": ("deploy/examples/gpt-oss-20b.job.yaml", "deploy/examples/gpt-oss-20b.train.yaml"),
}
"""By how a model's name begins: the job of a teacher of its family, and a training file."""
CHAT = {"SmolLM2": "smollm2", "Llama": "llama3_1, llama3_2", "Qwen3": "qwen3", "gemma": "gemma3", "gpt-oss": "gptoss"}
"""The family's line in the table of chat templates of docs/TRAINING.md; SmolLM2's is in tests/pipeline/templates."""


def memory(name: str, tokens: int) -> str:
    """Return the peaks on one GPU, keeping each layer's input alone and keeping everything."""
    peaks = plan_of(settings(tokens), student(name), 1, GPUS["H200"])["peak_gib_by_checkpointing"]
    return f"{peaks['full']:.0f} to {peaks['none']:.0f} GiB"


def models() -> str:
    """Return the table of models: family, files, memory of a step on one GPU, chat template."""
    header = ["model", "family", "job and train file", *(f"{tokens:,} tokens" for tokens in LENGTHS), "chat template"]
    lines = [header, ["---", "---", "---", "---:", "---:", "---"]]
    for name, (model_type, _, _) in STUDENTS.items():
        brand = next(brand for brand in FILES if name.startswith(brand))
        files = ", ".join(f"[{kind}](../{path})" for kind, path in zip(("job", "train"), FILES[brand], strict=True))
        lines.append(
            [name, f"`{model_type}`", files, *(memory(name, tokens) for tokens in LENGTHS), f"`{CHAT[brand]}`"]
        )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def families() -> str:
    """Return the table of families: which tests a tiny model of each passes, and whether its layers can be fused."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as FUSED

    from tests.trainer.model.test_families import CUT
    from tests.trainer.model.test_student import ARCHITECTURES

    cut = {model_type for model_type, _, _ in CUT.values()}
    trained = {config.get_text_config().model_type for _, config in ARCHITECTURES.values()} | {"llama"}  # in most tests
    lines = [["family", "cut from a teacher", "trained from packed rows", "fused layers"], ["---"] * 4]
    for family in sorted(cut | trained):
        lines.append([f"`{family}`", *("yes" if family in known else "" for known in (cut, trained, FUSED))])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(fits(), end="")
