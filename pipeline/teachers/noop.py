"""A teacher without a model: rows are a fixed function of the tokens, so tests can tell right rows from wrong ones.

Row at position p: K distinct ids that start at a hash of (token, next token), and log-probabilities of a geometric
distribution. Faults can be asked for through engine_args, for tests of everything around the teacher:
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
from pipeline.teachers.base import Generated, PendingInput, Prompt, Scored, Teacher


def expected_columns(input_ids: np.ndarray, top_k: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the (ids [n, 1+K], logprobs [n, 1+K]) that this teacher gives."""
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
    """Rows of `expected_columns`, of everything that is queued at each `collect`."""

    def __init__(self, config: TeacherConfig, vocab_size: int) -> None:
        self.top_k = min(config.top_k, vocab_size)
        self.vocab_size = vocab_size
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

    def columns(self, item: PendingInput) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, logprobs), each [n, 1+K], NaN where the input holds the token of fault `nan`."""
        ids, logprobs = expected_columns(item.input_ids, self.top_k, self.vocab_size)
        if self.nan is not None and (item.input_ids == self.nan).any():
            logprobs[:] = np.nan
        return ids, logprobs

    def generate(
        self, prompts: Sequence[Prompt], config: GenerateConfig, stop_ids: Sequence[int] = ()
    ) -> list[Generated]:
        """Return up to five tokens made of the prompt's last one and the seed; even seeds then write a stop id."""
        made = []
        for prompt in prompts:
            first = int(prompt.ids[-1]) + 1 + prompt.seed
            ids = (first + np.arange(min(prompt.most, 5), dtype=np.int64)) % self.vocab_size
            stops = bool(stop_ids) and prompt.seed % 2 == 0
            if stops:
                ids[-1] = stop_ids[0]
            made.append(Generated(ids.astype(np.int32), "stop" if stops else "length"))
        return made
