"""Speed of encoding conversations: this tree against an earlier commit, pairs of runs in one go.

    python benchmarks/chat_encoding.py [--commit 5983d67] [--pairs 7] [--model build/models/smollm2-135m]

Two processes, one with the code of the commit (`git archive` into a temporary folder), encode the same conversations in
turns: one question, four questions, and calls with results under tests/pipeline/templates/qwen3.jinja. The time is that of
the processor, all threads, so that other work on the machine counts little. Prints and stores the median ratio of each
kind, new speed to old: benchmarks/results/chat_encoding.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QWEN3 = ROOT / "tests/pipeline/templates/qwen3.jinja"
DOCUMENTS = 64


def conversations() -> dict[str, list[dict[str, Any]]]:
    """Return conversations of each kind, with texts of Python's reference, 200 to 1,400 characters a turn."""
    texts = [t[i : i + 200 + 100 * (i % 13)] for t in topics.values() for i in range(0, len(t) - 1400, 1400)]

    def turns(index: int, count: int) -> list[dict[str, Any]]:
        pick = [texts[(index * 7 + n) % len(texts)] for n in range(2 * count)]
        return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(pick)]

    call = {"type": "function", "function": {"name": "look_up", "arguments": {"topic": "lists", "count": 3}}}
    tool = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": texts[0][:300]}]
    made = {"one question": [], "four questions": [], "calls": []}
    for index in range(DOCUMENTS):
        first, second = turns(index, 1), turns(index + 1, 1)
        made["one question"].append({"messages": first})
        made["four questions"].append({"messages": turns(index, 4)})
        made["calls"].append({"messages": [first[0], *tool, first[1], second[0], *tool, second[1]]})
    return made


def serve(root: str, model: str) -> None:
    """Encode the conversations of each kind named on standard input with the code in `root`; print seconds and tokens."""
    sys.path.insert(0, root)
    from pipeline.config import parse_job
    from pipeline.corpus.documents import extract
    from pipeline.corpus.encode import Encoder
    from pipeline.corpus.readers import RawDocument

    corpus = {"files": ["unused"], "fields": {"messages": "messages"}}
    job = {"cache": "unused", "teacher": {"model": model, "engine": "noop"}, "corpora": [corpus]}
    tool_job = parse_job(job | {"recipe": {"chat": {"template": str(QWEN3)}}})
    encoders = {"calls": Encoder(tool_job, model)}
    encoders["one question"] = encoders["four questions"] = Encoder(parse_job(job), model)
    rows = conversations()
    for line in sys.stdin:
        kind = line.strip()
        began = time.process_time()
        raws = (RawDocument(i, row) for i, row in enumerate(rows[kind]))
        batch = [extract(raw, tool_job.corpora[0], tool_job.recipe.filters, "d") for raw in raws]
        tokens = sum(len(made.ids) for made in encoders[kind].tokens(batch))
        print(json.dumps([time.process_time() - began, tokens]), flush=True)


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from benchmarks.report import RESULTS, host, parser, write

    options = parser(
        __doc__, commit="5983d67", pairs=7, model=ROOT / "build/models/smollm2-135m", out=RESULTS / "chat_encoding.json"
    ).parse_args()
    with tempfile.TemporaryDirectory() as name:
        packed = subprocess.run(["git", "archive", options.commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", name], input=packed, check=True)
        sides = {}
        for side, root in (("old", name), ("new", str(ROOT))):
            command = [sys.executable, __file__, "--serve", root, str(options.model)]
            env = {**os.environ, "PYTHONPATH": root}
            sides[side] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

        def seconds(side: str, kind: str) -> float:
            process = sides[side]
            assert process.stdin is not None
            assert process.stdout is not None
            print(kind, file=process.stdin, flush=True)
            return float(json.loads(process.stdout.readline())[0])

        report: dict[str, Any] = {"old": options.commit, "documents": DOCUMENTS, "kinds": {}}
        for kind in conversations():
            pairs = []
            for number in range(options.pairs + 1):  # the first is to warm up
                order = ("old", "new") if number % 2 else ("new", "old")
                taken = {side: seconds(side, kind) for side in order}
                pairs.append({side: round(taken[side], 4) for side in ("old", "new")})
            ratios = [pair["old"] / pair["new"] for pair in pairs[1:]]
            report["kinds"][kind] = {
                "median_ratio": round(statistics.median(ratios), 3),
                "processor_seconds": pairs[1:],
            }
            print(f"{kind}: {statistics.median(ratios):.2f} × the speed of {options.commit}", flush=True)
        for process in sides.values():
            process.communicate()
    write(options.out, report | {"load_average": os.getloadavg(), **host()})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:4])
    else:
        main()
