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
    """The keys of one file's records, in the order of the records."""

    documents: Keys  # [records] hash of (split, source, doc_id)
    window: npt.NDArray[np.int32]  # [records]
    content: Keys  # [records]

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.window)


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
    keys = read_keys(store, files, spec, known)
    documents, repeated = judge(store, files, keys, spec)
    refuse_repeated(store, repeated, allowed=allow_repeated_content)
    return documents, repeated


def read_keys(
    store: Store, files: Sequence[FileEntry], spec: CacheSpec, known: Mapping[str, FileKeys] | None = None
) -> list[FileKeys]:
    """Return the keys of every record of every file; `known` has those of some, by path."""

    def read(entry: FileEntry) -> FileKeys:
        found = (known or {}).get(entry.path)
        if found is not None:
            return found
        with DataFile(store, entry, spec) as file:
            return keys_of(entry, file.blocks({"doc_id", "window", "content_key"}))

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(read, files))


def judge(store: Store, files: Sequence[FileEntry], keys: Sequence[FileKeys], spec: CacheSpec) -> tuple[int, int]:
    """Return the number of documents, and of records whose content is in another split of these files too.

    Raises DuplicateDocument.
    """
    if not files:
        return 0, 0
    _refuse_duplicates(store, files, keys, spec)
    documents = len(np.unique(np.concatenate([k.documents for k in keys])))
    return documents, _count_repeated(files, [k.content for k in keys])


def refuse_repeated(store: Store, repeated: int, *, allowed: bool) -> None:
    """Raise RepeatedContent where records share their content with another split, unless allowed."""
    if repeated and not allowed:
        raise RepeatedContent(
            f"{store.url}: {repeated} records hold content that is in another split too, so held-out text would leak into "
            "training; remove it from the corpus, or allow it on purpose (allow_repeated_content)."
        )


def keys_of(entry: FileEntry, blocks: Iterable[Block]) -> FileKeys:
    """Return the keys of a file, of all its blocks with at least doc_id, window and content_key."""
    documents: list[bytes] = []
    windows: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)]
    content: list[bytes] = []
    prefix = f"{entry.split}\0{entry.source}\0"
    for block in blocks:
        documents += [_hash(prefix + doc_id) for doc_id in block.doc_id]
        windows.append(block.window)
        content += block.content_key
    joined = (np.frombuffer(b"".join(keys), dtype="V16") for keys in (documents, content))
    return FileKeys(next(joined), np.concatenate(windows), next(joined))


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _refuse_duplicates(store: Store, files: Sequence[FileEntry], keys: Sequence[FileKeys], spec: CacheSpec) -> None:
    documents = np.concatenate([k.documents for k in keys]).view([("high", ">u8"), ("low", ">u8")])
    windows = np.concatenate([k.window for k in keys])
    order = np.lexsort((windows, documents["low"], documents["high"]))
    same = documents[order][1:] == documents[order][:-1]
    twice = np.flatnonzero(same & (windows[order][1:] == windows[order][:-1]))
    if not twice.size:
        return
    ends = np.cumsum([len(k) for k in keys])
    first, second = (files[int(np.searchsorted(ends, order[twice[0] + i], side="right"))] for i in (0, 1))
    shared = set(_names(store, first, spec)) & set(_names(store, second, spec)) if first is not second else set()
    doc_id, window = min(shared) if shared else ("?", 0)
    raise DuplicateDocument(
        f"{store.url}: {twice.size} records are committed twice; first: {doc_id!r} window {window} of split {second.split}"
        f", source {second.source} in {first.path} and {second.path}; nothing was published. "
        f"`teachercache optimize {store.url} --without-repeats` keeps the first copy of each."
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
