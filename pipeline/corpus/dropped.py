"""Why a document is left out."""

from __future__ import annotations


class Dropped(Exception):
    """A document is left out. `reason` is a slug that commits and `status` count."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
