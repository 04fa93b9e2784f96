"""The interface of every teacher: inputs are submitted, rows are collected as they finish; and the checks on them.

The interface is asynchronous in the plainest way, because an engine with continuous batching is only fast while
inputs wait inside it: `submit` never blocks, `collect` is one step of the engine, and more may be submitted between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pipeline.config import GenerateConfig
from pipeline.errors import RowsInvalid
from teachercache import CacheSpec
from teachercache.errors import TeacherCacheError
from teachercache.format.record import content_key, row_key, tail_from_logprobs
from teachercache.format.spec import Rows, TopKRows


@dataclass(frozen=True, slots=True)
class RowsWanted:
    """What is asked of a teacher: the kind of rows, ids below `vocab_size` alone, draws keyed by the spec's digest."""

    rows: Rows
    vocab_size: int
    spec_digest: str = ""

    @classmethod
    def of(cls, spec: CacheSpec) -> RowsWanted:
        """Return what a cache asks for."""
        return cls(spec.rows, spec.tokenizer.vocab_size, spec.digest)

    @property
    def plain(self) -> RowsWanted:
        """Return the same with the most probable tokens in place of a sample: all that an engine's public path gives."""
        return RowsWanted(TopKRows(entries=self.rows.entries), self.vocab_size, self.spec_digest)

    def key(self, input_ids: np.ndarray, row_pos: np.ndarray) -> int:
        """Return the 64-bit key of an input's random numbers."""
        return row_key(self.spec_digest, content_key(self.spec_digest, input_ids, row_pos))


@dataclass(slots=True)
class EngineRows:
    """Rows of one input at its row positions: K ids and log-probabilities, tail and target, as a Record has them.

    topk_ids int32 [r, K]; topk_logprobs float32 [r, K]; tail_logprob float32 [r]; target_logprob float32 [r],
    NaN after the last token; entropy float32 [r], NaN where the engine cannot say; exact uint16 [r] of sampled rows.
    """

    topk_ids: np.ndarray
    topk_logprobs: np.ndarray
    tail_logprob: np.ndarray
    target_logprob: np.ndarray
    entropy: np.ndarray
    exact: np.ndarray | None = None


class Columns(NamedTuple):
    """An engine's answer for every position of an input of n tokens.

    ids int [n, 1+K], logprobs float32 [n, 1+K]: column 0 is the token that really follows (in the last row whatever the
    engine sampled), columns 1..K the row. entropy float32 [n]. Of sampled rows also exact int [n], and tail float32 [n],
    the log of the mass outside the exact entries.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    entropy: np.ndarray | None = None
    exact: np.ndarray | None = None
    tail: np.ndarray | None = None


@dataclass(slots=True)
class Scored:
    """A finished input: its rows, or why there are none."""

    key: int
    rows: EngineRows | None
    error: RowsInvalid | None = None


@dataclass(slots=True)
class PendingInput:
    """An input inside a teacher: input_ids int32 [n], row_pos int32 [r]."""

    key: int
    input_ids: np.ndarray
    row_pos: np.ndarray


@dataclass(slots=True)
class Prompt:
    """What a teacher continues: ids int32 [n], BOS included, by at most `most` tokens, sampled from `seed`."""

    ids: np.ndarray
    seed: int
    most: int


@dataclass(slots=True)
class Generated:
    """A continuation: ids int32 [m] (an end token included when the teacher wrote one), and why it stopped.

    finish_reason is `stop` at an end token, else `length`.
    """

    ids: np.ndarray
    finish_reason: str


class Teacher(ABC):
    """One running teacher. Not thread-safe: one thread owns it."""

    wanted: RowsWanted
    provenance: dict[str, Any]  # engine version, path that makes rows, hardware: written into commits

    @abstractmethod
    def submit(self, key: int, input_ids: np.ndarray, row_pos: np.ndarray) -> None:
        """Take an input: input_ids int32 [n], row_pos int32 [r]. Raises EngineDied."""

    @abstractmethod
    def collect(self) -> list[Scored]:
        """Advance the engine by one step and return the inputs that finished, often none. Raises EngineDied."""

    def accelerate(self) -> None:  # noqa: B027  (most teachers have nothing to switch on)
        """Switch on what changes how rows are made inside the engine; the canary compares before and after."""

    def generate(
        self, prompts: Sequence[Prompt], config: GenerateConfig, stop_ids: Sequence[int] = ()
    ) -> list[Generated]:
        """Return continuations, ended by the teacher's end tokens or one of `stop_ids`. Called with nothing pending."""
        raise TeacherCacheError(f"{type(self).__name__} cannot generate; use engine vllm or hf")

    def close(self) -> None:  # noqa: B027
        """Free the engine."""

    def submit_public(self, key: int, input_ids: np.ndarray, row_pos: np.ndarray) -> None:
        """Take an input that must go the engine's public way, whatever `submit` does: for the canary and tests."""
        self.submit(key, input_ids, row_pos)

    def score(self, inputs: Sequence[np.ndarray], public: bool = False) -> list[Scored]:
        """Return all rows of a few inputs, in order: for the canary and tests."""
        submit = self.submit_public if public else self.submit
        for key, ids in enumerate(inputs):
            submit(key, ids, np.arange(len(ids), dtype=np.int32))
        found: dict[int, Scored] = {}
        while len(found) < len(inputs):
            found.update((scored.key, scored) for scored in self.collect())
        return [found[key] for key in range(len(inputs))]

    def scored(self, item: PendingInput, columns: Callable[[], Columns]) -> Scored:
        """Return the rows of `columns()`, or the RowsInvalid that it or a check raised; see rows_from_columns."""
        return scored(item, columns, self.wanted)


