"""The tokenizer's own files, kept in the cache: `tokenizer/<digest>/`, with an index that is written last."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import Field

from teachercache.errors import (
    CorruptFile,
    MissingObject,
    SpecMismatch,
    UnsafeManifest,
    UsageError,
)
from teachercache.fingerprint import TOKENIZER_FILES, fingerprint_tokenizer
from teachercache.format import layout
from teachercache.format.sealed import read_sealed, seal
from teachercache.format.spec import Strict, TokenizerSpec
from teachercache.store.store import Exists, Store

INDEX = "index.json"
MAX_TOKENIZER_BYTES = 2**28
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


class _IndexEntry(Strict):
    name: str
    size: int = Field(ge=0, le=MAX_TOKENIZER_BYTES)
    sha256: str


class TokenizerIndex(Strict):
    """`tokenizer/<digest>/index.json`."""

    format_version: Literal[1] = 1
    files: list[_IndexEntry]


def upload_tokenizer(store: Store, spec: TokenizerSpec, folder: Path) -> None:
    """Put the folder's tokenizer files into the cache, once. Refuses a folder that is not the spec's tokenizer."""
    found = fingerprint_tokenizer(folder)
    if found != spec:
        ours, theirs = found.model_dump(mode="json"), spec.model_dump(mode="json")
        raise SpecMismatch(store.url, [(f"tokenizer.{k}", ours[k], theirs[k]) for k in ours if ours[k] != theirs[k]])
    if store.exists(layout.tokenizer_path(spec.digest, INDEX)):
        return
    entries = []
    for name in TOKENIZER_FILES:
        if not (folder / name).is_file():
            continue
        path, data = layout.tokenizer_path(spec.digest, name), (folder / name).read_bytes()
        try:
            store.create(path, data)
        except Exists:  # another file with the same canonical content
            data = store.read(path, max_bytes=MAX_TOKENIZER_BYTES)
        entries.append(_IndexEntry(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest()))
    with suppress(Exists):  # another writer's index names files that are just as whole
        store.create(layout.tokenizer_path(spec.digest, INDEX), seal(TokenizerIndex(files=entries)))


def check_tokenizer(store: Store, spec: TokenizerSpec) -> None:
    """Raise unless every indexed tokenizer file is there with its digest. A cache without tokenizer files is fine."""
    path = layout.tokenizer_path(spec.digest, INDEX)
    if store.exists(path):
        for entry in read_sealed(store, TokenizerIndex, path).files:
            _read_file(store, spec, entry)


def _read_file(store: Store, spec: TokenizerSpec, entry: _IndexEntry) -> bytes:
    if _FILE_NAME.fullmatch(entry.name) is None:
        raise UnsafeManifest(
            f"{store.url}: the tokenizer index names {entry.name[:80]!r}, which is not a plain file name."
        )
    data = store.read(layout.tokenizer_path(spec.digest, entry.name), max_bytes=entry.size)
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise CorruptFile(f"{store.url}: tokenizer file {entry.name} does not have the digest of its index.")
    return data


def download_tokenizer(store: Store, spec: TokenizerSpec) -> Path:
    """A local folder with the cache's tokenizer files, checked against their digests; kept for the next call."""
    try:
        index = read_sealed(store, TokenizerIndex, layout.tokenizer_path(spec.digest, INDEX))
    except MissingObject as error:
        raise UsageError(
            f"{store.url} holds no tokenizer files; give the folder of the teacher's tokenizer instead."
        ) from error
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "teachercache" / "tokenizers"
    key = hashlib.sha256(json.dumps(index.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:16]
    folder = base / f"{spec.digest[:32]}-{key}"
    if folder.is_dir():
        return folder
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base) as temp:
        fresh = Path(temp) / "files"
        fresh.mkdir()
        for entry in index.files:
            (fresh / entry.name).write_bytes(_read_file(store, spec, entry))
        try:
            fresh.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was faster, which is fine
                raise
    return folder
