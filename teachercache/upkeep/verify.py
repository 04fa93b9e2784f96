"""verify: read everything that a cache claims, or a sample of it, and list what is not so."""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from teachercache.errors import CorruptFile, InvalidRecord, MissingObject, StoreDenied, TeacherCacheError, UsageError
from teachercache.format import layout
from teachercache.format.objects import COUNTS, Commit, Manifest, ManifestFile, Plan
from teachercache.format.record import Record, check_record, content_key
from teachercache.format.spec import CacheSpec
from teachercache.parquet.block import Block
from teachercache.parquet.datafile import DataFile
from teachercache.read.tokenizer import check_tokenizer
from teachercache.store.ledger import Ledger, read_sealed
from teachercache.store.liveness import live_commits, planned_shards, resolve_replacements
from teachercache.store.store import Store
from teachercache.write.uniqueness import FileKeys, check_unique, keys_of

PROBLEMS_PER_FILE = 20
THREADS = 16  # small objects read at the same time
LARGE_BYTES = 2**26
_large = (
    threading.Lock()
)  # row groups beyond LARGE_BYTES are checked one at a time, which bounds the memory of all threads


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
    sampled: bool = False
    files: int = 0
    files_read: int = 0
    files_skipped: int = 0  # an earlier run with the same state read them
    bytes_read: int = 0
    records: int = 0
    rows: int = 0
    problems: list[Problem] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)  # objects whose names no cache has; every command ignores them

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
    sample: int | None = None,
    threads: int = 4,
    state: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Check a manifest (default: the newest), the commits, and every file of both.

    Every object's seal; that manifest, commits and plans agree, and that the manifest's counts are theirs; of each file
    its presence and size by a listing, its sha256, footer, counts and every invariant of every row; content keys; that no
    document is there twice. Reads each file once, through `threads` local temporary copies.

    sample    reads this many files whole, chosen by a fixed seed, with their commits; of all others it checks presence and
              size. What needs every commit or every file is left out: drops, documents, the search for doubles
    state     a file that remembers which files were read and found sound, so that a run that was ended goes on; of these
              only the keys are read again. UsageError where it is another cache's
    """
    found, ledger = Verification(sampled=sample is not None), Ledger(store, spec)
    done = _State(state, store, spec) if state else None
    with found.collecting(layout.MANIFESTS):
        manifest = manifest or ledger.newest_manifest()
    found.manifest = manifest.number if manifest else None
    data = {o.path: o.size for o in store.list("")}
    found.strange = [path for path in data if layout.is_strange(path)]
    listed = [path for path in data if layout.committed_shard(path)]
    draw = random.Random(0)
    if sample is None:
        commits = _check_commits(store, spec, listed, found)
        files = _files_to_check(manifest, commits, found)
        chosen = files
    else:
        files = list(manifest.files) if manifest else []
        chosen = draw.sample(files, min(sample, len(files)))
        names = {layout.commit_path(entry.shard_id) for entry in chosen}
        names |= set() if manifest else set(draw.sample(listed, min(sample, len(listed))))
        commits = _check_commits(store, spec, sorted(names.intersection(listed)), found)
        _check_sampled(files, chosen, commits, set(listed), found)
    if manifest:
        plans = _check_plans(store, manifest, sample, draw, data, found)
        if sample is None and plans is not None:
            _check_shards(manifest, commits, plans, found)
    for path in filter(layout.is_run, data):
        with found.collecting(path):
            ledger.run(path)
    with found.collecting(layout.TOKENIZER):
        check_tokenizer(store, spec.tokenizer)
    found.files = len(files)
    for entry in files:
        with found.collecting(entry.path):
            _check_listed(entry, data)
    there = [entry for entry in chosen if data.get(entry.path) == entry.size]
    skipped = {entry.path for entry in there if done and entry.sha256 in done.sound}
    found.files_skipped = len(skipped)
    keys = _read_files(store, spec, [e for e in there if e.path not in skipped], threads, done, found, progress)
    if sample is None:
        _check_documents(store, spec, manifest, files, keys, found)
    elif manifest:
        _check_bounds(manifest, found)
    return found


# ---- objects ---------------------------------------------------------------------------------------------------


def _check_commits(store: Store, spec: CacheSpec, paths: Sequence[str], found: Verification) -> list[Commit]:
    commits = []
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


def _named(commits: Sequence[Commit]) -> dict[str, ManifestFile]:
    return {entry.path: ManifestFile(**entry.model_dump(), shard_id=c.shard_id) for c in commits for entry in c.files}


def _files_to_check(manifest: Manifest | None, commits: Sequence[Commit], found: Verification) -> list[ManifestFile]:
    """Return the files of the manifest and of commits that are not published yet."""
    named = _named(commits)
    files = list(manifest.files) if manifest else []
    for entry in files:
        _compare(entry, named.get(entry.path), found)
    published, shards = {entry.path for entry in files}, {entry.shard_id for entry in files}
    live = live_commits(commits, resolve_replacements(commits, manifest.replaced if manifest else {}))
    for commit in live:
        for path in (entry.path for entry in commit.files if entry.path not in published):
            files.append(named[path])
            if commit.shard_id in shards:
                said = f"{path} of shard {commit.shard_id} is in its commit but not in the manifest."
                found.add(path, CorruptFile(said))
    return files


def _compare(entry: ManifestFile, committed: ManifestFile | None, found: Verification) -> None:
    if committed != entry:
        what = "no commit names it" if committed is None else "its commit describes it differently"
        found.add(entry.path, MissingObject(f"{entry.path} is in manifest but {what}."))


def _check_sampled(
    files: Sequence[ManifestFile],
    chosen: Sequence[ManifestFile],
    commits: Sequence[Commit],
    listed: Collection[str],
    found: Verification,
) -> None:
    """Check that each shard of a manifest has a commit, by the listing, and that those of the sample agree."""
    for shard in sorted({entry.shard_id for entry in files}):
        if (path := layout.commit_path(shard)) not in listed:
            found.add(path, MissingObject(f"{path} does not exist, but the manifest has files of its shard."))
    named, read = _named(commits), {commit.shard_id for commit in commits}
    for entry in chosen:
        if entry.shard_id in read:
            _compare(entry, named.get(entry.path), found)


def _check_plans(
    store: Store,
    manifest: Manifest,
    sample: int | None,
    draw: random.Random,
    there: Collection[str],
    found: Verification,
) -> list[Plan] | None:
    """Return the manifest's plans, all of them; None where one is missing or was not in the sample."""
    digests = manifest.plans
    if sample is not None and sample < len(digests):
        digests = draw.sample(digests, sample)
    plans = []
    for digest in manifest.plans:
        path = layout.plan_path(digest)
        with found.collecting(path):
            if path not in there:
                raise MissingObject(f"{path} does not exist, but the manifest names it.")
            if digest in digests:
                plan = read_sealed(store, Plan, path)
                if plan.digest != digest:
                    raise MissingObject(f"{path} does not have the digest of its name.")
                plans.append(plan)
    return plans if len(plans) == len(manifest.plans) else None


