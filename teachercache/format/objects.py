"""Models of the sealed JSON objects of a cache: commit, plan, quarantine, manifest, run, tokenizer index. Pure.

`spec.json` is `format.spec.CacheSpec`; how an object is sealed is in `format.sealed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, field_validator

from teachercache.errors import CommitConflict, UnsafeManifest
from teachercache.format import layout
from teachercache.format.spec import Strict, json_digest

MAX_FILE_BYTES = 2**37  # 128 GiB; a manifest that claims a larger file is refused
MAX_TOKENIZER_BYTES = 2**28
MAX_RUN_BYTES = 2**14  # students write these, not the cache's own team
COUNTS = ("records", "documents", "tokens", "rows")  # what files, commits and manifests count

Count = Annotated[int, Field(ge=0, le=2**62)]


class FileEntry(Strict):
    """One data file as a commit and a manifest name it."""

    path: str
    codec: str
    split: str
    source: str
    size: int = Field(ge=0, description="bytes")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    records: int = Field(ge=0, le=2**31)
    documents: int = Field(ge=0, le=2**31, description="distinct doc_id")
    tokens: int = Field(ge=0, le=2**40)
    rows: int = Field(ge=0, le=2**40)
    row_groups: int = Field(ge=0, le=2**24, description="Parquet row groups; a stream plans from it without any footer")


class Commit(Strict):
    """`commits/<shard>.json`: the only thing that makes a shard's files part of the cache."""

    format_version: Literal[1] = 1
    shard_id: str
    attempt: str = Field(pattern=r"^[0-9a-f]{32}$")
    spec_digest: str
    files: list[FileEntry]
    records: Count
    documents: Count
    tokens: Count
    rows: Count
    drops: dict[str, Count] = Field(default_factory=dict)
    replaces: list[str] = Field(default_factory=list)
    provenance: dict[str, Any] = Field(default_factory=dict)
    created: str

    def check(self, spec_digest: str) -> None:
        """Raise unless it belongs to this spec (CommitConflict) and names only its own, plausible files (UnsafeManifest)."""
        if self.spec_digest != spec_digest:
            raise CommitConflict(
                f"the commit of shard {self.shard_id} belongs to spec {self.spec_digest[:12]}, this cache has "
                f"{spec_digest[:12]}. It was copied here from another cache: remove it."
            )
        name = f"the commit of shard {self.shard_id}"
        for entry in self.files:
            where = _checked(entry, name)
            if (where.shard_id, where.attempt) != (self.shard_id, self.attempt):
                raise UnsafeManifest(f"{name} names {entry.path}, which is not its own file.")


class PlanShard(Strict):
    """One unit of work: a range of one input under one row recipe."""

    shard_id: str
    source: str
    corpus: int = Field(default=0, ge=0, description="place of the source's entry in the job's `corpora`")
    input: str = Field(description="URL of the input file")
    input_digest: str
    start: Count = 0
    stop: Count = 0
    unit: Literal["bytes", "rows", "file", "items"] = "file"
    estimated_tokens: Count = 0
    duplicates: list[Count] = Field(
        default_factory=list, description="documents left out because the job has them elsewhere, by ordinal"
    )
    repeated_ids: list[int] = Field(
        default_factory=list, description="documents left out because an earlier one has their id, by ordinal"
    )

    @field_validator("shard_id")
    @classmethod
    def _named(cls, value: str) -> str:
        return layout.check_shard_id(value)


class Plan(Strict):
    """`plans/<digest>.json`: a job's inputs, recipe and shards, stored before it starts.

    Two plans with equal digests are one plan, whenever they were made.
    """

    format_version: Literal[1] = 1
    spec_digest: str
    created: str
    job: dict[str, Any] = Field(default_factory=dict)
    shards: list[PlanShard]

    @property
    def digest(self) -> str:
        """Return the sha256 hex of everything except `created`."""
        return json_digest(self.model_dump(mode="json", exclude={"created"}))


