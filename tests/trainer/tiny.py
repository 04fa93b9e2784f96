"""Tiny models, a tokenizer and caches for the trainer's tests: made here, in seconds, without a download."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

import teachercache
from teachercache.format.record import content_key, row_uniforms
from teachercache.format.spec import CacheSpec, Rows, SampledRows, TeacherSpec, TopKRows
from trainer.losses.online import sampled_rows

TEXT = [
    "the cat sat on the mat and looked at the other cat",
    "a student learns from a teacher, row by row and token by token",
    "def add(a, b): return a + b  # a small function",
    "packing puts documents one after the other, and none of them sees another",
]


def make_tokenizer(folder: Path, *, vocab_size: int = 320, text: Sequence[str] = TEXT) -> None:
    """A byte-level BPE tokenizer as transformers and the cache read it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def make_model(folder: Path, *, seed: int = 0, layers: int = 4, **config: Any) -> Path:
    """A random Llama (d = 32, V = 320) with a tokenizer, saved as a Hugging Face folder."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.4,  # wide, so that rows are not flat
        **config,
    }
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def spec_for(folder: Path, *, top_k: int = 16, rows: Rows | None = None) -> CacheSpec:
    return CacheSpec(
        teacher=TeacherSpec(
            name="tiny",
            weights_digest=teachercache.fingerprint_weights(folder),
            config_digest=teachercache.fingerprint_config(folder),
            dtype="float32",
            engine="hf",
            head_dtype="float32",
        ),
        tokenizer=teachercache.fingerprint_tokenizer(folder),
        rows=rows or TopKRows(entries=top_k),
    )


@torch.no_grad()
def teacher_record(model: Any, doc_id: str, ids: np.ndarray, *, top_k: int, split: str) -> teachercache.Record:
    """The record of one document, from plain transformers in float32."""
    logprobs = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].float().log_softmax(dim=1)
    top = logprobs.topk(top_k, dim=1)
    target = torch.full((len(ids),), float("nan"))
    target[:-1] = logprobs[:-1].gather(1, torch.from_numpy(ids[1:, None].astype(np.int64)))[:, 0]
    mask = np.ones(len(ids), dtype=bool)
    mask[-1] = False
    values = top.values.numpy()
    return teachercache.Record(
        doc_id=doc_id,
        split=split,
        input_ids=ids.astype(np.int32),
        row_pos=np.arange(len(ids), dtype=np.int32),
        topk_ids=top.indices.numpy().astype(np.int32),
        topk_logprobs=values,
        tail_logprob=teachercache.tail_from_logprobs(values),
        target_logprob=target.numpy(),
        loss_mask=mask,
    )


@torch.no_grad()
def sampled(record: teachercache.Record, model: Any, spec: CacheSpec) -> teachercache.Record:
    """The record with the rows of a sampled spec, drawn from plain transformers in float32."""
    assert isinstance(spec.rows, SampledRows)
    logits = model(torch.from_numpy(record.input_ids.astype(np.int64))[None]).logits[0].float()
    u = row_uniforms(spec.digest, content_key(spec.digest, record.input_ids, record.row_pos), record.row_pos)
    rows = sampled_rows(logits, spec.rows.entries, spec.rows.exact, torch.from_numpy(u))
    assert rows.exact is not None
    assert rows.entropy is not None
    return replace(
        record,
        topk_ids=rows.topk_ids.numpy().astype(np.int32),
        topk_logprobs=rows.topk_logprobs.numpy(),
        tail_logprob=rows.tail_logprob.numpy(),
        exact=rows.exact.numpy().astype(np.uint16),
        entropy=rows.entropy.numpy(),
    )


def make_cache(
    url: str,
    teacher: Path,
    *,
    documents: int = 40,
    heldout: int = 8,
    top_k: int = 16,
    seed: int = 0,
    length: int = 60,
    rows: SampledRows | None = None,
) -> str:
    """A published cache of random documents of 5 to `length` tokens, in three shards, with a held-out split."""
    model = LlamaForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    spec = spec_for(teacher, top_k=top_k, rows=rows)
    writer = teachercache.create(url, spec, tokenizer_files=teacher, probe=False)
    rng = np.random.default_rng(seed)
    records = []
    for index in range(documents + heldout):
        # Twenty different tokens: what follows one can be learnt from a few thousand rows and holds in the other split.
        ids = 3 + 15 * rng.integers(0, 20, size=int(rng.integers(5, length + 1)))
        split = "train" if index < documents else "heldout"
        record = teacher_record(model, f"doc-{index:04d}", ids, top_k=top_k, split=split)
        records.append(record if rows is None else sampled(record, model, spec))
    for shard in range(3):
        writer.commit(f"shard-{shard}", records[shard::3])
    writer.publish(allow_partial=True)
    return url
