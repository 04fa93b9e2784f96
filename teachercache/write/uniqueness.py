"""Refuse a document that is there twice, and content in two splits, over all files before a manifest is published."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from teachercache.errors import DuplicateDocument, RepeatedContent
from teachercache.format.objects import FileEntry
from teachercache.format.spec import CacheSpec
from teachercache.parquet.datafile import DataFile
from teachercache.store.store import Store

THREADS = 8
Keys = npt.NDArray[np.void]  # 16-byte hashes


@dataclass(frozen=True, slots=True)
class Uniqueness:
    """What a check over all files counted."""

    documents: int  # distinct (split, source, doc_id)
    repeated_content: int  # windows whose content_key is in another split too


@dataclass(frozen=True, slots=True)
class _FileKeys:
    windows: Keys  # [records] hash of (split, source, doc_id, window)
    documents: Keys  # [documents] hash of (split, source, doc_id)
    content: Keys  # [records]


def check_unique(
    store: Store, files: Sequence[FileEntry], spec: CacheSpec, *, allow_repeated_content: bool = False
) -> Uniqueness:
    """Raise DuplicateDocument or RepeatedContent. Reads the key columns of every file: about 40 bytes a record."""
    with ThreadPoolExecutor(THREADS) as pool:
        keys = list(pool.map(lambda entry: _keys_of(store, entry, spec), files))
    _refuse_duplicates(store, files, keys, spec)
    repeated = _count_repeated(files, keys)
    if repeated and not allow_repeated_content:
        raise RepeatedContent(
            f"{store.url}: {repeated} records hold content that is in another split too, so held-out text would leak into "
            "training; remove it from the corpus, or allow it on purpose (allow_repeated_content)."
        )
    documents = np.concatenate([k.documents for k in keys]) if keys else np.empty(0, dtype="V16")
    return Uniqueness(documents=len(np.unique(documents)), repeated_content=repeated)


def _keys_of(store: Store, entry: FileEntry, spec: CacheSpec) -> _FileKeys:
    windows: list[bytes] = []
    documents: set[bytes] = set()
    content: list[bytes] = []
    prefix = f"{entry.split}\0{entry.source}\0"
    with DataFile(store, entry, spec) as file:
        for block in file.blocks({"doc_id", "window", "content_key"}):
            for doc_id, window in zip(block.doc_id, block.window.tolist(), strict=True):
                windows.append(_hash(f"{prefix}{doc_id}\0{window}"))
                documents.add(_hash(prefix + doc_id))
            content += block.content_key
    return _FileKeys(_as_keys(windows), _as_keys(sorted(documents)), _as_keys(content))


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _as_keys(values: Sequence[bytes]) -> Keys:
    return np.frombuffer(b"".join(values), dtype="V16")


def _refuse_duplicates(store: Store, files: Sequence[FileEntry], keys: list[_FileKeys], spec: CacheSpec) -> None:
    if not keys:
        return
    everything = np.concatenate([k.windows for k in keys])
    order = np.argsort(everything, kind="stable")
    ordered = everything[order]
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if not twice.size:
        return
    ends = np.cumsum([len(k.windows) for k in keys])
    first, second = (int(np.searchsorted(ends, order[twice[0] + i], side="right")) for i in (0, 1))
    entry, shared = files[second], set()
    if first != second:
        shared = set(_read_names(store, files[first], spec)) & set(_read_names(store, entry, spec))
    doc_id, window = min(shared) if shared else ("?", 0)
    raise DuplicateDocument(
        f"{store.url}: {twice.size} records are committed twice; first: {doc_id!r} window {window} of split {entry.split}"
        f", source {entry.source} in {files[first].path} and {entry.path}; nothing was published."
    )


def _read_names(store: Store, entry: FileEntry, spec: CacheSpec) -> list[tuple[str, int]]:
    with DataFile(store, entry, spec) as file:
        names: list[tuple[str, int]] = []
        for block in file.blocks({"doc_id", "window"}):
            names += zip(block.doc_id, block.window.tolist(), strict=True)
        return names


def _count_repeated(files: Sequence[FileEntry], keys: list[_FileKeys]) -> int:
    splits = sorted({entry.split for entry in files})
    by_split = {
        split: np.concatenate([k.content for entry, k in zip(files, keys, strict=True) if entry.split == split])
        for split in splits
    }
    repeated = 0
    for split in splits:
        others = [by_split[other] for other in splits if other != split]
        if others:
            repeated += int(np.isin(by_split[split], np.concatenate(others)).sum())
    return repeated
