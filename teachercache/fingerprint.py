"""Digest a teacher's files: weights, configuration, tokenizer, chat template.

They must not move when nothing that matters moves (padding settings, the library version that wrote a file), and must
move with a single byte of anything that matters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from teachercache.errors import UsageError
from teachercache.format.layout import NAMED_TEMPLATES, check_name, check_tokenizer_name
from teachercache.format.spec import TokenizerSpec, json_digest
from teachercache.store.store import sha256_file

WEIGHT_PATTERNS = ("*.safetensors", "*.gguf", "pytorch_model*.bin", "consolidated*.pth")
MODEL_FILES = ("*.json", "*.jinja", "*.model", "*/*.jinja")  # what else is read
SETTINGS = ("config.json", "generation_config.json", "adapter_config.json")
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
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # of an added token, which decide where it is found
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
    there, and settings, tokenizer's files and safetensors that are cut short. Reads no weights.
    """
    used = _used_index(folder)
    patterns = (*WEIGHT_PATTERNS, *MODEL_FILES, *TOKENIZER_FILES)
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
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
        elif path.suffix == ".json" and path.name in (*SETTINGS, *TOKENIZER_FILES):
            _read_json(folder, path.name)


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

    The digest is about the ids that a text gets: of `_canonical` and of the ids of a dozen probe texts. It stays the
    same however the tokenizer was saved. A second per 250,000 tokens. Raises UsageError for files that cannot be read and
    where transformers would add tokens that tokenizer.json lacks, so that its ids would be others.
    """
    path = Path(folder)
    folder, path = (path.parent, path) if path.is_file() else (path, path / "tokenizer.json")
    if not path.is_file():
        raise UsageError(f"{folder} holds no tokenizer.json, which a fast tokenizer needs; check the path.")
    _refuse_pointer(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise UsageError(f"{path} is not a tokenizer that the `tokenizers` library reads: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    table = json.loads(tokenizer.to_str())  # one form of the merges and every default, whatever the file has
    probes = [tokenizer.encode(text).ids for text in PROBES]
    config = _read_json(folder, "tokenizer_config.json", missing_ok=True)
    special_map = _read_json(folder, "special_tokens_map.json", missing_ok=True)
    _check_added(folder, path, table, config, special_map)

    def token_id(name: str) -> int | None:
        content = _content(config.get(name, special_map.get(name)))
        return None if content is None else tokenizer.token_to_id(content)

    return TokenizerSpec(
        digest=json_digest([_canonical(table), probes]),
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        bos_id=token_id("bos_token"),
        eos_id=token_id("eos_token"),
        pad_id=token_id("pad_token"),
        special_ids=tuple(sorted(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)),
        chat_template_digest=_chat_template_digest(folder, config),
    )


def _canonical(table: dict[str, Any]) -> dict[str, Any]:
    """Return what of a tokenizer's table decides ids, defaults left out, each chain of steps as one flat list.

    Left out: padding and truncation, the decoder, and the post-processor, whose ids are in those of the probe texts.
    """
    model = table["model"]
    return {
        "model": {key: value if key in ("vocab", "merges") else _plain(value) for key, value in _stated(model).items()},
        "added_tokens": sorted((_plain(token) for token in table["added_tokens"]), key=lambda token: token["id"]),
        "normalizer": _steps(table["normalizer"]),
        "pre_tokenizer": _steps(table["pre_tokenizer"]),
    }


def _stated(value: dict[str, Any]) -> dict[str, Any]:
    """Leave out null, false, empty and 0.0, the ways to write that nothing is set, and what moves offsets alone."""
    return {
        key: item
        for key, item in value.items()
        if key != "trim_offsets" and (item or (isinstance(item, int) and not isinstance(item, bool)))
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in _stated(value).items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _steps(step: dict[str, Any] | None) -> list[Any]:
    """Return a normaliser or pre-tokeniser as the list of its steps."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [_plain(step)]
    return [inner for key in ("normalizers", "pretokenizers") for part in step.get(key, ()) for inner in _steps(part)]


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _check_added(
    folder: Path, path: Path, table: dict[str, Any], config: dict[str, Any], special_map: dict[str, Any]
) -> None:
    """Raise UsageError, by its name, for a token that transformers would add to tokenizer.json or find elsewhere.

    It takes added_tokens_decoder of tokenizer_config.json or, where there is none, special_tokens_map.json and
    added_tokens.json; in either case the tokens that the configuration names (bos_token, extra_special_tokens, …).
    """
    known = {token["content"]: token for token in table["added_tokens"]}
    stated = config.get("added_tokens_decoder")
    sources = [("tokenizer_config.json", content) for content in _named_tokens(config)]
    if stated is None:
        sources += [("special_tokens_map.json", content) for content in _named_tokens(special_map)]
        sources += [("added_tokens.json", key) for key in _read_json(folder, "added_tokens.json", missing_ok=True)]
    listed = stated.values() if isinstance(stated, dict) else ()
    decoder = [token for token in listed if isinstance(token, dict) and _content(token)]
    sources += [("tokenizer_config.json", token["content"]) for token in decoder]
    for name, content in sources:
        if content not in known:
            raise UsageError(
                f"{folder / name} adds the token {content!r}, which the added tokens of {path.name} lack: transformers would "
                f"read it as one token, others would not. Save the tokenizer again by transformers' save_pretrained, or take "
                f"the token out of {name}."
            )
    for token in decoder:
        ours = known[token["content"]]
        given = {"normalized": not token.get("special", False)} | token
        for flag in _FLAGS if table["normalizer"] else _FLAGS[:-1]:
            if given.get(flag, False) != ours[flag]:
                raise UsageError(
                    f"{folder} has the token {token['content']!r} twice: {flag} is {ours[flag]} in {path.name}, "
                    f"{given.get(flag, False)} in tokenizer_config.json, which transformers takes; make them alike."
                )


def _named_tokens(config: dict[str, Any]) -> Iterator[str]:
    """Yield the tokens that a configuration names, as transformers adds them."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    specific = config.get("model_specific_special_tokens")
    named = [value for key, value in config.items() if key.endswith("_token")]
    for group in (extra, specific, named):
        tokens = group.values() if isinstance(group, dict) else group if isinstance(group, list) else ()
        yield from filter(None, map(_content, tokens))


def _chat_template_digest(folder: Path, config: dict[str, Any]) -> str | None:
    """Return the digest of the template, or of {name: template} where there are others than the default; None without.

    As transformers: templates in files go before those of tokenizer_config.json; chat_template.json comes last.
    """
    found: Any = {
        path.stem: _read_text(path)
        for path in sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))
        if check_tokenizer_name(f"{NAMED_TEMPLATES}/{path.name}", str(folder))
    }
    if (folder / "chat_template.jinja").is_file():
        found["default"] = _read_text(folder / "chat_template.jinja")
    elsewhere = (config, _read_json(folder, "chat_template.json", missing_ok=True))
    found = found or next((c["chat_template"] for c in elsewhere if c.get("chat_template") is not None), None)
    if isinstance(found, list):
        try:
            found = {entry["name"]: entry["template"] for entry in found}
        except (TypeError, KeyError) as error:
            raise UsageError(f"{folder}: chat_template is no list of names and templates.") from error
    if isinstance(found, dict) and set(found) == {"default"}:
        found = found["default"]
    return None if found is None else json_digest(found)


def _read_text(path: Path) -> str:
    _refuse_pointer(path)
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise UsageError(f"{path} is not UTF-8: {error}") from error


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
        raise UsageError(f"{path} is not valid JSON: {error}; {_AGAIN}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} must hold a JSON object, found {type(value).__name__}.")
    return value
