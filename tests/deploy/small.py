"""The smallest real job: a byte-level tokenizer, twelve documents, the no-op teacher. A cache of it takes a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = (
    "The teacher runs once over the text and its most likely next tokens are kept.",
    "A student reads them as often as it likes, from anywhere, without the teacher.",
    "Nothing is lost when a machine goes away, and nothing is counted twice.",
)


def make_tokenizer(folder: Path) -> Path:
    """A model folder that holds a tokenizer and nothing else: all that the no-op teacher needs."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|bos|>", "<|eos|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder


def make_corpus(path: Path, documents: int = 12) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": f"doc-{i}", "text": f"{i}. {TEXT[i % 3]} " * (2 + i % 4)}) for i in range(documents)]
    path.write_text("\n".join(lines) + "\n")
    return path


def job_tree(cache: str, model: Path, corpus: Path, **run: Any) -> dict[str, Any]:
    return {
        "cache": cache,
        "teacher": {"model": str(model), "engine": "noop", "max_model_len": 256},
        "rows": {"entries": 20},
        "corpora": [
            {
                "source": "notes",
                "files": [str(corpus)],
                "fields": {"text": "text", "id": "id"},
                "splits": {"train": 0.7, "heldout": 0.3},
            }
        ],
        "run": {"actors": 1, "shard_bytes": 700, "log_every_s": 1, **run},
    }


def write_job(path: Path, tree: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path
