"""A teacher without a model: rows are a fixed function of the tokens, so tests can tell right rows from wrong ones.

Row at position p: K distinct ids that start at a hash of the token, and log-probabilities of a geometric distribution;
the rest is spread evenly over the vocabulary. Sampled rows are drawn from 3·n such ids, geometric, with all the
mass. Faults can be asked for through engine_args, for tests of everything around the teacher:
    delay_s            sleep per collect
    poison             token id: an input that holds it makes the engine die
    nan                token id: an input that holds it gets NaN rows
    poison_kills       true: the whole process dies at once (SIGKILL), as a segfault or the OOM killer would do it
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from pipeline.config import GenerateConfig, TeacherConfig
from pipeline.errors import EngineDied
from pipeline.teachers.base import Columns, Generated, PendingInput, Prompt, RowsWanted, Scored, Teacher
from teachercache.format.record import key_uniforms
from teachercache.format.sampled import LOG_ZERO, sample_row
from teachercache.format.spec import SampledRows


def expected_columns(input_ids: np.ndarray, top_k: int, vocab_size: int) -> Columns:
    """Return the top-K rows that this teacher gives."""
    n = len(input_ids)
    following = np.append(input_ids[1:], 0).astype(np.int64)
    first = (input_ids.astype(np.int64) * 31 + 7) % vocab_size
    top = (first[:, None] + np.arange(top_k)[None, :]) % vocab_size
    # geometric: p_k = 0.9 (1-q) q^k / (1-q^K), K terms sum to 0.9
    q = 0.97
    p = 0.9 * (1 - q) * q ** np.arange(top_k) / (1 - q**top_k)
    logprobs = np.empty((n, top_k + 1), dtype=np.float32)
    logprobs[:, 1:] = np.log(p)
    place = (following - first) % vocab_size
    logprobs[:, 0] = np.where(place < top_k, np.log(p)[np.minimum(place, top_k - 1)], np.log(0.1 / vocab_size))
    entropy = -(p * np.log(p)).sum() - 0.1 * np.log(0.1 / max(1, vocab_size - top_k))
    ids = np.concatenate([following[:, None], top], axis=1).astype(np.int32)
    return Columns(ids, logprobs, np.full(n, entropy, dtype=np.float32))


def expected_sample(input_ids: np.ndarray, row_pos: np.ndarray, wanted: RowsWanted) -> Columns:
    """Return the sampled rows that this teacher gives: those of the reference, drawn one at a time."""
    rows = wanted.rows
    assert isinstance(rows, SampledRows)
    n, width = len(input_ids), min(3 * rows.entries, wanted.vocab_size)
    following = np.append(input_ids[1:], 0).astype(np.int64)
    first = (input_ids.astype(np.int64) * 31 + 7) % wanted.vocab_size
    p = 0.8 ** np.arange(width)
    p /= p.sum()
    u = key_uniforms(wanted.key(input_ids, row_pos), np.arange(n))
    ids = np.empty((n, 1 + rows.entries), dtype=np.int32)
    logprobs = np.empty((n, 1 + rows.entries), dtype=np.float32)
    exact, tail = np.empty(n, dtype=np.int32), np.empty(n, dtype=np.float32)
    for i in range(n):
        row = sample_row((first[i] + np.arange(width)) % wanted.vocab_size, p, rows.entries, rows.exact, u[i])
        ids[i, 1:], logprobs[i, 1:], exact[i], tail[i] = row.ids[0], row.logprobs, row.exact, row.tail
    place = (following - first) % wanted.vocab_size
    ids[:, 0] = following
    logprobs[:, 0] = np.where(place < width, np.log(p)[np.minimum(place, width - 1)], LOG_ZERO)
    return Columns(ids, logprobs, np.full(n, -(p * np.log(p)).sum(), dtype=np.float32), exact, tail)


class NoopTeacher(Teacher):
    """Rows of `expected_columns`, of everything that is queued at each `collect`."""

    def __init__(self, config: TeacherConfig, wanted: RowsWanted) -> None:
        self.wanted = wanted
        self.provenance = {"engine": "noop", "path": "noop"}
        args = config.engine_args
        self._delay_s = float(args.get("delay_s", 0.0))
        self._poison, self.nan = args.get("poison"), args.get("nan")
        self._kills = bool(args.get("poison_kills", False))
        self.queue: list[PendingInput] = []

    def submit(self, key: int, input_ids: np.ndarray, row_pos: np.ndarray) -> None:
        """Queue an input."""
        self.queue.append(PendingInput(key, input_ids, row_pos))

    def collect(self) -> list[Scored]:
        """Score everything that is queued, with the faults that engine_args ask for."""
        if not self.queue:
            return []
        if self._delay_s:
            time.sleep(self._delay_s)
        if self._poison is not None and any((b.input_ids == self._poison).any() for b in self.queue):
            if self._kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise EngineDied("noop: an input holds the poisonous token", [b.key for b in self.queue])
        done, self.queue = self.queue, []
        return [self.scored(item, partial(self.columns, item)) for item in done]

    def columns(self, item: PendingInput) -> Columns:
        """Return the rows, NaN where the input holds the token of fault `nan`."""
        rows, vocab_size = self.wanted.rows, self.wanted.vocab_size
        if rows.kind == "sampled":
            columns = expected_sample(item.input_ids, item.row_pos, self.wanted)
        else:
            columns = expected_columns(item.input_ids, rows.entries, vocab_size)
        if self.nan is not None and (item.input_ids == self.nan).any():
            columns.logprobs[:] = np.nan
        return columns

    def generate(
        self, prompts: Sequence[Prompt], config: GenerateConfig, stop_ids: Sequence[int] = ()
    ) -> list[Generated]:
        """Return up to five tokens made of the prompt's last one and the seed; even seeds then write a stop id."""
        made = []
        for prompt in prompts:
            first = int(prompt.ids[-1]) + 1 + prompt.seed
            ids = (first + np.arange(min(prompt.most, 5), dtype=np.int64)) % self.wanted.vocab_size
            stops = bool(stop_ids) and prompt.seed % 2 == 0
            if stops:
                ids[-1] = stop_ids[0]
            made.append(Generated(ids.astype(np.int32), "stop" if stops else "length"))
        return made
