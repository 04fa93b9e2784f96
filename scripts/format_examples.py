"""Make a cache with the no-op teacher and write one JSON object of each kind into docs/FORMAT.md.

    python scripts/format_examples.py

An example lies between `<!-- example: KIND -->` and `<!-- end -->`. It is a real object, made shorter (`shortened`),
sealed again, and broken into lines. `tests/docs/test_format_examples.py` parses each one with its model and checks its
seal. Run this again when a model changes. Attempts and times differ from run to run, so nothing else compares them.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeline.config import parse_job
from pipeline.running.job import run_job
from teachercache.format.schema import MODELS
from teachercache.format.sealed import seal
from tests.deploy.small import job_tree, make_corpus, make_tokenizer

WIDTH = 116
PAGE = Path(__file__).resolve().parent.parent / "docs/FORMAT.md"
EXAMPLE = re.compile(r"(<!-- example: (?P<kind>[\w-]+) -->\n).*?(<!-- end -->)", re.S)


def make_cache(corpus: Path) -> Path:
    """Run the no-op teacher over a corpus; return the cache's folder, which is next to it."""
    cache = corpus.parent / "cache"
    tree = job_tree(str(cache), make_tokenizer(corpus.parent / "teacher"), corpus, executor="inline")
    tree["teacher"]["name"] = "example-8b"
    tree["run"]["shard_bytes"] = 1_000_000
    with contextlib.suppress(Exception):  # a cache whose only shard is quarantined is not published
        run_job(parse_job(tree), say=lambda text: None)
    return cache


def object_of(cache: Path, pattern: str) -> dict[str, Any]:
    """Return the only object of a cache whose name fits, without its seal."""
    (path,) = cache.glob(pattern)
    tree: dict[str, Any] = json.loads(path.read_bytes())
    del tree["seal"]
    return tree


def shortened(trees: dict[str, dict[str, Any]], folder: str) -> dict[str, dict[str, Any]]:
    """Shorten shard ids to 16 digits, give the input a URL, and name the plan by its new digest everywhere."""
    text = json.dumps(trees)
    shard, plan_digest = trees["commit"]["shard_id"], trees["manifest"]["plans"][0]
    text = text.replace(shard, shard[:16]).replace(
        trees["quarantine"]["shard_id"], trees["quarantine"]["shard_id"][:16]
    )
    text = text.replace(folder, "s3://corpora")
    short: dict[str, dict[str, Any]] = json.loads(text)
    short["quarantine"]["message"] = short["quarantine"]["message"].partition(" (")[0]
    short["commit"]["provenance"]["host"] = "node-1"
    plan = MODELS["plan"].model_validate(short["plan"])
    digest: str = plan.digest  # type: ignore[attr-defined]
    return json.loads(json.dumps(short).replace(plan_digest, digest))  # type: ignore[no-any-return]


def broken_into_lines(value: Any, indent: str = "", room: int = WIDTH) -> str:
    """Spell a JSON value: on one line where it fits, else one entry a line."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(flat) <= room or not isinstance(value, (dict, list)) or not value:
        return flat
    inner = indent + "  "
    if isinstance(value, list):
        entries = [broken_into_lines(entry, inner, room - 1) for entry in value]
    else:
        entries = []
        for key, entry in value.items():
            name = json.dumps(key) + ": "
            entries.append(name + broken_into_lines(entry, inner, room - len(name) - 1))
    lines: list[str] = []
    for entry in entries:  # short neighbours share a line
        joined = f"{lines[-1]}, {entry}" if lines else ""
        if lines and "\n" not in joined and len(inner) + len(joined) < room:
            lines[-1] = joined
        else:
            lines.append(entry)
    opening, closing = ("[", "]") if isinstance(value, list) else ("{", "}")
    return f"{opening}\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}{closing}"


def examples() -> dict[str, str]:
    """Return the JSON text of one object of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder, "web/notes.jsonl"), 2)
        cache = make_cache(corpus)
        trees = {
            "spec": object_of(cache, "spec.json"),
            "tokenizer-index": object_of(cache, "tokenizer/*/index.json"),
            "plan": object_of(cache, "plans/*.json"),
            "commit": object_of(cache, "commits/*.json"),
            "manifest": object_of(cache, "manifests/*.json"),
        }
        trees["run"] = {
            "created": trees["manifest"]["created"], "format_version": 1, "heldout_kl": 0.4182, "manifest": 1,
            "parameters": 494032768, "rows": 24576000, "run": "2f9f54b2a8c74f0c9a7b6c2f3cbb1d0e",
            "spec_digest": trees["manifest"]["spec_digest"], "steps": 3000, "student": "Qwen/Qwen2.5-0.5B",
        }  # fmt: skip
        kept = ("format_version", "spec_digest", "publisher", "files")  # as a part would have them
        trees["manifest-part"] = {key: trees["manifest"][key] for key in kept} | {"replaced": {}}
        text = make_corpus(Path(folder, "damaged/all.jsonl"), 40).read_bytes()
        damaged = Path(folder, "damaged/notes.jsonl.gz")
        damaged.write_bytes(gzip.compress(text)[:-300])
        trees["quarantine"] = object_of(make_cache(damaged), "quarantine/*/*.json")
        trees = shortened(trees, folder)
    sealed = {kind: json.loads(seal(MODELS[kind].model_validate(tree))) for kind, tree in trees.items()}
    return {kind: broken_into_lines(tree) for kind, tree in sealed.items()}


def main() -> None:
    """Put the examples into the page."""
    made = examples()
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        EXAMPLE.sub(lambda found: f"{found[1]}```json\n{made[found['kind']]}\n```\n{found[3]}", text), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