class Quarantine(Strict):
    """`quarantine/<shard>/<attempt>.json`: advisory; a commit of the shard wins over it."""

    format_version: Literal[1] = 1
    shard_id: str
    attempt: str
    scope: Literal["shard", "document"] = Field(
        default="shard", description="what was given up: the shard, or only some documents of a committed one"
    )
    reason: str
    message: str
    documents: list[str] = Field(default_factory=list)
    created: str


class Run(Strict):
    """`runs/<run>-<steps>.json`: a student that was trained from the cache; advisory, no reader of rows needs it."""

    format_version: Literal[1] = 1
    spec_digest: str
    run: str = Field(pattern=r"^[0-9a-f]{32}$", description="random; a run that is continued keeps it")
    manifest: int = Field(ge=1, le=layout.LAST_MANIFEST)
    student: str = Field(max_length=200, description="what the student began as: a Hub id, or a folder's last name")
    parameters: Count
    steps: Count
    rows: Count
    heldout_kl: float | None = Field(description="nats, after the last step; null where it was not measured")
    created: str

    def check(self, path: str, spec_digest: str) -> None:
        """Raise CommitConflict unless it lies under its own name, in the cache of this spec."""
        if layout.run_path(self.run, self.steps) != path or self.spec_digest != spec_digest:
            raise CommitConflict(
                f"{path} is step {self.steps} of run {self.run} of a cache with spec {self.spec_digest[:12]}, this one has "
                f"{spec_digest[:12]}; it was copied or moved here: remove it."
            )


class ManifestFile(FileEntry):
    """A data file and the shard whose commit named it."""

    shard_id: str


