"""Long documents: windows that tile, truncation, or skipping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.config import WindowsConfig
from pipeline.corpus.documents import Dropped


@dataclass(frozen=True, slots=True)
class Span:
    """Window `index` reads document tokens [start, stop) and keeps rows of positions [first_row, stop)."""

    index: int
    start: int
    stop: int
    first_row: int


def resolved(config: WindowsConfig, size: int) -> tuple[int, int]:
    """(stride, min_context) for windows of `size` tokens. See WindowsConfig for the defaults."""
    least = config.min_context if config.min_context is not None else min(256, size // 4)
    stride = config.stride if config.stride is not None else size - least
    if stride < 1 or stride > size or (config.min_context is not None and size - stride < config.min_context):
        raise ValueError(f"windows of {size} tokens with stride {stride} leave less than min_context {least}")
    return stride, least


def spans(length: int, size: int, config: WindowsConfig, bos: int) -> Iterator[Span]:
    """Windows over a document of `length` tokens (BOS not counted), each input at most `size` with its BOS.

    bos is 1 where the document begins with an added BOS. The rows of all windows are every position exactly once;
    rows of later windows have at least min_context tokens of context. Raises Dropped("too_long") under `skip`.
    """
    if length + bos <= size:
        yield Span(0, 0, length, 0)
        return
    if config.policy == "skip":
        raise Dropped("too_long", f"{length + bos} tokens, the limit is {size}")
    if config.policy == "truncate":
        keep = size - bos
        begin = 0 if config.truncate_side == "right" else length - keep
        yield Span(0, begin, begin + keep, begin)
        return
    stride, _ = resolved(config, size)
    later_bos = bos if config.bos_every_window else 0
    if stride <= later_bos:
        raise ValueError(f"stride {stride} leaves no room for new rows beside the BOS of every window")
    context = size - stride
    stop = size - bos
    yield Span(0, 0, stop, 0)
    index = 1
    while stop < length:
        start = stop - context
        first_row, stop = stop, min(start + size - later_bos, length)
        yield Span(index, start, stop, first_row)
        index += 1
