"""A tiny tokenizer, small corpora and job files for the pipeline's tests; the teacher is `noop` unless said."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

import teachercache

ROOT = Path(__file__).resolve().parents[2]
SPECIAL = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
           "<|eot_id|>", "<|eom_id|>", "<start_of_turn>", "<end_of_turn>", "<|start|>", "<|end|>", "<|message|>",
           "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>"]  # fmt: skip


def make_tokenizer(folder: Path, *, bos: bool = False, template: str | None = None) -> Path:
    """A byte-level tokenizer without merges: one token a byte, special tokens of several chat formats."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<eos>",
        "model_max_length": 100_000,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("model") / "bytes")


def write_jsonl(path: Path, documents: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(d) + "\n" for d in documents), encoding="utf-8")
    return path


def documents(count: int, length: int = 120) -> list[dict[str, Any]]:
    """Documents with distinct texts and ids."""
    return [{"id": f"doc{i}", "text": (f"document {i} says {i * i}. " * 40)[: length + i % 17]} for i in range(count)]


@pytest.fixture
def job_file(tmp_path: Path, tokenizer_folder: Path) -> Callable[..., Path]:
    """job_file(cache, files, teacher={...}, rows={...}, corpus={...}, recipe={...}, run={...}) → path of a YAML job file."""

    def make(cache: str | Path, files: list[Path], **parts: dict[str, Any]) -> Path:
        teacher = {"model": str(tokenizer_folder), "engine": "noop", "max_model_len": 512}
        corpus = {"source": "s", "files": [str(f) for f in files], "fields": {"text": "text", "id": "id"}}
        job = {
            "cache": str(cache),
            "teacher": teacher | parts.get("teacher", {}),
            "rows": {"entries": 8} | parts.get("rows", {}),
            "corpora": [corpus | parts.get("corpus", {})],
            "recipe": parts.get("recipe", {}),
            "run": {"executor": "inline", "shard_bytes": 2000, "log_every_s": 5} | parts.get("run", {}),
        }
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(job))
        return path

    return make


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "pipeline", *map(str, arguments)]


def environment() -> dict[str, str]:
    env = dict(os.environ, PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    env.pop("RAY_ADDRESS", None)
    return env


def pipeline(*arguments: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs `python -m pipeline …` as a user would."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=environment(), check=False
    )


def verify(url: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs `teachercache verify`."""
    return subprocess.run(
        [sys.executable, "-c", "from teachercache.cli import main; main()", "verify", str(url)],
        capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment(), check=False,
    )  # fmt: skip


def check_complete(url: str | Path, expected: set[str]) -> None:
    """The cache verifies; each document is there once."""
    result = verify(url)
    assert result.returncode == 0, result.stdout + result.stderr
    counts = collections.Counter(r.doc_id for r in teachercache.open(str(url)).records())
    assert set(counts) == expected
    assert set(counts.values()) == {1}


def poison_id(folder: Path) -> int:
    """Token id of the DEL character."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(make_tokenizer(folder / "tok") / "tokenizer.json"))
    return tokenizer.encode("\x7f", add_special_tokens=False).ids[0]
