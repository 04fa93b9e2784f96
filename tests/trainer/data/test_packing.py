"""Packing loses nothing, wastes little, and depends on its input alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.packing import best_fit, pack_block


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=200))
def test_every_item_is_packed_once_and_no_bin_overflows(lengths: list[int]) -> None:
    bins = best_fit(lengths, 64)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in items) <= 64 for items in bins)
    # Best-fit decreasing never uses more than 11/9 of the optimum, plus a bin.
    assert len(bins) <= 11 / 9 * max(1, sum(lengths) / 64) + 1 + sum(length > 32 for length in lengths)


def test_items_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[1, 64\]"):
        best_fit([10, 65], 64)


def test_a_block_carries_its_emptiest_bins_and_flushes_all_when_told() -> None:
    lengths = [60, 64, 5, 7, 30]
    groups, carried = pack_block(lengths, 64, flush=False, max_carry=4, seed=(0,))
    assert sorted([*carried, *(item for group in groups for item in group)]) == list(range(5))
    assert any(lengths[item] == 64 for group in groups for item in group)
    groups, carried = pack_block(lengths, 64, flush=True, max_carry=4, seed=(0,))
    assert carried == []
    assert sum(len(group) for group in groups) == 5


def test_the_order_of_sequences_is_the_seeds() -> None:
    lengths = list(range(1, 60))
    first = pack_block(lengths, 64, flush=True, max_carry=0, seed=(1, 2))
    assert first == pack_block(lengths, 64, flush=True, max_carry=0, seed=(1, 2))
    assert first != pack_block(lengths, 64, flush=True, max_carry=0, seed=(1, 3))


@pytest.mark.parametrize("seq_len", [4096, 32768])
def test_padding_is_under_one_percent_on_a_web_like_length_distribution(seq_len: int) -> None:
    """Log-normal lengths (median 500 tokens, mean about 900, a tail of tens of thousands), cut at seq_len."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(np.log(500), 1.1, size=100_000).astype(int) + 1, seq_len).tolist()
    position, pool, used, sequences = 0, [], 0, 0
    while position < len(lengths):
        held = sum(pool)
        while held < 16 * seq_len and position < len(lengths):
            pool.append(lengths[position])
            held += lengths[position]
            position += 1
        groups, carried = pack_block(pool, seq_len, flush=position == len(lengths), max_carry=16, seed=(position,))
        used += sum(pool[item] for group in groups for item in group)
        sequences += len(groups)
        pool = [pool[item] for item in carried]
    assert used == sum(lengths)
    padding = 1 - used / (sequences * seq_len)
    print(f"padding {padding:.3%} of {sequences} sequences of {seq_len}")
    assert padding < 0.01
