"""verify: read everything that a cache claims, and list what is not so."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from teachercache.errors import CorruptFile, InvalidRecord, MissingObject, StoreDenied, TeacherCacheError
from teachercache.format import layout
from teachercache.format.objects import COUNTS, Commit, Manifest, ManifestFile, Plan
from teachercache.format.record import Record, check_record, content_key
from teachercache.format.spec import CacheSpec
from teachercache.parquet.datafile import DataFile
from teachercache.read.tokenizer import check_tokenizer
from teachercache.store.ledger import Ledger, read_sealed
from teachercache.store.liveness import live_commits, resolve_replacements
from teachercache.store.store import Store
from teachercache.write.uniqueness import check_unique

PROBLEMS_PER_FILE = 20
THREADS = 16  # small objects read at the same time


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and the code of the error that it would raise."""

    path: str
    code: str
    message: str


@dataclass(slots=True)
class Verification:
    """What was looked at, and what was wrong with it."""

    manifest: int | None = None
    files: int = 0
    files_read: int = 0
    bytes_read: int = 0
    records: int = 0
    rows: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return whether nothing was wrong."""
        return not self.problems

    def add(self, path: str, error: TeacherCacheError) -> None:
        """Note one problem of the object at `path`."""
        self.problems.append(Problem(path, error.code, str(error)))

    @contextlib.contextmanager
    def collecting(self, path: str) -> Iterator[None]:
        """Turn an error about `path` into a problem, and go on; refused credentials say nothing about a cache."""
        try:
            yield
        except StoreDenied:
            raise
        except TeacherCacheError as error:
            self.add(path, error)


def verify(
    store: Store,
    spec: CacheSpec,
    manifest: Manifest | None = None,
    *,
    sample: float = 1.0,
    threads: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Check a manifest (default: the newest), the commits, and every file of both.

    Every object's seal; that commits and manifest agree; of each file its presence, size, sha256, footer, counts and
    every invariant of every row; content keys; that no document is there twice. `sample` < 1 reads that share of the
    files, and of the others checks presence and size. Reads each file once, through `threads` local temporary copies.
    """
    found = Verification()
    with found.collecting(layout.MANIFESTS):
        manifest = manifest or Ledger(store, spec).newest_manifest()
    commits = _check_commits(store, spec, found)
    found.manifest = manifest.number if manifest else None
    files = _files_to_check(manifest, commits, found)
    if manifest:
        _check_plans(store, manifest, found)
    with found.collecting(layout.TOKENIZER):
        check_tokenizer(store, spec.tokenizer)
    found.files = len(files)
    chosen = set(random.Random(0).sample(range(len(files)), max(1, round(sample * len(files))))) if files else set()

    with ThreadPoolExecutor(threads) as pool:
        parts = pool.map(lambda i: _check_file(store, spec, files[i], whole=i in chosen), range(len(files)))
        for done, part in enumerate(parts, 1):
            found.files_read += part.files_read
            found.bytes_read += part.bytes_read
            found.records += part.records
            found.rows += part.rows
            found.problems += part.problems
            if progress:
                progress(done, len(files))
    broken = {p.path for p in found.problems}
    with found.collecting(layout.DATA):
        allowed = bool(manifest and manifest.repeated_content)
        check_unique(store, [f for f in files if f.path not in broken], spec, allow_repeated_content=allowed)
    return found


def _check_commits(store: Store, spec: CacheSpec, found: Verification) -> list[Commit]:
    commits = []
    paths = [o.path for o in store.list(layout.COMMITS) if o.path.endswith(".json")]
    with ThreadPoolExecutor(THREADS) as pool:
        checks = [pool.submit(_checked_commit, store, spec, path) for path in paths]
        for path, check in zip(paths, checks, strict=True):
            with found.collecting(path):
                commits.append(check.result())
    return commits


def _checked_commit(store: Store, spec: CacheSpec, path: str) -> Commit:
    commit = read_sealed(store, Commit, path)
    if layout.commit_path(commit.shard_id) != path:
        raise MissingObject(f"{path} is the commit of shard {commit.shard_id}: objects were moved.")
    commit.check(spec.digest)
    for name in COUNTS:
        total = sum(getattr(entry, name) for entry in commit.files)
        if getattr(commit, name) != total:
            raise InvalidRecord("count", f"{path} counts {getattr(commit, name):,} {name}, its files {total:,}.")
    return commit


def _files_to_check(manifest: Manifest | None, commits: Sequence[Commit], found: Verification) -> list[ManifestFile]:
    """Return the files of the manifest and of commits that are not published yet."""
    named = {entry.path: ManifestFile(**entry.model_dump(), shard_id=c.shard_id) for c in commits for entry in c.files}
    files = list(manifest.files) if manifest else []
    for entry in files:
        if named.get(entry.path) != entry:
            what = "no commit names it" if entry.path not in named else "its commit describes it differently"
            found.add(entry.path, MissingObject(f"{entry.path} is in manifest but {what}."))
    published = {entry.path for entry in files}
    live = live_commits(commits, resolve_replacements(commits, manifest.replaced if manifest else {}))
    files += [named[entry.path] for c in live for entry in c.files if entry.path not in published]
    return files


def _check_plans(store: Store, manifest: Manifest, found: Verification) -> None:
    for digest in manifest.plans:
        path = layout.plan_path(digest)
        with found.collecting(path):
            if read_sealed(store, Plan, path).digest != digest:
                raise MissingObject(f"{path} does not have the digest of its name.")


def _check_file(store: Store, spec: CacheSpec, entry: ManifestFile, *, whole: bool) -> Verification:
    found = Verification()
    with found.collecting(entry.path):
        size = store.head(entry.path).size
        if size != entry.size:
            raise MissingObject(f"{entry.path} has {size:,} bytes, its entry says {entry.size:,}.")
        if whole:
            with tempfile.TemporaryDirectory(prefix="teachercache-verify-") as folder:
                _check_contents(store, spec, entry, Path(folder) / "copy.parquet", found)
    return found


def _check_contents(store: Store, spec: CacheSpec, entry: ManifestFile, copy: Path, found: Verification) -> None:
    with copy.open("wb") as out:
        digest = store.download(entry.path, entry.size, out)
    found.files_read, found.bytes_read = 1, entry.size
    if digest != entry.sha256:
        found.add(entry.path, CorruptFile(f"{entry.path} has sha256 {digest[:12]}, expected {entry.sha256[:12]}."))
    tokens, documents = 0, set()
    with DataFile(store, entry, spec, local=pa.memory_map(str(copy))) as file:
        for record in file.records(check=False):
            found.records += 1
            found.rows += len(record.row_pos)
            tokens += len(record.input_ids)
            documents.add(record.doc_id)
            if len(found.problems) < PROBLEMS_PER_FILE:
                with found.collecting(entry.path):
                    _check_row_invariants(record, spec)
    counted = {"records": found.records, "rows": found.rows, "tokens": tokens, "documents": len(documents)}
    for name, value in counted.items():
        if getattr(entry, name) != value:
            said = f"{entry.path} holds {value:,} {name}, its entry says {getattr(entry, name):,}."
            found.add(entry.path, CorruptFile(said))


def _check_row_invariants(record: Record, spec: CacheSpec) -> None:
    check_record(record, vocab_size=spec.tokenizer.vocab_size, top_k=spec.top_k)
    if record.content_key != content_key(spec.digest, record.input_ids, record.row_pos):
        said = "content_key is not that of its tokens"
        raise InvalidRecord("content_key", said, doc_id=record.doc_id, window=record.window)
