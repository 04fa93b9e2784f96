"""Refuse a document that is there twice, and content in two splits, over all files before a manifest is published."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from teachercache.errors import DuplicateDocument, RepeatedContent
from teachercache.format.objects import FileEntry
from teachercache.format.spec import CacheSpec
from teachercache.parquet.block import Block
from teachercache.parquet.datafile import DataFile
from teachercache.store.store import Store

THREADS = 8
Keys = npt.NDArray[np.void]  # 16-byte hashes


class FileKeys(NamedTuple):
    """What tells the records of one file from those of others."""

    windows: Keys  # [records] hash of (split, source, doc_id, window)
    documents: Keys  # [documents] hash of (split, source, doc_id)
    content: Keys  # [records]


def check_unique(
    store: Store,
    files: Sequence[FileEntry],
    spec: CacheSpec,
    *,
    allow_repeated_content: bool = False,
    known: Mapping[str, FileKeys] | None = None,
) -> tuple[int, int]:
    """Return the number of documents, and of records whose content is in another split too.

    A document is a distinct (split, source, doc_id). Raises DuplicateDocument, and RepeatedContent unless allowed. Reads
    the key columns of every file: about 40 bytes a record. `known` saves reading those of some files, by path.
    """
    if not files:
        return 0, 0
    with ThreadPoolExecutor(THREADS) as pool:
        keys = list(pool.map(lambda entry: (known or {}).get(entry.path) or _read_keys(store, entry, spec), files))
    _refuse_duplicates(store, files, [k.windows for k in keys], spec)
    repeated = _count_repeated(files, [k.content for k in keys])
    if repeated and not allow_repeated_content:
        raise RepeatedContent(
            f"{store.url}: {repeated} records hold content that is in another split too, so held-out text would leak into "
            "training; remove it from the corpus, or allow it on purpose (allow_repeated_content)."
        )
    return len(np.unique(np.concatenate([k.documents for k in keys]))), repeated


def _read_keys(store: Store, entry: FileEntry, spec: CacheSpec) -> FileKeys:
    with DataFile(store, entry, spec) as file:
        return keys_of(entry, file.blocks({"doc_id", "window", "content_key"}))


def keys_of(entry: FileEntry, blocks: Iterable[Block]) -> FileKeys:
    """Return the keys of a file, of all its blocks with at least doc_id, window and content_key."""
    windows: list[bytes] = []
    documents: set[bytes] = set()
    content: list[bytes] = []
    prefix = f"{entry.split}\0{entry.source}\0"
    for block in blocks:
        for doc_id, window in zip(block.doc_id, block.window.tolist(), strict=True):
            windows.append(_hash(f"{prefix}{doc_id}\0{window}"))
            documents.add(_hash(prefix + doc_id))
        content += block.content_key
    return FileKeys(*(np.frombuffer(b"".join(keys), dtype="V16") for keys in (windows, documents, content)))


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _refuse_duplicates(store: Store, files: Sequence[FileEntry], windows: Sequence[Keys], spec: CacheSpec) -> None:
    everything = np.concatenate(windows)
    order = np.argsort(everything, kind="stable")
    ordered = everything[order]
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if not twice.size:
        return
    ends = np.cumsum([len(keys) for keys in windows])
    first, second = (files[int(np.searchsorted(ends, order[twice[0] + i], side="right"))] for i in (0, 1))
    shared = set(_names(store, first, spec)) & set(_names(store, second, spec)) if first is not second else set()
    doc_id, window = min(shared) if shared else ("?", 0)
    raise DuplicateDocument(
        f"{store.url}: {twice.size} records are committed twice; first: {doc_id!r} window {window} of split {second.split}"
        f", source {second.source} in {first.path} and {second.path}; nothing was published."
    )


def _names(store: Store, entry: FileEntry, spec: CacheSpec) -> Iterator[tuple[str, int]]:
    with DataFile(store, entry, spec) as file:
        for block in file.blocks({"doc_id", "window"}):
            yield from zip(block.doc_id, block.window.tolist(), strict=True)


def _count_repeated(files: Sequence[FileEntry], content: Sequence[Keys]) -> int:
    splits = {entry.split for entry in files}
    repeated = 0
    for split in splits if len(splits) > 1 else ():
        ours, others = (
            np.concatenate([keys for entry, keys in zip(files, content, strict=True) if (entry.split == split) is same])
            for same in (True, False)
        )
        repeated += int(np.isin(ours, others).sum())
    return repeated
