"""Names of the objects of a cache, and the only parser of them. Pure functions; paths are relative to the cache."""

from __future__ import annotations

import re
from dataclasses import dataclass

from teachercache.errors import UnsafeManifest, UsageError

FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")  # one file or folder of a run, a tokenizer, a model
NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,62}[A-Za-z0-9])?")  # split and source, which paths hold
SPEC = "spec.json"
COMMITS = "commits/"
MANIFESTS = "manifests/"
PARTS = "manifests/parts/"  # of large manifests
KEYS = "manifests/keys/"  # what publishers know of the records that a manifest has
LAST_MANIFEST = 99_999_999
PLANS = "plans/"
DATA = "data/"
QUARANTINE = "quarantine/"
LEASES = "leases/"
RUNS = "runs/"  # students that were trained from the cache; advisory
TOKENIZER = "tokenizer/"
NAMED_TEMPLATES = "additional_chat_templates"  # of a tokenizer: NAME.jinja, next to the default template
INDEX = "index.json"  # of the tokenizer's files
OF_THE_HUB = {"README.md", ".gitattributes"}  # what a data set on the Hub has besides the cache
PROBES = "probes/"  # scratch of the start-up probe and of reading the server's clock; `gc` removes leftovers

SHARD_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,126}[A-Za-z0-9])?")
ATTEMPT = re.compile(r"[0-9a-f]{32}")
_DATA_PATH = re.compile(
    rf"data/codec=(?P<codec>[a-z0-9]{{1,32}})/split=(?P<split>{NAME.pattern})/source=(?P<source>{NAME.pattern})/"
    rf"(?P<shard_id>{SHARD_ID.pattern})-(?P<attempt>{ATTEMPT.pattern})\.parquet"
)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_COMMIT_PATH = re.compile(rf"commits/({SHARD_ID.pattern})\.json")
_PLAN_PATH = re.compile(rf"plans/({_DIGEST.pattern})\.json")
_QUARANTINE_PATH = re.compile(rf"quarantine/({SHARD_ID.pattern})/({ATTEMPT.pattern})\.json")
_PART_PATH = re.compile(rf"manifests/parts/({_DIGEST.pattern})\.json")
_KEYS_PATH = re.compile(rf"manifests/keys/({ATTEMPT.pattern})\.parquet")
_LEASE_PATH = re.compile(rf"leases/({ATTEMPT.pattern})/[0-9]{{8}}\.json")
_TOKENIZER_PATH = re.compile(rf"tokenizer/({_DIGEST.pattern})/(?:{NAMED_TEMPLATES}/)?{FILE_NAME.pattern}")
_RUN_PATH = re.compile(rf"runs/({ATTEMPT.pattern})-([0-9]{{8,16}})\.json")
_MANIFEST_PATH = re.compile(r"manifests/([0-9]{8})\.json")


@dataclass(frozen=True, slots=True)
class DataPath:
    """The parts of a data file's name; `str` joins them."""

    codec: str
    split: str
    source: str
    shard_id: str
    attempt: str

    def __str__(self) -> str:
        return f"data/codec={self.codec}/split={self.split}/source={self.source}/{self.shard_id}-{self.attempt}.parquet"


def parse_data_path(path: str) -> DataPath:
    """Return the parts of a data file's name; anything else (absolute, `..`, another bucket) raises UnsafeManifest."""
    match = _DATA_PATH.fullmatch(path)
    if match is None:
        shown = path if len(path) <= 120 else path[:117] + "..."
        raise UnsafeManifest(
            f"{shown!r} is not a data file of this cache: expected data/codec=C/split=S/source=S/SHARD-ATTEMPT.parquet; "
            "the manifest is damaged or not to be trusted."
        )
    return DataPath(**match.groupdict())


def is_data_path(path: str) -> bool:
    """Return whether a name below data/ is a data file's; others (a _SUCCESS, a .DS_Store) are not ours to judge."""
    return _DATA_PATH.fullmatch(path) is not None


def check_name(name: str, what: str) -> str:
    """Return the name of one file or folder that an object of a store gave, before a path is made of it.

    It is a letter or digit, then letters, digits, `_`, `.`, `-`: ASCII, at most 200. Raises UnsafeManifest that begins with
    `what` (such as "checkpoints.json of s3://…") for any other: an absolute path, `..`, a folder inside, an empty name.
    """
    if not isinstance(name, str) or FILE_NAME.fullmatch(name) is None:
        shown = ascii(name)
        raise UnsafeManifest(
            f"{what} names {shown if len(shown) <= 120 else shown[:117] + '...'}, which is no plain file name "
            f"({FILE_NAME.pattern}); nothing was written or removed: it is damaged or not to be trusted."
        )
    return name


