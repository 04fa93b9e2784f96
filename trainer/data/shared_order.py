"""One global order of packed sequences, shared by ranks and by the workers of a DataLoader, resumable after each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from teachercache.errors import UsageError
from trainer.data.sequence import PackedSequence

State = dict[str, Any]
"""Where an order continues, JSON-able."""


class SharedOrder(IterableDataset[PackedSequence], ABC):
    """An order of packed sequences of which rank r of `world_size` takes every `world_size`-th.

    `state` is where the order begins. Raises UsageError for a rank outside [0, world_size).
    """

    def __init__(self, *, rank: int, world_size: int, state: State) -> None:
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} must lie in [0, world_size {world_size})")
        self.rank, self.world_size = rank, world_size
        self._after = state
        self._read_by_workers = torch.zeros(1, dtype=torch.int8).share_memory_()

    @abstractmethod
    def all_sequences(
        self, state: State, mine: Callable[[int], bool] | None
    ) -> Iterator[tuple[PackedSequence | None, State]]:
        """Yield the whole order from a state on, each sequence with the state after it.

        `mine` is asked with the number of each, counted from 0 here; those of others are None. Without it all are ours.
        """

    def state(self) -> State:
        """Return where the next sequence starts; small and JSON-able.

        Raises UsageError where workers of a DataLoader read: how far its reader is, only `sequence.state` says.
        """
        if self._read_by_workers[0]:
            raise UsageError(
                f"workers of a DataLoader read this {type(self).__name__}: take the state from the last sequence "
                "(sequence.state)"
            )
        return self._after

    def __iter__(self) -> Iterator[PackedSequence]:
        worker = get_worker_info()
        if worker is not None:
            self._read_by_workers[0] = 1
        for sequence, after in self.with_states():
            self._after = after
            yield replace(sequence, state=after)

    def with_states(self, state: State | None = None) -> Generator[tuple[PackedSequence, State]]:
        """Iterate over (sequence, the state that continues after it), from `state` or this object's on.

        Of several ranks each gets its own sequences, with the state after the round of `world_size` that they are of.
        """
        worker = get_worker_info()
        index, count = (worker.id, worker.num_workers) if worker is not None else (0, 1)

        def mine(number: int) -> bool:
            turn, rank = divmod(number, self.world_size)
            return rank == self.rank and turn % count == index

        held: PackedSequence | None = None
        after: State = {}
        shared = self.world_size * count > 1
        for number, (sequence, after) in enumerate(self.all_sequences(state or self._after, mine if shared else None)):
            held = sequence if sequence is not None else held
            if held is not None and (number + 1) % self.world_size == 0:
                yield held, after
                held = None
        if held is not None:  # the last round is not full
            yield held, after
