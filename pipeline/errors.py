"""Errors of cache generation; each has a code, listed with its runbook in docs/OPERATIONS.md."""

from __future__ import annotations

from collections.abc import Sequence

from teachercache.errors import TeacherCacheError


class InputDamaged(TeacherCacheError):
    """An input file cannot be read to its end; says which file and the last good document."""

    code = "TC-E301"
    remedy = "Replace the input file, or take it out of the job."

    def __init__(self, url: str, last_good: int | None, documents: int, cause: str) -> None:
        at = "no document was readable" if last_good is None else f"last good document at offset {last_good}"
        super().__init__(
            f"{url}: the file is damaged or cut short ({cause}); {documents} documents were readable, {at};"
            " replace the file, or set run.on_truncated=keep to cache what is readable"
        )
        self.url, self.last_good, self.documents = url, last_good, documents


class InputChanged(TeacherCacheError):
    """The input file is not the one that was planned."""

    code = "TC-E302"
    remedy = "Run the job again: it plans the file as it is now."


class RowsInvalid(TeacherCacheError):
    """An input's rows break an invariant; `reason` is a slug."""

    code = "TC-E311"
    remedy = "Look at the quarantine with `teachercache quarantine`; the other documents are committed."

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class EngineDied(TeacherCacheError):
    """The engine is gone and its process must end; `suspects` are the keys that were inside it."""

    code = "TC-E312"
    remedy = "Nothing: the actor is started again and the shard repeated."

    def __init__(self, message: str, suspects: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.suspects = tuple(suspects)


class CanaryFailed(TeacherCacheError):
    """The engine gives wrong rows; it must not get work."""

    code = "TC-E313"
    remedy = "Do not use the cache of this engine; compare the engine and its settings with the reference."
