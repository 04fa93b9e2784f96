"""Whether to go on after actors that did not start. Pure: no Ray, no clock."""

from __future__ import annotations

from teachercache.errors import StoreUnavailable, TeacherCacheError, UsageError

STARTS_BEFORE_GIVING_UP = 3
STORE_STARTS_BEFORE_GIVING_UP = 20  # with pauses of up to a minute: a quarter of an hour, as the driver's patience
LONGEST_PAUSE_S = 60.0


class StartJudge:
    """Counts starts of a pool of `size` actors. A job that has actors, or had, outlives one bad node or an outage."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.started = 0  # ever
        self.failed = 0  # in a row

    def succeed(self) -> None:
        """Note that an actor is ready."""
        self.started += 1
        self.failed = 0

    def fail(self, cause: BaseException, *, others_ready: bool) -> float:
        """Note a failed start and return the seconds to wait before the next.

        others_ready: whether another actor can take work now. Raises UsageError or TeacherCacheError where no start can
        help: a wrong job or engine at the very first start, or too many failures in a row with no actor left.
        """
        self.failed += 1
        if not self.started and isinstance(cause, UsageError):
            raise UsageError(str(cause)) from cause
        away = isinstance(cause, StoreUnavailable)
        hopeless = not self.started and isinstance(cause, TeacherCacheError) and not away
        limit = STARTS_BEFORE_GIVING_UP * (self.size if self.started else 1)
        if away:
            limit = STORE_STARTS_BEFORE_GIVING_UP * self.size
        if hopeless or (self.failed >= limit and not others_ready):
            text = " ".join(str(cause).split())[-600:]
            raise TeacherCacheError(f"no actor could start its teacher ({self.failed} tries): {text}") from cause
        return min(LONGEST_PAUSE_S, 2.0**self.failed)
