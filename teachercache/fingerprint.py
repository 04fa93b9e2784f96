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
from teachercache.format.layout import check_name
from teachercache.format.spec import TokenizerSpec, json_digest
from teachercache.store.store import sha256_file

WEIGHT_PATTERNS = ("*.safetensors", "*.gguf", "pytorch_model*.bin", "consolidated*.pth")
MODEL_FILES = ("*.json", "*.jinja", "*.model", "*/*.jinja")  # what else is read
MAX_HEADER = 100_000_000  # bytes; safetensors' own limit
_POINTER = b"version https://git-lfs.github.com/spec/"
_AGAIN = "a download that was interrupted leaves such a folder: download it again."
# Written by whoever saved the folder; no effect on a log-probability. dtype has its field in the spec.
VOLATILE_CONFIG = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "_commit_hash", "use_cache")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
NAMED_TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja, next to the default template
# Texts on which tokenizers with equal tables still part: blanks, digits, case, accents, scripts, emoji, controls.
PROBES = (
    "Hello world", " leading and  double  blanks ", "12345678 3.14159", "déjà vu cafe\u0301", "naïve ＡＢＣ ﬁ",
    "def f(x):\n\treturn x\r\n", "你好，世界。こんにちは", "🙂👩‍👩‍👧", "\u200b\ufeff\x00\x07", "don't I'LL we've",
    "مرحبا שלום", "a" * 50,
)  # fmt: skip


def tokenizer_names(folder: Path) -> list[str]:
    """Return the names of the tokenizer's files in a folder, named templates and tables of other kinds included."""
    named = sorted(path.relative_to(folder).as_posix() for path in (folder / NAMED_TEMPLATES).glob("*.jinja"))
    known = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return [*known, *sorted(path.name for path in folder.glob("*.tiktoken")), *named]


def check_model_files(folder: Path) -> None:
    """Raise UsageError, by its name, for a file of a model's folder that is not whole.

    Found are pointers of Git LFS in place of files, shards that an index or a shard's own number names and that are not
    there, and safetensors that are cut short. Reads the first bytes of each file, no weights.
    """
    used = _used_index(folder)
    for path in sorted({path for pattern in (*WEIGHT_PATTERNS, *MODEL_FILES) for path in folder.glob(pattern)}):
        if path.is_dir():
            continue
        _refuse_pointer(path)
        if path.name == used:
            named = _read_json(folder, path.name).get("weight_map")
            shards = sorted(set(named.values())) if isinstance(named, dict) else []
            for shard in shards:
                check_name(str(shard), f"{path}: a shard")
                if not (folder / shard).is_file():
                    raise UsageError(f"{folder} lacks {shard}, which {path.name} names; {_AGAIN}")
        elif shard := re.fullmatch(r"(.*?)(\d{5})-of-(\d{5})(\..*)", path.name):
            for number in range(1, int(shard[3]) + 1):
                name = f"{shard[1]}{number:05}-of-{shard[3]}{shard[4]}"
                if not (folder / name).is_file():
                    raise UsageError(f"{folder} lacks {name}, the {number}. of {int(shard[3])} shards; {_AGAIN}")
        if path.suffix == ".safetensors":
            _check_safetensors(path)


def _used_index(folder: Path) -> str | None:
    """Return the index that a loader reads: none where all weights are in one file, safetensors before others."""
    for kind in ("model.safetensors", "pytorch_model.bin"):
        if (folder / kind).exists():
            return None
        if (folder / f"{kind}.index.json").is_file():
            return f"{kind}.index.json"
    return None


def _refuse_pointer(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise UsageError(f"{path} is a pointer of Git LFS, not the file; run `git lfs pull` in its folder.")


def _check_safetensors(path: Path) -> None:
    """Raise UsageError unless the header can be read and the file is as long as it says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > size or length > MAX_HEADER:
            raise UsageError(f"{path} is cut short or no safetensors file; {_AGAIN}")
        try:
            header = json.loads(file.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UsageError(f"{path} is no safetensors file: its header cannot be read; {_AGAIN}") from error
    if 8 + length + end != size:
        raise UsageError(f"{path} is cut short: expected {8 + length + end:,} bytes, found {size:,}; {_AGAIN}")


def fingerprint_weights(folder: Path | str) -> str:
    """Return the sha256 over (name, sha256) of every weight file.

    A link into a Hugging Face cache, whose blobs are named by their sha256, is not read; any other file is read once
    (about 1.5 GB/s). Raises UsageError where there are no weights.
    """
    folder = Path(folder)
    if folder.is_dir():
        check_model_files(folder)
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
    _refuse_pointer(path)
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
    _refuse_pointer(path)
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} must hold a JSON object, found {type(value).__name__}.")
    return value