def check_tokenizer_name(name: str, what: str) -> str:
    """Return the name of a tokenizer's file: a plain one, or one in the folder of named templates; else as check_name."""
    inner = name.removeprefix(f"{NAMED_TEMPLATES}/") if isinstance(name, str) else name
    check_name("" if inner == NAMED_TEMPLATES else inner, what)
    return name


def check_shard_id(shard_id: str) -> str:
    """Return the id, or raise UsageError where it cannot be part of a name."""
    if SHARD_ID.fullmatch(shard_id) is None:
        raise UsageError(f"shard id {shard_id!r} must match {SHARD_ID.pattern}")
    return shard_id


def commit_path(shard_id: str) -> str:
    """Return the name of a shard's commit."""
    return f"{COMMITS}{check_shard_id(shard_id)}.json"


def plan_path(digest: str) -> str:
    """Return the name of a plan."""
    return f"{PLANS}{digest}.json"


def manifest_path(number: int) -> str:
    """Return the name of a manifest."""
    return f"{MANIFESTS}{number:08d}.json"


def number_after(number: int) -> int:
    """Return the number of the manifest that follows; UnsafeManifest where no number is left."""
    if number >= LAST_MANIFEST:
        raise UnsafeManifest(
            f"{manifest_path(number)} has the last number that there is, so nothing more can be published; "
            "if it is a stranger's, remove it, else copy the cache to a new URL."
        )
    return number + 1


def manifest_number(path: str) -> int | None:
    """Return the number in a manifest's name, or None for a name that is not a manifest's."""
    match = _MANIFEST_PATH.fullmatch(path)
    return int(match[1]) if match else None


def part_path(sha256: str) -> str:
    """Return the name of a part of a manifest."""
    return f"{PARTS}{sha256}.json"


def keys_path(name: str) -> str:
    """Return the name of a key run."""
    return f"{KEYS}{name}.parquet"


def committed_shard(path: str) -> str | None:
    """Return the shard of a commit's name, or None for a name that is not a commit's."""
    match = _COMMIT_PATH.fullmatch(path)
    return match[1] if match else None


def plan_digest(path: str) -> str | None:
    """Return the digest of a plan's name, or None for a name that is not a plan's."""
    match = _PLAN_PATH.fullmatch(path)
    return match[1] if match else None


def quarantined_shard(path: str) -> str | None:
    """Return the shard of a quarantine's name, or None for a name that is not a quarantine's."""
    match = _QUARANTINE_PATH.fullmatch(path)
    return match[1] if match else None


def is_of_manifests(path: str) -> bool:
    """Return whether a name is that of a part or of a key run, which manifests name."""
    return any(pattern.fullmatch(path) for pattern in (_PART_PATH, _KEYS_PATH))


def is_strange(path: str) -> bool:
    """Return whether no object of a cache has such a name: what file managers, sync tools and people leave behind.

    Every command ignores these; `verify` names them.
    """
    if path == SPEC or path in OF_THE_HUB or path.startswith(PROBES) or manifest_number(path) is not None:
        return False
    known = (
        _DATA_PATH, _COMMIT_PATH, _PLAN_PATH, _QUARANTINE_PATH, _PART_PATH, _KEYS_PATH, _LEASE_PATH, _TOKENIZER_PATH,
        _RUN_PATH,
    )  # fmt: skip
    return not any(pattern.fullmatch(path) for pattern in known)


def quarantine_path(shard_id: str, attempt: str) -> str:
    """Return the name of a shard's quarantine by one attempt."""
    return f"{QUARANTINE}{check_shard_id(shard_id)}/{attempt}.json"


def run_path(run: str, steps: int) -> str:
    """Return the name of a run's entry after this number of steps."""
    return f"{RUNS}{run}-{steps:08d}.json"


def is_run(path: str) -> bool:
    """Return whether a name is that of a run's entry."""
    return _RUN_PATH.fullmatch(path) is not None


def tokenizer_path(digest: str, name: str) -> str:
    """Return the name of one of the tokenizer's files; UnsafeManifest for one that leaves their folder."""
    return f"{TOKENIZER}{digest}/{check_tokenizer_name(name, 'a tokenizer')}"