class PartRef(Strict):
    """A part as a manifest names it."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of the part's bytes, and its name")
    files: int = Field(ge=0, le=2**19)
    replaced: int = Field(ge=0, le=2**19)


class ManifestPart(Strict):
    """`manifests/parts/<sha256>.json`: entries of a large manifest, which later manifests share."""

    format_version: Literal[1] = 1
    spec_digest: str
    publisher: str = Field(description="random: no two publishers make the same part")
    files: list[ManifestFile] = Field(repr=False)
    replaced: dict[str, str] = Field(default_factory=dict, repr=False)


class KeyRun(Strict):
    """`manifests/keys/<name>.parquet` as a manifest names it: hashes of the keys of records, for publishers."""

    name: str = Field(pattern=r"^[0-9a-f]{32}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0, le=MAX_FILE_BYTES, description="bytes")
    records: int = Field(ge=0, le=2**40)
    splits: list[str] = Field(max_length=2**15, description="what the file's column `split` indexes")


class Manifest(Strict):
    """`manifests/<number>.json`: a create-only snapshot that readers pin.

    In the store, `files` and `replaced` of a large one lie in its parts; `Ledger.manifest` puts them back together.
    """

    format_version: Literal[1] = 1
    number: int = Field(ge=1, le=layout.LAST_MANIFEST)
    spec_digest: str
    created: str
    publisher: str = Field(description="random; tells two publishers' equal content apart")
    files: list[ManifestFile] = Field(repr=False)
    plans: list[str]
    replaced: dict[str, str] = Field(default_factory=dict, description="shard -> the shard whose commit replaced it")
    idle: list[str] = Field(
        default_factory=list, description="settled shards without a file here: nothing was left, or another was first"
    )
    parts: list[PartRef] = Field(default_factory=list, description="where more of `files` and `replaced` lies")
    keys: list[KeyRun] = Field(default_factory=list, description="together: the key of every record of `files`")
    shards_planned: Count
    shards_committed: Count
    shards_quarantined: Count
    documents: Count
    records: Count
    tokens: Count
    rows: Count
    drops: dict[str, Count] = Field(default_factory=dict)
    repeated_content: Count = Field(default=0, description="windows whose content is in another split too")
    reused_rows: Count = Field(default=0, description="rows that were copied from shards of other plans")
    complete: bool
    parent: str | None = Field(default=None, description="digest of the manifest before; informative")
    _head: Manifest | None = PrivateAttr(default=None)  # as it lies in the store, where it has parts
    _held: list[tuple[PartRef, ManifestPart]] = PrivateAttr(default_factory=list)

    @property
    def digest(self) -> str:
        """Return the sha256 hex of the object in the store; a training run's state names it."""
        return json_digest((self._head or self).model_dump(mode="json"))

    @property
    def held_parts(self) -> list[tuple[PartRef, ManifestPart]]:
        """Return the parts that it was put together from."""
        return self._held

    def whole(self, parts: Sequence[ManifestPart]) -> Manifest:
        """Return a manifest as it lies in the store together with its parts, files sorted by path.

        Raises UnsafeManifest where a part is not what the manifest says.
        """
        if not self.parts:
            return self
        files, replaced = list(self.files), dict(self.replaced)
        for ref, part in zip(self.parts, parts, strict=True):
            if part.spec_digest != self.spec_digest or (len(part.files), len(part.replaced)) != (
                ref.files,
                ref.replaced,
            ):
                raise UnsafeManifest(f"manifest {self.number}: part {ref.sha256[:12]} is not what the manifest says.")
            files += part.files
            replaced |= part.replaced
        found = self.model_copy(update={"files": sorted(files, key=lambda f: f.path), "replaced": replaced})
        found._head, found._held = self, list(zip(self.parts, parts, strict=True))
        return found

    def settled(self) -> set[str]:
        """Return the shards whose commits were considered for good: publishers need not read them again."""
        return {entry.shard_id for entry in self.files} | self.replaced.keys() | set(self.idle)

    def says_as(self, other: Manifest) -> bool:
        """Return whether two manifests are the same snapshot: equal but for number, time, publisher and storage."""
        apart = {"number", "created", "publisher", "parent", "parts", "keys", "files", "replaced"}
        same = self.model_dump(exclude=apart) == other.model_dump(exclude=apart)
        return same and self.replaced == other.replaced and self.files == other.files

    def check(self, spec_digest: str) -> None:
        """Raise UnsafeManifest unless every entry is a plausible, distinct data file of this cache."""
        name = f"manifest {self.number}"
        if self.spec_digest != spec_digest:
            raise UnsafeManifest(f"{name} belongs to spec {self.spec_digest[:12]}, the cache has {spec_digest[:12]}.")
        seen: set[str] = set()
        for entry in self.files:
            if _checked(entry, name).shard_id != entry.shard_id:
                raise UnsafeManifest(f"{name}: {entry.path} does not agree with its own entry.")
            if entry.path in seen:
                raise UnsafeManifest(f"{name} names {entry.path} twice.")
            seen.add(entry.path)
        for field in ("rows", "tokens", "records"):
            total = sum(getattr(entry, field) for entry in self.files)
            if getattr(self, field) != total:
                raise UnsafeManifest(f"{name} says {getattr(self, field):,} {field}, its files hold {total:,}.")


def _checked(entry: FileEntry, name: str) -> layout.DataPath:
    """Return the parts of an entry's path; UnsafeManifest where they do not agree with the entry, or it claims too much."""
    where = layout.parse_data_path(entry.path)
    if (where.codec, where.split, where.source) != (entry.codec, entry.split, entry.source):
        raise UnsafeManifest(f"{name}: {entry.path} does not agree with its own entry.")
    if entry.size > MAX_FILE_BYTES:
        raise UnsafeManifest(f"{name}: {entry.path} claims {entry.size:,} bytes, limit {MAX_FILE_BYTES:,}.")
    return where


class TokenizerIndexEntry(Strict):
    """One of the tokenizer's files."""

    name: str
    size: int = Field(ge=0, le=MAX_TOKENIZER_BYTES)
    sha256: str

    @field_validator("name")
    @classmethod
    def _plain(cls, value: str) -> str:
        return layout.check_tokenizer_name(value, "the tokenizer index")


class TokenizerIndex(Strict):
    """`tokenizer/<digest>/index.json`: written last, so that what it names is there."""

    format_version: Literal[1] = 1
    files: list[TokenizerIndexEntry]