def _check_shards(manifest: Manifest, commits: Sequence[Commit], plans: Sequence[Plan], found: Verification) -> None:
    """Compare what a manifest says of its shards with what commits and plans give."""
    path = layout.manifest_path(manifest.number)
    by_shard, settled = {commit.shard_id: commit for commit in commits}, manifest.settled()
    planned = planned_shards(plans, settled).keys()
    winners = set(manifest.replaced.values())
    drops: Counter[str] = Counter()
    for shard in settled & by_shard.keys():
        if not by_shard[shard].replaces or shard in winners:
            drops.update(by_shard[shard].drops)
    missing = planned - settled
    expected: dict[str, object] = {
        "shards_planned": len(planned),
        "shards_committed": len(planned & settled) if planned else len(settled),
        "shards_quarantined": min(manifest.shards_quarantined, len(missing)),  # since then they may have been committed
        "complete": not missing and manifest.documents > 0,
        "drops": dict(sorted(drops.items())),
    }
    for name, value in expected.items():
        if getattr(manifest, name) != value:
            said = f"{path} says {name} {getattr(manifest, name)}, its commits and plans give {value}."
            found.add(path, CorruptFile(said))
    for shard in manifest.idle:
        if shard not in by_shard:
            found.add(
                path, MissingObject(f"{path} says that shard {shard} was committed, but no commit of it is there.")
            )
    for old, new in manifest.replaced.items():
        if new not in by_shard or old not in by_shard[new].replaces:
            found.add(path, CorruptFile(f"{path} says that shard {old} was replaced by {new}, whose commit does not."))


def _check_bounds(manifest: Manifest, found: Verification) -> None:
    """Compare the number of documents with those of the files: shards of one document's windows may share it."""
    counts = [entry.documents for entry in manifest.files]
    if not max(counts, default=0) <= manifest.documents <= sum(counts):
        said = f"says {manifest.documents:,} documents, its files give {max(counts, default=0):,} to {sum(counts):,}."
        found.add(layout.MANIFESTS, CorruptFile(f"{layout.manifest_path(manifest.number)} {said}"))


# ---- files -----------------------------------------------------------------------------------------------------


def _check_listed(entry: ManifestFile, data: Mapping[str, int]) -> None:
    size = data.get(entry.path)
    if size is None:
        raise MissingObject(f"{entry.path} does not exist.")
    if size != entry.size:
        raise MissingObject(f"{entry.path} has {size:,} bytes, its entry says {entry.size:,}.")


