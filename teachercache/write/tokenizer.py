"""Put the tokenizer's files into the cache, so that a reader needs nothing else. The index is written last."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from teachercache.errors import Exists, SpecMismatch
from teachercache.fingerprint import fingerprint_tokenizer, tokenizer_names
from teachercache.format import layout
from teachercache.format.objects import MAX_TOKENIZER_BYTES, TokenizerIndex, TokenizerIndexEntry
from teachercache.format.sealed import seal
from teachercache.format.spec import TokenizerSpec
from teachercache.store.store import Store


def upload_tokenizer(store: Store, spec: TokenizerSpec, folder: Path) -> None:
    """Put a folder's tokenizer files into the cache, once; SpecMismatch where it is not the spec's tokenizer."""
    found = fingerprint_tokenizer(folder)
    if found != spec:
        ours, theirs = found.model_dump(mode="json"), spec.model_dump(mode="json")
        raise SpecMismatch(store.url, [(f"tokenizer.{k}", ours[k], theirs[k]) for k in ours if ours[k] != theirs[k]])
    if store.exists(layout.tokenizer_path(spec.digest, layout.INDEX)):
        return
    entries = []
    for name in tokenizer_names(folder):
        path, data = layout.tokenizer_path(spec.digest, name), (folder / name).read_bytes()
        try:
            store.create(path, data)
        except Exists:  # another file with the same canonical content
            data = store.read(path, max_bytes=MAX_TOKENIZER_BYTES)
        entries.append(TokenizerIndexEntry(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest()))
    with suppress(Exists):  # another writer's index names files that are just as whole
        store.create(layout.tokenizer_path(spec.digest, layout.INDEX), seal(TokenizerIndex(files=entries)))
