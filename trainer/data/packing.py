"""Best-fit packing of documents into sequences: plain integers in, plain integers out.

A sequence holds whole documents only. The packer works on blocks of records, keeps what did not fill a sequence for
the next block, and empties itself every few blocks, so that a resumed run repeats a bounded amount of reading.

Cost: O(n log n) comparisons for n documents of a block. Padding: on documents much shorter than a sequence under 1 %
(tests measure it); documents just above half a sequence cannot be paired with one another, whatever the packer.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

FULL_ENOUGH = 0.995
"""A sequence this full is sent on; an emptier one waits for the next block's documents."""


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items of the given lengths into bins of `capacity`: longest first, each into the fullest bin that has room.

    Returns lists of indices into `lengths`; ties go to the earlier item, so the answer depends on the input alone.
    Raises ValueError when an item is longer than a bin or empty.
    """
    if any(not 0 < length <= capacity for length in lengths):
        raise ValueError(f"every length must lie in [1, {capacity}], found {min(lengths)} to {max(lengths)}")
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending: the first entry that fits is the fullest bin
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        slot = bisect_left(room, (lengths[item], -1))
        if slot == len(room):
            bins.append([item])
            left, target = capacity - lengths[item], len(bins) - 1
        else:
            left, target = room.pop(slot)
            bins[target].append(item)
            left -= lengths[item]
        insort(room, (left, target))
    return bins


def pack_block(
    lengths: Sequence[int], capacity: int, *, flush: bool, max_carry: int, seed: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """Pack one block: return the sequences to send on, in an order drawn from `seed`, and the items to carry over.

    With `flush` nothing is carried. Otherwise the emptiest sequences are, up to `max_carry` of them: a bound, so that
    documents that fit with nothing cannot pile up.
    """
    bins = best_fit(lengths, capacity)
    filled = [sum(lengths[item] for item in items) for items in bins]
    carried: set[int] = set()
    if not flush:
        emptiest = sorted(range(len(bins)), key=lambda b: (filled[b], b))
        carried = {b for b in emptiest[:max_carry] if filled[b] < FULL_ENOUGH * capacity}
    ready = [items for b, items in enumerate(bins) if b not in carried]
    # Longest-first packing sorts sequences by document length; training on them in that order would be a curriculum.
    order = np.random.default_rng(list(seed)).permutation(len(ready))
    return [ready[i] for i in order], sorted(item for b in carried for item in bins[b])
