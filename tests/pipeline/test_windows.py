"""Windows tile a document: every position has one row, with its least context."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import WindowsConfig
from pipeline.corpus.documents import Dropped
from pipeline.corpus.windows import context_of, spans


@settings(max_examples=300, deadline=None)
@given(
    length=st.integers(1, 400),
    size=st.integers(4, 80),
    min_context=st.integers(0, 40),
    bos=st.booleans(),
    again=st.booleans(),
)
def test_rows_of_all_windows_are_every_position_once(length, size, min_context, bos, again):
    if min_context + 2 >= size:
        return
    config = WindowsConfig(policy="window", min_context=min_context, bos_every_window=again)
    rows: list[int] = []
    about: list[int] = []  # tokens that a row is about and that its input holds
    for span in spans(length, size, config, int(bos)):
        own_bos = int(bos and (span.index == 0 or again))
        assert span.stop - span.start + own_bos <= size
        if span.index > 0:
            assert span.first_row - span.start >= min_context
        rows += range(span.first_row, span.stop_row)
        about += [row + 1 for row in range(span.first_row, span.stop_row) if row + 1 < span.stop]
    assert rows == list(range(length))
    assert about == list(range(1, length))


def test_size_and_min_context_must_fit():
    with pytest.raises(ValueError, match="min_context"):
        WindowsConfig(size=100, min_context=100)
    assert context_of(WindowsConfig(), 100) == 25
    assert context_of(WindowsConfig(min_context=60), 100) == 60
    with pytest.raises(ValueError, match="leave no room"):
        context_of(WindowsConfig(min_context=200), 100)


def test_truncation_keeps_the_beginning():
    (span,) = spans(50, 10, WindowsConfig(policy="truncate"), 0)
    assert (span.start, span.stop) == (0, 10)


def test_skip_drops_the_document():
    with pytest.raises(Dropped, match="too_long"):
        list(spans(11, 10, WindowsConfig(policy="skip"), 0))
    assert len(list(spans(9, 10, WindowsConfig(policy="skip"), 1))) == 1
