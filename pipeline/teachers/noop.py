"""A teacher without a model: rows are a fixed function of the tokens, so tests can tell right rows from wrong ones.

Row at position p: K distinct ids that start at a hash of (token, next token), and log-probabilities of a geometric
distribution.  Faults can be asked for through engine_args, for tests of everything around the teacher:
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

import numpy as np

from pipeline.config import GenerateConfig, TeacherConfig
from pipeline.teachers.base import (
    Batch,
    EngineDied,
    Generated,
    Prompt,
    RowsInvalid,
    Scored,
    Teacher,
    rows_from_columns,
)


def expected_columns(input_ids: np.ndarray, top_k: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids [n, 1+K], logprobs [n, 1+K]) that this teacher gives."""
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
    return np.concatenate([following[:, None], top], axis=1).astype(np.int32), logprobs


class NoopTeacher(Teacher):
    def __init__(self, config: TeacherConfig, vocab_size: int) -> None:
        self.top_k = min(config.top_k, vocab_size)
        self.vocab_size = vocab_size
        self.provenance = {"engine": "noop", "path": "noop"}
        args = dict(config.engine_args)
        self._delay_s = float(args.pop("delay_s", 0.0))
        self._poison = args.pop("poison", None)
        self._nan = args.pop("nan", None)
        self._kills = bool(args.pop("poison_kills", False))
        self._queue: list[Batch] = []

    def submit(self, key: int, input_ids: np.ndarray, row_pos: np.ndarray) -> None:
        self._queue.append(Batch(key, input_ids, row_pos))

    def collect(self) -> list[Scored]:
        if not self._queue:
            return []
        if self._delay_s:
            time.sleep(self._delay_s)
        if self._poison is not None and any((b.input_ids == self._poison).any() for b in self._queue):
            if self._kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise EngineDied("noop: an input holds the poisonous token", [b.key for b in self._queue])
        done, self._queue = self._queue, []
        return [self._rows(batch) for batch in done]

    def _rows(self, batch: Batch) -> Scored:
        ids, logprobs = expected_columns(batch.input_ids, self.top_k, self.vocab_size)
        if self._nan is not None and (batch.input_ids == self._nan).any():
            logprobs[:] = np.nan
        try:
            rows = rows_from_columns(batch.input_ids, batch.row_pos, ids, logprobs, self.top_k, self.vocab_size)
        except RowsInvalid as error:
            return Scored(batch.key, None, error)
        return Scored(batch.key, rows)

    def pending(self) -> int:
        return len(self._queue)

    def generate(
        self, prompts: Sequence[Prompt], config: GenerateConfig, stop_ids: Sequence[int] = ()
    ) -> list[Generated]:
        """Up to five tokens that depend on the prompt's last one and the seed; even seeds then write a stop id."""
        made = []
        for prompt in prompts:
            first = int(prompt.ids[-1]) + 1 + prompt.seed
            ids = (first + np.arange(min(prompt.most, 5), dtype=np.int64)) % self.vocab_size
            stops = bool(stop_ids) and prompt.seed % 2 == 0
            if stops:
                ids[-1] = stop_ids[0]
            made.append(Generated(ids.astype(np.int32), "stop" if stops else "length"))
        return made
