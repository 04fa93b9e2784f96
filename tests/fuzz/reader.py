"""Hand plans to a bounded process, and judge how it ends."""

from __future__ import annotations

import multiprocessing
import re
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz import worker
from tests.fuzz.plans import CACHE, plan

SECONDS = 120.0
CODED = re.compile(r"TC-[A-Z]\d{3}")


class Reader:
    """A process that reads mutated input; a new one where it dies."""

    def __init__(self, kinds: str) -> None:
        self.kinds, self.deaths = kinds, 0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=worker.serve, args=(theirs, self.kinds), daemon=True)
        self._process.start()
        theirs.close()
        assert self._pipe.poll(10 * SECONDS), "the reader does not start"
        self._pipe.recv()

    def ask(self, kind: str, changes: Any) -> tuple[str, str]:
        """Return how reading ended: a code, `right`, or what went wrong, with its traceback."""
        self._pipe.send((kind, changes))
        try:
            if self._pipe.poll(SECONDS):
                answer: tuple[str, str] = self._pipe.recv()
                return answer
            self._process.kill()
            said = "hangs"
        except (EOFError, ConnectionError):
            said = "dies"
        self._process.join()
        self.deaths += 1
        ended = f"{said}, exit code {self._process.exitcode}"
        self._start()
        return ended, ""

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(10)
        self._process.kill()


def fuzz(
    reader: Reader, kind: str, examples: int, number: int, *, shrink: bool = True
) -> tuple[Counter[str], list[str]]:
    """Return how often each outcome came up over `examples` plans of a kind, and what was neither coded nor right."""
    outcomes: Counter[str] = Counter()
    findings: list[str] = []
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]

    @seed(number)
    @settings(
        max_examples=examples, deadline=None, database=None, phases=phases, suppress_health_check=list(HealthCheck)
    )
    @given(plan(kind))
    def run(changes: Any) -> None:
        ended, trace = reader.ask(kind, changes)
        outcomes[ended] += 1
        if ended != "right" and not CODED.fullmatch(ended):
            findings.append(f"{kind} {changes!r}: {ended}\n{trace}")
            if shrink:
                raise AssertionError(findings[-1])

    try:
        run()
    except (AssertionError, BaseExceptionGroup):
        findings[:] = findings[-1:]
    return outcomes, findings


def reader_of(kind: str) -> str:
    """Return which process reads a kind."""
    return "cache" if kind in CACHE else "state" if kind == "state" else "trainer"
