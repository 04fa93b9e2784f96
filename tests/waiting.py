"""Waiting in tests: always with a deadline, always with a reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")


def wait_for(
    condition: Callable[[], T], seconds: float = 120, what: str = "the condition", interval_s: float = 0.05
) -> T:
    """Call `condition` until it is true and return what it returned; fail the test after `seconds`, with `what`.

    An exception of `condition` fails the test at once: a condition that may not be readable yet catches that itself.
    """
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:g} s for {what}; the last answer was {found!r}", pytrace=True)
        time.sleep(interval_s)
