"""Errors that a user may see. Each is one sentence: what was expected, what was found, what to do.

`code` is stable across versions and listed in docs/FORMAT.md; `exit_code` is the command line's exit status:
1 = something was found wrong, 2 = the command was misused. No message ever contains credentials.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TeacherCacheError(Exception):
    """Base of everything that teachercache, pipeline and trainer raise on purpose."""

    code = "TC-E100"
    exit_code = 1


class UsageError(TeacherCacheError):
    """Misuse: a wrong path, wrong credentials, an option that does not exist, a cache of another teacher."""

    code = "TC-E200"
    exit_code = 2


class InvalidRecord(TeacherCacheError):
    """A record breaks an invariant of the format. `reason` is a short slug that drops are counted by."""

    code = "TC-E101"

    def __init__(self, reason: str, message: str, *, doc_id: str = "", window: int = 0) -> None:
        where = f"record {doc_id!r} window {window}: " if doc_id else ""
        super().__init__(f"{where}{message}")
        self.reason = reason
        self.doc_id = doc_id
        self.window = window


class CorruptFile(TeacherCacheError):
    """An object's bytes, size or contents are not what its commit or manifest says."""

    code = "TC-E102"


class MissingObject(TeacherCacheError):
    """A commit or manifest names an object that is not there."""

    code = "TC-E103"


class CommitConflict(TeacherCacheError):
    """The commit of a shard holds something that the protocol excludes (for example another spec's digest)."""

    code = "TC-E104"


class StaleAttempt(TeacherCacheError):
    """An attempt slept so long after its upload that the collector may have removed its files."""

    code = "TC-E105"


class DuplicateDocument(TeacherCacheError):
    """The same (split, source, doc_id, window) is committed twice."""

    code = "TC-E106"


class RepeatedContent(TeacherCacheError):
    """The same content stands in two splits, so that held-out text would leak into training."""

    code = "TC-E107"


class IncompleteCache(TeacherCacheError):
    """Some planned shards have no commit yet, and a partial manifest was not asked for."""

    code = "TC-E108"


class StoreUnavailable(TeacherCacheError):
    """The store does not answer, or keeps answering with errors that may pass."""

    code = "TC-E109"


class Exists(TeacherCacheError):
    """An object with other content already has this name. Not a failure by itself: the first writer wins."""

    code = "TC-E110"

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} exists already, with other content")
        self.path = path


class SpecMismatch(UsageError):
    """The cache belongs to another teacher, tokenizer or K. `differences` lists (field, ours, theirs)."""

    code = "TC-E201"

    def __init__(self, url: str, differences: Sequence[tuple[str, Any, Any]]) -> None:
        self.differences = list(differences)
        shown = "; ".join(f"{field}: ours {ours!r}, the cache's {theirs!r}" for field, ours, theirs in self.differences)
        super().__init__(f"{url} is the cache of another teacher ({shown}); write to another URL or change the job.")


class StoreUnsafe(UsageError):
    """The store ignores conditional writes, so that two writers could overwrite each other."""

    code = "TC-E202"


class StoreDenied(UsageError):
    """The store refused the credentials, or they may not do what was asked."""

    code = "TC-E203"


class NotACache(UsageError):
    """There is no cache, or no published manifest, at the URL."""

    code = "TC-E204"


class UnsafeManifest(UsageError):
    """A spec, commit or manifest asks for something outside its cache or beyond the bounds of the format."""

    code = "TC-E205"


class UnsupportedFormat(UsageError):
    """The cache was written by a newer version of the format, or with a codec that this version lacks."""

    code = "TC-E206"
