"""Run the fuzzer: `python -m tests.fuzz --examples 20000`. Results: benchmarks/results/fuzz.json.

Each kind of input gets its share of the examples, in a process of bounded memory that may write in its sandbox alone.
Exit status 1 where one ended in neither a coded error nor a right result; each such plan is printed, shrunk.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from benchmarks.report import RESULTS, host, parser, write
from tests.fuzz.plans import CACHE, TRAINER
from tests.fuzz.reader import Reader, fuzz, reader_of

WEIGHTS = {"data": 4, "footer": 4, "table": 4}
BATCH = 125


_readers: dict[str, Reader] = {}  # of this process; starting one costs seconds


def batch(job: tuple[str, int, int]) -> tuple[str, Counter[str], list[str]]:
    """Run some plans of a kind."""
    kind, examples, seed = job
    if reader_of(kind) not in _readers:
        _readers[reader_of(kind)] = Reader(reader_of(kind))
    return kind, *fuzz(_readers[reader_of(kind)], kind, examples, seed)


def main() -> int:
    """Run all kinds and write what came of them."""
    options = parser(__doc__ or "", examples=20_000, processes=2, seed=0, out=None, only="").parse_args()
    began, first = time.monotonic(), options.seed or random.SystemRandom().randrange(2**31)
    kinds = [k for k in (*CACHE, *TRAINER) if options.only in ("", k)]
    total = sum(WEIGHTS.get(kind, 1) for kind in kinds)
    jobs = []
    for kind in kinds:
        left = -(-options.examples * WEIGHTS.get(kind, 1) // total)
        while left > 0:
            jobs.append((kind, min(BATCH, left), first + len(jobs)))
            left -= BATCH
    random.Random(first).shuffle(jobs)  # an interrupted run has seen every kind
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    findings: list[str] = []
    with ProcessPoolExecutor(options.processes) as pool:
        waiting = [pool.submit(batch, job) for job in jobs]
        for number, finished in enumerate(as_completed(waiting), 1):
            kind, counted, found = finished.result()
            outcomes[kind].update(counted)
            findings += found
            for finding in found:
                print(finding, flush=True)
            inputs = sum(c.total() for c in outcomes.values())
            print(f"{number} of {len(jobs)}: {inputs:,} inputs, {len(findings)} findings", flush=True)
            report: dict[str, Any] = {
                "inputs": inputs, "findings": len(findings), "seed": first, "seconds": round(time.monotonic() - began),
                **host(), "command": "python -m tests.fuzz",
                "outcomes": {kind: dict(sorted(c.items())) for kind, c in outcomes.items()},
            }  # fmt: skip
            write(options.out or RESULTS / "fuzz.json", report)
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
