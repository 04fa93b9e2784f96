"""Read the tokenizer's files that a cache holds (`tokenizer/<digest>/`), checked against their index."""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path

from teachercache.errors import CorruptFile, MissingObject, UsageError
from teachercache.format import layout
from teachercache.format.objects import TokenizerIndex, TokenizerIndexEntry
from teachercache.format.spec import TokenizerSpec, json_digest
from teachercache.store.ledger import read_sealed
from teachercache.store.store import Store


def check_tokenizer(store: Store, spec: TokenizerSpec) -> None:
    """Raise unless every indexed tokenizer file is there with its digest. A cache without tokenizer files is fine."""
    path = layout.tokenizer_path(spec.digest, layout.INDEX)
    if store.exists(path):
        for entry in read_sealed(store, TokenizerIndex, path).files:
            _read_file(store, spec, entry)


def _read_file(store: Store, spec: TokenizerSpec, entry: TokenizerIndexEntry) -> bytes:
    data = store.read(layout.tokenizer_path(spec.digest, entry.name), max_bytes=entry.size)
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise CorruptFile(f"{store.url}: tokenizer file {entry.name} does not have the digest of its index.")
    return data


def download_tokenizer(store: Store, spec: TokenizerSpec) -> Path:
    """Return a local folder with the cache's tokenizer files, checked against their digests; kept for the next call.

    Raises UsageError where the cache holds none.
    """
    try:
        index = read_sealed(store, TokenizerIndex, layout.tokenizer_path(spec.digest, layout.INDEX))
    except MissingObject as error:
        raise UsageError(
            f"{store.url} holds no tokenizer files; give the folder of the teacher's tokenizer instead."
        ) from error
    name = f"{spec.digest[:32]}-{json_digest(index.model_dump(mode='json'))[:16]}"
    base = _kept_folder()
    if (base / name).is_dir():
        return base / name
    if not _writable(base):
        base = Path(_temporary_folder().name)
    folder = base / name
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=base) as temp:
        fresh = Path(temp) / "files"
        fresh.mkdir()
        for entry in index.files:
            (fresh / entry.name).parent.mkdir(exist_ok=True)
            (fresh / entry.name).write_bytes(_read_file(store, spec, entry))
        try:
            fresh.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was faster, which is fine
                raise
    return folder


def _kept_folder() -> Path:
    """Return where this user's programs keep tokenizers; the home of an unknown user is a relative `~`."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "teachercache" / "tokenizers"


def _writable(folder: Path) -> bool:
    if not folder.is_absolute():
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


@cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Return this process's folder for what a home that cannot be written does not keep; removed at its end."""
    return tempfile.TemporaryDirectory(prefix="teachercache-")
