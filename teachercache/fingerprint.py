"""Digest a teacher's files: weights, configuration, tokenizer, chat template.

They must not move when nothing that matters moves (padding settings, the library version that wrote a file), and must
move with a single byte of anything that matters.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from teachercache.errors import UsageError
from teachercache.format.spec import TokenizerSpec, json_digest
from teachercache.store.store import sha256_file

WEIGHT_PATTERNS = ("*.safetensors", "*.gguf", "pytorch_model*.bin", "consolidated*.pth")
# Written by whoever saved the folder; no effect on a log-probability. dtype has its field in the spec.
VOLATILE_CONFIG = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "_commit_hash", "use_cache")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
# Texts on which tokenizers with equal tables still part: blanks, digits, case, accents, scripts, emoji, controls.
PROBES = (
    "Hello world", " leading and  double  blanks ", "12345678 3.14159", "déjà vu cafe\u0301", "naïve ＡＢＣ ﬁ",
    "def f(x):\n\treturn x\r\n", "你好，世界。こんにちは", "🙂👩‍👩‍👧", "\u200b\ufeff\x00\x07", "don't I'LL we've",
    "مرحبا שלום", "a" * 50,
)  # fmt: skip


def fingerprint_weights(folder: Path | str) -> str:
    """Return the sha256 over (name, sha256) of every weight file.

    A link into a Hugging Face cache, whose blobs are named by their sha256, is not read; any other file is read once
    (about 1.5 GB/s). Raises UsageError where there are no weights.
    """
    folder = Path(folder)
    files = [folder] if folder.is_file() else sorted({p for pattern in WEIGHT_PATTERNS for p in folder.glob(pattern)})
    if not files:
        raise UsageError(
            f"{folder} holds no weights: expected one of {', '.join(WEIGHT_PATTERNS)}; check the teacher's path."
        )
    return json_digest([[path.name, _file_digest(path)] for path in files])


def _file_digest(path: Path) -> str:
    target = path.resolve().name
    return target if path.is_symlink() and re.fullmatch(r"[0-9a-f]{64}", target) else sha256_file(path)


def fingerprint_config(folder: Path | str) -> str:
    """Return the sha256 of config.json without the fields that say who saved it."""
    config = _read_json(Path(folder), "config.json")
    return json_digest({key: value for key, value in config.items() if key not in VOLATILE_CONFIG})


def fingerprint_tokenizer(folder: Path | str) -> TokenizerSpec:
    """Return the TokenizerSpec of a folder with tokenizer.json (or of that file).

    The digest covers tokenizer.json in canonical form, padding and truncation left out, and the ids of a dozen probe
    texts, so that two files that say the same in another order have one digest.
    """
    path = Path(folder)
    folder, path = (path.parent, path) if path.is_file() else (path, path / "tokenizer.json")
    if not path.is_file():
        raise UsageError(f"{folder} holds no tokenizer.json, which a fast tokenizer needs; check the path.")
    try:
        table = json.loads(path.read_bytes())
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise UsageError(f"{path} is not a tokenizer that the `tokenizers` library reads: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    canonical = {key: value for key, value in table.items() if key not in ("padding", "truncation")}
    probes = [tokenizer.encode(text).ids for text in PROBES]

    config = _read_json(folder, "tokenizer_config.json", missing_ok=True)
    special_map = _read_json(folder, "special_tokens_map.json", missing_ok=True)

    def token_id(name: str) -> int | None:
        token = config.get(name, special_map.get(name))
        content = token.get("content") if isinstance(token, dict) else token
        return None if content is None else tokenizer.token_to_id(content)

    return TokenizerSpec(
        digest=json_digest([canonical, probes]),
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        bos_id=token_id("bos_token"),
        eos_id=token_id("eos_token"),
        pad_id=token_id("pad_token"),
        special_ids=tuple(sorted(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)),
        chat_template_digest=_chat_template_digest(folder, config),
    )


def _chat_template_digest(folder: Path, config: dict[str, Any]) -> str | None:
    template: Any = config.get("chat_template")
    if (folder / "chat_template.jinja").is_file():  # newer transformers write a file, and prefer it
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    elif (folder / "chat_template.json").is_file():
        template = _read_json(folder, "chat_template.json").get("chat_template")
    return None if template is None else json_digest(template)


def _read_json(folder: Path, name: str, *, missing_ok: bool = False) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        if missing_ok:
            return {}
        raise UsageError(f"{folder} holds no {name}; expected a Hugging Face model folder, check the path.")
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} must hold a JSON object, found {type(value).__name__}.")
    return value