def scored(item: PendingInput, columns: Callable[[], Columns], wanted: RowsWanted) -> Scored:
    """Return the rows of `columns()`, or the RowsInvalid that it or a check raised; see rows_from_columns."""
    try:
        return Scored(item.key, rows_from_columns(item.input_ids, item.row_pos, columns(), wanted))
    except RowsInvalid as error:
        return Scored(item.key, None, error)


def end_tokens(own: int | Sequence[int] | None, stop_ids: Sequence[int]) -> list[int]:
    """Return where a teacher stops: the `eos_token_id` of its generation config, and the template's end markers."""
    return sorted({*([] if own is None else [own] if isinstance(own, int) else own), *stop_ids})


def rows_from_columns(input_ids: np.ndarray, row_pos: np.ndarray, columns: Columns, wanted: RowsWanted) -> EngineRows:
    """Return the wanted rows of an engine's answer for one input, int32 [n], checked.

    Entries keep their columns: ranks collide at ties. Columns without `exact` are rows of the most probable tokens.
    Raises RowsInvalid. Cost: about 2 µs a row at K = 100.
    """
    n, top_k = len(input_ids), wanted.rows.entries
    ids, logprobs = columns.ids, columns.logprobs
    if ids.shape != (n, top_k + 1) or logprobs.shape != ids.shape:
        raise RowsInvalid("shape", f"expected {(n, top_k + 1)} ids and log-probabilities, found {ids.shape}")
    if not np.array_equal(ids[:-1, 0], input_ids[1:]):
        wrong = int(np.flatnonzero(ids[:-1, 0] != input_ids[1:])[0])
        found = f"column 0 holds id {int(ids[wrong, 0])}, the next token is {input_ids[wrong + 1]}"
        raise RowsInvalid("column_zero", f"row {wrong}: {found}")
    whole = len(row_pos) == n

    def at_rows(column: np.ndarray) -> np.ndarray:
        return column if whole else column[row_pos]  # a copy, so not where every row is wanted

    ids, logprobs = at_rows(ids), at_rows(logprobs)
    top_ids, top, target = ids[:, 1:], logprobs[:, 1:], logprobs[:, 0].astype(np.float32)
    if not np.isfinite(top).all():
        reason = "nan" if np.isnan(top).any() else "inf"
        first = int(row_pos[np.flatnonzero(~np.isfinite(top).all(axis=1))[0]])
        count = f"{int((~np.isfinite(top)).sum())} of {top.size} log-probabilities are {reason}"
        raise RowsInvalid(reason, f"{count}, the first in the row at token {first} of the input")
    if not top.any(axis=1).all():
        raise RowsInvalid("zero_row", "a row holds only zeros: the engine never filled it")
    if columns.exact is None and (np.diff(top, axis=1) > 0).any():
        raise RowsInvalid("unsorted", "the top-K of a row does not descend")
    if top_ids.size and (int(top_ids.max()) >= wanted.vocab_size or int(top_ids.min()) < 0):
        # a head padded beyond the tokenizer may rank a token that does not exist: there is no honest id to store
        ranked = f"the teacher ranks id {int(top_ids.max())}, the tokenizer has {wanted.vocab_size}"
        raise RowsInvalid("id_out_of_range", ranked)
    if len(row_pos) and row_pos[-1] == n - 1:
        target[-1] = np.nan
    tail = tail_from_logprobs(top) if columns.tail is None else at_rows(columns.tail)
    entropy = np.full(len(row_pos), np.nan) if columns.entropy is None else at_rows(columns.entropy)
    return EngineRows(
        topk_ids=np.ascontiguousarray(top_ids, dtype=np.int32),
        topk_logprobs=np.ascontiguousarray(top, dtype=np.float32),
        tail_logprob=tail.astype(np.float32),
        target_logprob=np.where(np.isfinite(target), target, np.nan).astype(np.float32),
        entropy=entropy.astype(np.float32),
        exact=None if columns.exact is None else at_rows(columns.exact).astype(np.uint16),
    )
