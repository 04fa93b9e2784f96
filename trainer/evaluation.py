"""The `eval` command: a student against a cache's split, or on a plain text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from teachercache.errors import TeacherCacheError, UsageError
from trainer.checkpoint import resolve_model_folder
from trainer.config import TrainerConfig
from trainer.evaluate import evaluate, heldout_sequences
from trainer.fit import (
    choose_attention,
    choose_device,
    load_teacher,
    open_cache,
)
from trainer.model import student
from trainer.model.attention import DocumentLayout
from trainer.step import autocast


def evaluate_cache(config: TrainerConfig, split: str) -> dict[str, Any]:
    """Evaluate on one split of the configured cache; nothing is written."""
    device, dtype = choose_device(config)
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    folder = resolve_model_folder(config.student)
    cache = open_cache(config, manifest=config.manifest)
    student.check_fits(folder, cache)
    cache.files(split=split)
    model = student.load_student(folder, dtype=dtype, device=device, trust_remote_code=config.trust_remote_code)
    result = evaluate(
        model,
        heldout_sequences(cache, split, config.data.seq_len, config.eval.max_rows, pad=device.type == "cuda"),
        vocab_size=cache.spec.tokenizer.vocab_size,
        attention_kind=choose_attention(config, device),
        teacher=load_teacher(config, device, dtype) if config.teacher else None,
        autocast_to=config.train.autocast,
        chunk_size=config.eval.chunk_size,
    )
    return {"student": str(folder), "cache": cache.url, "manifest": cache.manifest.number, "split": split, **result}


@torch.no_grad()
def evaluate_text(config: TrainerConfig, path: Path) -> dict[str, Any]:
    """Perplexity of a text file, in windows of data.seq_len tokens that start anew."""
    from tokenizers import Tokenizer

    device, dtype = choose_device(config)
    folder = resolve_model_folder(config.student)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path} as UTF-8 text: {error}") from error
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    if len(ids) < 2:
        raise TeacherCacheError(f"{path} has {len(ids)} tokens; expected at least two")
    model = student.load_student(folder, dtype=dtype, device=device, trust_remote_code=config.trust_remote_code).eval()
    nll, count = 0.0, 0
    for start in range(0, len(ids) - 1, config.data.seq_len):
        window = torch.tensor(ids[start : start + config.data.seq_len + 1], device=device)
        inputs, labels = window[:-1], window[1:]
        documents = DocumentLayout((len(inputs),), choose_attention(config, device), device)
        with autocast(config.train.autocast, device):
            hidden = student.hidden_states(model, inputs, torch.arange(len(inputs), device=device), documents)
        for low in range(0, len(inputs), config.eval.chunk_size):
            part = slice(low, low + config.eval.chunk_size)
            logprobs = student.head(model).logits(hidden[part]).log_softmax(dim=1)
            nll -= logprobs.gather(1, labels[part, None]).double().sum().item()
        count += len(inputs)
    return {"student": str(folder), "text": str(path), "tokens": count, "perplexity": math.exp(nll / count)}
