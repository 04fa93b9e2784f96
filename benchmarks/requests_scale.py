"""Requests of each command for a cache of 1,000 shards, through a proxy that counts: benchmarks/results/requests.json.

    python benchmarks/requests_scale.py [--documents 960] [--upkeep 0]

A no-op teacher makes the cache, about a document a shard, some of which are empty; the store is
localbucket on this machine. --upkeep 1 also counts publishing anew and optimising. tests/pipeline/test_requests.py does
the same for 100 documents with budgets.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import RESULTS, host, parser, write
from pipeline.config import parse_job
from tests.deploy.small import make_tokenizer
from tests.pipeline.conftest import documents, write_jsonl
from tests.pipeline.requests_of import measured
from tests.servers import serve

BUDGETS = {
    "open": 8,
    "status": 1050,
    "run, complete": 60,
    "gc, dry": 1100,
    "run, 10 shards more": 250,
    "verify, a sample of 10": 100,
}


def main() -> int:
    options = parser(__doc__, documents=960, upkeep=0, out=RESULTS / "requests.json").parse_args()
    with tempfile.TemporaryDirectory() as name, serve("localbucket", Path(name, "s3")) as server:
        folder = Path(name)
        os.environ.update(server.env())
        model = make_tokenizer(folder / "teacher")

        def load(cache: str, files: list[Path]):
            corpus = {"source": "s", "files": [str(f) for f in files], "fields": {"text": "text", "id": "id"}}
            return parse_job(
                {
                    "cache": cache,
                    "teacher": {"model": str(model), "engine": "noop", "max_model_len": 512},
                    "rows": {"kind": "top_k", "entries": 8},
                    "corpora": [corpus],
                    "run": {"executor": "inline", "shard_bytes": 150, "log_every_s": 600},
                }
            )

        def corpus(first: int, count: int) -> Path:
            return write_jsonl(folder / f"corpus-{first}.jsonl", documents(first + count)[first:])

        counts = measured(
            load, corpus, folder, server, options.documents,
            lambda endpoint: os.environ.update(AWS_ENDPOINT_URL=endpoint), upkeep=bool(options.upkeep),
        )  # fmt: skip
    over = {key: counts[key] for key, most in BUDGETS.items() if counts[key] > most}
    write(options.out, {"requests": counts, "budgets": BUDGETS, "over": over, "store": "localbucket", **host()})
    print(json.dumps(counts, indent=2))
    return 1 if over else 0


if __name__ == "__main__":
    raise SystemExit(main())
