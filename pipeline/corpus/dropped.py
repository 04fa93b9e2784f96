"""Why a document is left out."""

from __future__ import annotations

# What a job leaves out because its file says so. All other reasons say that something is wrong with a document.
BY_WISH = frozenset(
    ("sampled_out", "duplicate", "too_few_tokens", "too_many_tokens", "too_long", "prompt_too_long", "removed")
)


class Dropped(Exception):
    """A document is left out. `reason` is a slug that commits and `status` count; `detail` is for people."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail
