"""push: copy one manifest of a cache, with all that it needs, to a data set on the Hugging Face Hub, as one commit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from teachercache.errors import CorruptFile, MissingObject, SpecMismatch, UsageError
from teachercache.format import layout
from teachercache.format.objects import Commit, TokenizerIndex
from teachercache.format.sealed import unseal
from teachercache.format.spec import CacheSpec
from teachercache.read.cache import Cache
from teachercache.store.store import Store
from teachercache.views.card import Configs, data_card

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

CARD = "README.md"
THREADS = 16  # small objects read at the same time
BATCH_BYTES, BATCH_FILES = 2**30, 64  # copied to the local disk at a time, where the cache is not on it


class _File(NamedTuple):
    """A file of any size, as the manifest names it."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Pushed:
    """What `push` did."""

    commit: str  # of the data set; the one that was there where nothing was lacking
    files: int  # of rows and keys, that the commit made visible
    bytes: int  # of them
    objects: int  # small objects of the commit


def push(
    cache: Cache, url: str, *, public: bool = False, progress: Callable[[int, int], None] = lambda done, total: None
) -> Pushed:
    """Make the cache's manifest readable at hf://datasets/ORG/NAME; makes the data set, private unless `public`.

    Data files go first, checked against their digests; then one commit makes manifest, files and card visible together,
    on condition that no other commit came meanwhile. Manifests that were pushed before stay. Repeating it
    completes a push that was ended, and sends only what the Hub lacks.

    Raises StaleParent where one came, SpecMismatch where the data set is the cache of another teacher,
    UsageError where it holds an object of the same name and other content.
    """
    from teachercache.store import hub

    writer = hub.HubWriter(url)
    files, objects = _files(cache), _objects(cache)
    if len(objects) + len(files) > hub.MOST_FILES:
        raise UsageError(
            f"{cache.url} has {len(objects) + len(files):,} objects, and a commit on the Hub takes {hub.MOST_FILES:,}; "
            "merge small files with `teachercache optimize`."
        )
    head = writer.head(private=not public)
    there = Store.open(f"{url.rstrip('/')}@{head.commit}")
    other = [
        path for path, data in objects.items() if path in head.digests and not hub.is_stored(data, head.digests[path])
    ]
    other += [file.path for file in files if head.digests.get(file.path, file.sha256) != file.sha256]
    if other:
        _refuse(there, cache, other)
    lacking = [file for file in files if file.path not in head.digests]
    new = {path: data for path, data in objects.items() if path not in head.digests}
    if not any(number > cache.manifest.number for number in _numbers(head.digests)):
        before = there.read(CARD).decode(errors="replace") if CARD in head.digests else ""
        commits = [unseal(Commit, data, path) for path, data in objects.items() if layout.committed_shard(path)]
        names = {*head.digests, *(entry.path for entry in cache.manifest.files)}
        card = data_card(cache, _configs(cache, names), repo=writer.repo, commits=commits, before=before).encode()
        if CARD not in head.digests or not hub.is_stored(card, head.digests[CARD]):
            new[CARD] = card
    if not lacking and not new:
        return Pushed(head.commit, 0, 0, 0)
    uploaded: list[CommitOperationAdd] = []
    for batch in _batches(lacking):
        with tempfile.TemporaryDirectory(prefix="teachercache-push-") as folder:
            uploaded += writer.upload({f.path: _local_copy(cache.store, f, Path(folder, f.sha256)) for f in batch})
        progress(len(uploaded), len(lacking))
    message = f"Manifest {cache.manifest.number}: {cache.manifest.rows:,} rows of {cache.spec.teacher.name[:100]}"
    commit = writer.commit(head.commit, uploaded, new, message)
    return Pushed(commit, len(lacking), sum(file.size for file in lacking), len(new))


def _objects(cache: Cache) -> dict[str, bytes]:
    """Return the small objects that a reader, a verifier and a later publisher of the manifest need, by path."""
    manifest, store = cache.manifest, cache.store
    paths = [layout.SPEC, layout.manifest_path(manifest.number)]
    paths += [layout.part_path(ref.sha256) for ref in manifest.parts]
    paths += [layout.plan_path(digest) for digest in manifest.plans]
    paths += [layout.commit_path(shard) for shard in sorted(manifest.settled())]
    index = layout.tokenizer_path(cache.spec.tokenizer.digest, layout.INDEX)
    if store.exists(index):
        names = [entry.name for entry in unseal(TokenizerIndex, store.read(index), index).files]
        paths += [index, *(layout.tokenizer_path(cache.spec.tokenizer.digest, name) for name in names)]
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(paths, pool.map(store.read, paths), strict=True))


def _files(cache: Cache) -> list[_File]:
    files = [_File(entry.path, entry.size, entry.sha256) for entry in cache.manifest.files]
    return files + [_File(layout.keys_path(run.name), run.size, run.sha256) for run in cache.manifest.keys]


def _refuse(there: Store, cache: Cache, other: list[str]) -> NoReturn:
    """Raise for what the data set holds under names of ours, and is not ours."""
    if layout.SPEC in other:
        theirs = unseal(CacheSpec, there.read(layout.SPEC), layout.SPEC)
        raise SpecMismatch(there.url, cache.spec.differences(theirs))
    raise UsageError(
        f"{there.url} holds {other[0]} with other content: it has another cache of this teacher; push to another name."
    )


def _numbers(paths: Mapping[str, str]) -> Iterator[int]:
    return (number for path in paths if (number := layout.manifest_number(path)) is not None)


def _configs(cache: Cache, names: set[str]) -> Configs:
    """Return what `load_dataset` reads: one configuration a source, since their meta columns differ; none unless all is open.

    Files of other manifests among `names` would be read by a pattern, so that the files are then listed one by one.
    """
    if any(entry.codec != "open" for entry in cache.manifest.files):
        return {}
    listed = {entry.path for entry in cache.manifest.files}
    configs: dict[str, dict[str, list[str]]] = {}
    for source in cache.sources:
        found = configs["default" if len(cache.sources) == 1 else source] = {}
        for split in sorted({entry.split for entry in cache.files(source=source)}):
            folder = f"data/codec=open/split={split}/source={source}/"
            ours = sorted(path for path in listed if path.startswith(folder))
            alone = all(path in listed for path in names if path.startswith(folder))
            found[split] = [f"{folder}*.parquet"] if alone else ours
    return configs


def _batches(files: list[_File]) -> Iterator[list[_File]]:
    batch: list[_File] = []
    for file in files:
        if batch and (len(batch) == BATCH_FILES or sum(f.size for f in batch) + file.size > BATCH_BYTES):
            yield batch
            batch = []
        batch.append(file)
    if batch:
        yield batch


def _local_copy(store: Store, file: _File, copy: Path) -> Path:
    """Return where the file is on the local disk, checked against the manifest: in the store itself, or at `copy`."""
    if store.head(file.path).size != file.size:
        raise MissingObject(
            f"{store.url}/{file.path} does not have the size of its manifest; run `teachercache verify`."
        )
    if store.is_local:
        path, digest = Path(store.root) / file.path, store.download(file.path, file.size)
    else:
        path = copy
        with path.open("wb") as out:
            digest = store.download(file.path, file.size, out)
    if digest != file.sha256:
        raise CorruptFile(f"{file.path} does not have the sha256 of its manifest; run `teachercache verify`.")
    return path
