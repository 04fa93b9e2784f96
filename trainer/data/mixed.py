"""Packed sequences of several caches in one order, mixed by weight and resumable exactly.

A sequence holds documents of one cache, so its rows are of one kind and width. Weights count sequences: cache c gives
its k-th sequence at the time (k + u_c) / w_c, with u_c in [0, 1) drawn from the seed, and the order is that of the
times. So after n sequences each cache has given n w_c / sum(w) of them, less or more by about one, whatever is in them,
and the order of the caches is known without reading.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from teachercache.errors import TeacherCacheError, UsageError
from trainer.data.dataset import DataCounts, PackedCache
from trainer.data.sequence import PackedSequence
from trainer.data.shared_order import SharedOrder, State


class MixedCaches(SharedOrder):
    """Packed sequences of several caches, mixed by weight.

        web, chat = PackedCache(a, seq_len=4096, epochs=None), PackedCache(b, seq_len=4096, epochs=None)
        for sequence in MixedCaches([web, chat], weights=[0.7, 0.3]):
            sequence.cache         # 0 or 1

    weights   of the sequences, positive; their sum does not matter
    rank, world_size   as those of PackedCache; the parts keep their defaults
    state     of this object, or a sequence's `state`: for each cache its manifest's digest, its position and its counts
    The order ends where the next sequence is of a cache whose epochs are over. `sequence.tokens_done` is that of the
    cache which is furthest in its pass, times total_tokens over its own.
    Memory and reading: those of every part, side by side.
    Raises UsageError for weights that are no mixture, TeacherCacheError for a state of another run.
    """

    def __init__(
        self,
        parts: Sequence[PackedCache],
        *,
        weights: Sequence[float],
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        state: State | None = None,
    ) -> None:
        if not parts or len(weights) != len(parts) or not all(0 < weight < math.inf for weight in weights):
            raise UsageError(
                f"a mixture of {len(parts)} caches needs as many weights, positive and finite, found {list(weights)}"
            )
        self.parts, self.weights = tuple(parts), [float(weight) for weight in weights]
        self._totals = [part.total_tokens for part in parts]
        self.total_tokens = sum(self._totals)
        """Tokens of one epoch of every cache."""
        self._offsets = np.random.default_rng([seed, len(parts)]).random(len(parts)).tolist()
        fresh = self._state([part.state() for part in parts])
        super().__init__(rank=rank, world_size=world_size, state=fresh if state is None else self._checked(state))

    def _state(self, caches: list[State]) -> State:
        return {"weights": self.weights, "caches": caches}

    def _checked(self, state: State) -> State:
        caches, weights = state.get("caches"), state.get("weights")
        if not isinstance(caches, list):
            raise TeacherCacheError("cannot resume the data: its state is damaged; resume from an older checkpoint")
        if weights != self.weights or len(caches) != len(self.parts):
            raise TeacherCacheError(
                f"cannot resume the data: the checkpoint has caches of weights {weights}, this run has {self.weights}"
            )
        for part, cache in zip(self.parts, caches, strict=True):
            part.checked(cache)
        return state

    @staticmethod
    def counts_of(state: State) -> DataCounts:
        """Return the sum of the counts of the caches."""
        total: Counter[str] = Counter()
        for cache in state["caches"]:
            total.update(cache["counts"])
        return DataCounts(**total)

    def passes(self) -> list[float]:
        """Return, for each cache, the part of it that is read while the first of them is read once: at most 1."""
        pace = [weight / max(total, 1) for weight, total in zip(self.weights, self._totals, strict=True)]
        return [each / max(pace) for each in pace]

    def whole_run(self, c: int, counts: DataCounts) -> tuple[int, float]:
        """Return about how many of `total_tokens`, and sequences of all caches, are done where cache c has these counts."""
        tokens = counts.tokens_done / self.passes()[c] * (self.total_tokens / self._totals[c])
        return int(tokens), counts.sequences * (sum(self.weights) / self.weights[c])

    def all_sequences(
        self, state: State, mine: Callable[[int], bool] | None
    ) -> Iterator[tuple[PackedSequence | None, State]]:
        """Yield the sequences of all caches in the order of their times."""
        caches: list[State] = list(state["caches"])
        given = [PackedCache.counts_of(cache).sequences for cache in caches]

        def share_of(c: int) -> Callable[[int], bool] | None:
            return mine and (lambda number: mine(self._place(c, given[c] + number) - sum(given)))

        streams = [part.all_sequences(caches[c], share_of(c)) for c, part in enumerate(self.parts)]
        for _, c in heapq.merge(*(self._times(c, first) for c, first in enumerate(given))):
            sequence, after = next(streams[c], (None, None))
            if after is None:
                return
            caches[c] = after
            if sequence is not None:
                done = (cache["counts"]["tokens_done"] for cache in caches)
                scaled = [d * self.total_tokens // t for d, t in zip(done, self._totals, strict=True)]
                sequence = replace(sequence, cache=c, tokens_done=max(scaled))
            yield sequence, self._state(list(caches))

    def _time(self, c: int, k: int) -> tuple[float, int]:
        """Return when cache c gives its k-th sequence; no two sequences have the same."""
        return (k + self._offsets[c]) / self.weights[c], c

    def _times(self, c: int, first: int) -> Iterator[tuple[float, int]]:
        k = first
        while True:
            yield self._time(c, k)
            k += 1

    def _place(self, c: int, k: int) -> int:
        """Return the number, from the start of the run, of cache c's k-th sequence: how many come before it."""
        when, before = self._time(c, k), k
        for other, (weight, offset) in enumerate(zip(self.weights, self._offsets, strict=True)):
            if other != c:
                count = max(0, int(when[0] * weight - offset) - 1)  # not above it, however the product was rounded
                while self._time(other, count) < when:
                    count += 1
                before += count
        return before
