"""Errors that a user may see. Each message is one sentence: what was expected, what was found, what to do.

`code` is stable across versions, and docs/FORMAT.md lists all of them, generated from these classes: the code, the first
sentence of the docstring, `remedy`. `exit_code` is the command line's exit status: 1 = something was found wrong, 2 = the
command was misused. No message ever contains credentials.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple


class TeacherCacheError(Exception):
    """Anything that teachercache, pipeline and trainer raise on purpose and that has no code of another class."""

    code = "TC-E100"
    exit_code = 1
    remedy = "Read the message: it names the file or setting."


class UsageError(TeacherCacheError):
    """Misuse: a wrong path, wrong credentials, an option that does not exist, a cache of another teacher."""

    code = "TC-E200"
    exit_code = 2
    remedy = "Correct what the message names; nothing was changed."


class InvalidRecord(TeacherCacheError):
    """A record breaks an invariant of the format. `reason` is a short slug that drops are counted by."""

    code = "TC-E101"
    remedy = "Correct what made the record; a job leaves such a document out and counts it by its reason."

    def __init__(self, reason: str, message: str, *, doc_id: str = "", window: int = 0) -> None:
        """Name the record, where it is known, in front of the message."""
        where = f"record {doc_id!r} window {window}: " if doc_id else ""
        super().__init__(f"{where}{message}")
        self.reason = reason
        self.doc_id = doc_id
        self.window = window


class CorruptFile(TeacherCacheError):
    """An object's bytes, size or contents are not what its commit or manifest says."""

    code = "TC-E102"
    remedy = "Run `teachercache verify`, then restore the object, or take its shard out and run the job again."


class MissingObject(TeacherCacheError):
    """A commit or manifest names an object that is not there."""

    code = "TC-E103"
    remedy = "Open the newest manifest; if it is the newest, run `teachercache gc` and the job again."


class CommitConflict(TeacherCacheError):
    """The commit of a shard holds something that the protocol excludes (for example another spec's digest)."""

    code = "TC-E104"
    remedy = "Remove the commit that was copied here from another cache."


class StaleAttempt(TeacherCacheError):
    """An attempt slept too long after its upload: the collector may have removed its files."""

    code = "TC-E105"
    remedy = "Run the shard again; a job does so by itself."


class DuplicateDocument(TeacherCacheError):
    """The same (split, source, doc_id, window) is committed twice."""

    code = "TC-E106"
    remedy = "Run `teachercache optimize URL --without-repeats`, which keeps the first copy of each and publishes."


class RepeatedContent(TeacherCacheError):
    """The same content is in two splits, so that held-out text would leak into training."""

    code = "TC-E107"
    remedy = "Remove it from one of the splits, or allow it with --allow-repeated-content."


class IncompleteCache(TeacherCacheError):
    """Some planned shards have no commit yet, and a partial manifest was not asked for."""

    code = "TC-E108"
    remedy = "Run the job again, or publish with --allow-partial."


class StoreUnavailable(TeacherCacheError):
    """The store does not answer, or keeps answering with errors that may pass."""

    code = "TC-E109"
    remedy = "Check AWS_ENDPOINT_URL (for hf://, HF_ENDPOINT) and the network, and run the same command again."


class Exists(TeacherCacheError):
    """An object with other content already has this name. Not a failure by itself: the first writer wins."""

    code = "TC-E110"
    remedy = "Nothing, or choose another name."

    def __init__(self, path: str) -> None:
        """Say which name is taken."""
        super().__init__(f"{path} exists already, with other content")
        self.path = path


class StaleParent(TeacherCacheError):
    """The Hub's data set got another commit while a push ran; nothing of the push is visible."""

    code = "TC-E111"
    remedy = "Run the same command again: what was uploaded is not sent again."


def _short(value: Any) -> str:
    """Return a value as a message shows it; of a sha256 the first 12 digits."""
    return value[:12] if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) else repr(value)


class SpecMismatch(UsageError):
    """The cache belongs to another teacher, tokenizer or K. `differences` lists (field, ours, theirs)."""

    code = "TC-E201"
    remedy = "Write to another URL, or change the job back."

    def __init__(self, url: str, differences: Sequence[tuple[str, Any, Any]]) -> None:
        """Name every field that differs."""
        self.differences = list(differences)
        shown = "; ".join(
            f"{field}: ours {_short(ours)}, the cache's {_short(theirs)}" for field, ours, theirs in self.differences
        )
        super().__init__(f"{url} is the cache of another teacher ({shown}); write to another URL or change the job.")


class StoreUnsafe(UsageError):
    """The store ignores conditional writes, so that two writers could overwrite each other."""

    code = "TC-E202"
    remedy = "Use a store that honours If-None-Match, such as AWS S3, MinIO, Ceph or R2."


class StoreDenied(UsageError):
    """The store refused the credentials, or they may not do what was asked."""

    code = "TC-E203"
    remedy = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role that may do it; for hf://, HF_TOKEN."


class NotACache(UsageError):
    """There is no cache, or no published manifest, at the URL."""

    code = "TC-E204"
    remedy = "Check the URL with `teachercache ls`, or wait until its job has published."


class UnsafeManifest(UsageError):
    """A spec, commit or manifest asks for something outside its cache or beyond the bounds of the format."""

    code = "TC-E205"
    remedy = "Do not trust the object; restore it, or ask the cache's owner."


class UnsupportedFormat(UsageError):
    """The cache was written by a newer or an earlier version of the format, or with a codec that this version lacks."""

    code = "TC-E206"
    remedy = "Upgrade teachercache; make a cache of the earlier format again."


class ErrorCode(NamedTuple):
    """One code, as the documentation lists it."""

    code: str
    name: str
    meaning: str
    remedy: str
    exit_status: int


def all_codes(base: type[TeacherCacheError] = TeacherCacheError) -> list[ErrorCode]:
    """Return every error class with a code that was imported so far, sorted by code; pipeline and trainer add theirs."""

    def walk(kind: type[TeacherCacheError]) -> Iterator[ErrorCode]:
        if "code" in vars(kind):
            first = re.split(r"(?<=\.)\s", " ".join((kind.__doc__ or "").split()))[0].rstrip(".")
            yield ErrorCode(kind.code, kind.__name__, first, kind.remedy, kind.exit_code)
        for child in kind.__subclasses__():
            yield from walk(child)

    return sorted(walk(base))
