"""Long documents: windows that tile, truncation, or skipping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.config import WindowsConfig
from pipeline.corpus.documents import Dropped


@dataclass(frozen=True, slots=True)
class Span:
    """Window `index` reads document tokens [start, stop) and keeps rows of positions [first_row, stop_row).

    A row at position p is about token p + 1, so a window that others follow leaves its last position to the next one,
    which holds the token that the row is about.
    """

    index: int
    start: int
    stop: int
    first_row: int
    stop_row: int


def context_of(config: WindowsConfig, size: int) -> int:
    """Return the least context of a row in windows of `size` tokens; windows advance by the rest."""
    least = config.min_context if config.min_context is not None else min(256, size // 4)
    if least + 1 >= size:
        raise ValueError(
            f"windows of {size} tokens leave no room for min_context {least} and the token that a row is about"
        )
    return least


def spans(length: int, size: int, config: WindowsConfig, bos: int) -> Iterator[Span]:
    """Yield windows over a document of `length` tokens (BOS not counted), each input at most `size` with its BOS.

    bos is 1 where the document begins with an added BOS. The rows of all windows are every position exactly once, each in
    an input that holds the token which follows (but after the last token, which nothing follows): a student learns every
    token once. Rows of later windows have at least min_context tokens of context. Raises Dropped("too_long") under `skip`.
    """
    if length + bos <= size:
        yield Span(0, 0, length, 0, length)
        return
    if config.policy == "skip":
        raise Dropped("too_long", f"{length + bos} tokens, the limit is {size}")
    if config.policy == "truncate":
        keep = size - bos
        yield Span(0, 0, keep, 0, keep)
        return
    context = context_of(config, size)
    later_bos = bos if config.bos_every_window else 0
    if size - context - 1 <= later_bos:
        raise ValueError(f"min_context {context} leaves no room for new rows next to the token that each is about")
    stop = size - bos
    yield Span(0, 0, stop, 0, stop - 1)
    index = 1
    while stop < length:
        first_row = stop - 1
        start = first_row - context
        stop = min(start + size - later_bos, length)
        yield Span(index, start, stop, first_row, stop if stop == length else stop - 1)
        index += 1