def _read_files(
    store: Store,
    spec: CacheSpec,
    files: Sequence[ManifestFile],
    threads: int,
    done: _State | None,
    found: Verification,
    progress: Callable[[int, int], None] | None,
) -> dict[str, FileKeys]:
    """Check files whole; returns the keys of those that could be read."""
    keys: dict[str, FileKeys] = {}
    with ThreadPoolExecutor(threads) as pool:
        parts = pool.map(lambda entry: _check_file(store, spec, entry), files)
        for number, (entry, (part, of_file)) in enumerate(zip(files, parts, strict=True), 1):
            found.files_read += part.files_read
            found.bytes_read += part.bytes_read
            found.records += part.records
            found.rows += part.rows
            found.problems += part.problems
            if of_file is not None:
                keys[entry.path] = of_file
            if done and part.ok:
                done.add(entry)
            if progress:
                progress(number, len(files))
    return keys


def _check_file(store: Store, spec: CacheSpec, entry: ManifestFile) -> tuple[Verification, FileKeys | None]:
    found, keys = Verification(), None
    with found.collecting(entry.path), tempfile.TemporaryDirectory(prefix="teachercache-verify-") as folder:
        copy = Path(folder) / "copy.parquet"
        with copy.open("wb") as out:
            digest = store.download(entry.path, entry.size, out)
        found.files_read, found.bytes_read = 1, entry.size
        if digest != entry.sha256:
            said = f"{entry.path} has sha256 {digest[:12]}, expected {entry.sha256[:12]}."
            found.add(entry.path, CorruptFile(said))
        documents: set[str] = set()
        with (
            DataFile(store, entry, spec, local=pa.memory_map(str(copy))) as file,
            contextlib.closing(_checked_blocks(file, spec, documents, found)) as blocks,
        ):
            keys = keys_of(entry, blocks)
        if entry.documents != len(documents):
            said = f"{entry.path} holds {len(documents):,} documents, its entry says {entry.documents:,}."
            found.add(entry.path, CorruptFile(said))
    return found, keys


def _checked_blocks(
    file: DataFile, spec: CacheSpec, documents: set[str], found: Verification
) -> Generator[Block, None, None]:
    """Yield each block of a file after a check of its records. Counts of tokens and rows are checked by DataFile."""
    for i in range(file.num_groups):
        with _large if file.group_bytes(i) > LARGE_BYTES else contextlib.nullcontext():
            block = file.read_group(i, check=False)
            for record in block.records():
                found.records += 1
                found.rows += len(record.row_pos)
                documents.add(record.doc_id)
                if len(found.problems) < PROBLEMS_PER_FILE:
                    with found.collecting(file.entry.path):
                        _check_row_invariants(record, spec)
            yield block
            del block, record


def _check_row_invariants(record: Record, spec: CacheSpec) -> None:
    check_record(record, spec)
    if record.content_key != content_key(spec.digest, record.input_ids, record.row_pos):
        said = "content_key is not that of its tokens"
        raise InvalidRecord("content_key", said, doc_id=record.doc_id, window=record.window)


def _check_documents(
    store: Store,
    spec: CacheSpec,
    manifest: Manifest | None,
    files: Sequence[ManifestFile],
    keys: Mapping[str, FileKeys],
    found: Verification,
) -> None:
    """Check that no document is there twice, and that the manifest counts documents and repeated content rightly."""
    broken = {p.path for p in found.problems}
    whole = [f for f in files if f.path not in broken]
    with found.collecting(layout.DATA):
        if manifest and len(whole) == len(files):
            counts = check_unique(store, manifest.files, spec, allow_repeated_content=True, known=keys)
            said = (manifest.documents, manifest.repeated_content)
            for name, value, held in zip(("documents", "repeated_content"), said, counts, strict=True):
                if value != held:
                    text = f"{layout.manifest_path(manifest.number)} says {name} {value:,}, its files give {held:,}."
                    found.add(layout.MANIFESTS, CorruptFile(text))
        allowed = bool(manifest and manifest.repeated_content)
        if not manifest or len(whole) != len(manifest.files) or not allowed:
            check_unique(store, whole, spec, allow_repeated_content=allowed, known=keys)


class _State:
    """The sha256 of files that earlier runs read and found sound, one a line after a first line that names the cache."""

    def __init__(self, path: Path, store: Store, spec: CacheSpec) -> None:
        self.path = path
        first = json.dumps({"cache": store.url, "spec": spec.digest})
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        if lines and lines[0] != first:
            raise UsageError(f"{path} is not the state of a verification of {store.url}; give another file.")
        if not lines:
            path.write_text(first + "\n", encoding="utf-8")
        self.sound = set(lines[1:])

    def add(self, entry: ManifestFile) -> None:
        with self.path.open("a", encoding="utf-8") as out:
            out.write(entry.sha256 + "\n")
