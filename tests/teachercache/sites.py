"""Caches of a made-up team, as the catalog's tests and scripts/screenshots.py show them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

import teachercache
from teachercache.format import layout
from teachercache.format.objects import Plan, PlanShard, Run
from teachercache.format.sealed import seal, utc_now
from teachercache.format.spec import Rows, SampledRows, TopKRows
from teachercache.testing import synthetic_record, synthetic_records, synthetic_spec

HOSTILE = '</script><script>alert(1)</script>"><img src=x onerror=alert(2)>\u202e\x1b[2J{{body}}&amp;'


def make_cache(
    url: Path,
    name: str,
    *,
    rows: Rows | None = None,
    records: int = 12,
    seed: int = 0,
    missing: int = 0,
    doc: str = "doc",
) -> teachercache.Cache:
    """Make a synthetic cache with two splits, drops and provenance; with `missing` planned shards it is incomplete."""
    spec = synthetic_spec(name=name, rows=rows or TopKRows(entries=100), vocab_size=4000)
    writer = teachercache.create(url, spec, probe=False)
    shards = [
        PlanShard(shard_id=s, source="web", input=f"s3://corpora/{doc}/{s}.jsonl", input_digest="d") for s in ("a", "b")
    ]
    shards += [PlanShard(shard_id=f"m{i}", source="web", input="x", input_digest="d") for i in range(missing)]
    writer.put_plan(Plan(spec_digest=spec.digest, created=utc_now(), shards=shards))
    said = {"engine": "vllm 0.26.0", "device": "NVIDIA H200", "shard_seconds": 2.5, "teacher_seconds": 2.0}
    for i, (shard, split, count) in enumerate((("a", "train", records), ("b", "heldout", records // 3 + 1))):
        made = synthetic_records(spec, count, seed=2 * seed + i, prefix=f"{doc}-{split}", split=split, source="web")
        made = [dataclasses.replace(r, meta={"licence": "CC-BY-4.0", "url": f"https://{doc}.example"}) for r in made]
        writer.commit(shard, made, drops={"too_long": 3, "empty": 1}, provenance=said)
    writer.publish(allow_partial=bool(missing))
    return teachercache.Cache(writer.store, spec, writer.publish(allow_partial=bool(missing)))


def register(
    cache: teachercache.Cache, student: str, kl: float | None, *, digit: str = "a", parameters: int = 494_032_768
) -> None:
    """Add a run's entry to a cache."""
    run = Run(
        spec_digest=cache.spec.digest, run=digit * 32, manifest=cache.manifest.number, student=student, parameters=parameters,
        steps=3000, rows=24_576_000, heldout_kl=kl, created=utc_now(),
    )  # fmt: skip
    cache.store.create(layout.run_path(run.run, run.steps), seal(run))


def make_team(folder: Path) -> None:
    """Make caches of both kinds of rows; one incomplete, one unreadable, one not published."""
    big = make_cache(folder / "llama-3.1-8b/web", "meta-llama/Llama-3.1-8B-Instruct", records=40)
    for digit, student, kl in (
        ("a", "meta-llama/Llama-3.2-1B", 0.2143),
        ("b", "cut-16-layers", 0.1877),
        ("c", "probe", None),
    ):
        register(big, student, kl, digit=digit)
    sampled = SampledRows(entries=24)  # type: ignore[call-arg]  # a quarter is exact
    register(
        make_cache(folder / "qwen3-32b/chats-24", "Qwen/Qwen3-32B", rows=sampled, seed=1), "Qwen/Qwen3-0.6B", 0.3312
    )
    make_cache(folder / "qwen3-32b/code", "Qwen/Qwen3-32B", seed=2, missing=3)
    make_cache(folder / "gpt-oss-20b/mixed", "openai/gpt-oss-20b", seed=3)
    teachercache.create(folder / "gemma-3-27b/new", synthetic_spec(name="google/gemma-3-27b-it"), probe=False)
    broken = make_cache(folder / "gpt-oss-20b/old", "openai/gpt-oss-20b", seed=4)
    path = folder / "gpt-oss-20b/old" / layout.manifest_path(broken.manifest.number)
    path.write_bytes(path.read_bytes()[:-20])


def hostile_cache(url: Path) -> teachercache.Cache:
    """A hostile string in every field that a string may be in."""
    spec = synthetic_spec(name=HOSTILE, engine=HOSTILE)
    overrides = {"revision": HOSTILE, "dtype": HOSTILE, "head_dtype": HOSTILE, "overrides": {HOSTILE: HOSTILE}}
    spec = spec.model_copy(update={"teacher": spec.teacher.model_copy(update=overrides)})
    writer = teachercache.create(url, spec, probe=False)
    rng = np.random.default_rng(0)
    meta = {"licence": HOSTILE, "url": HOSTILE}
    record = dataclasses.replace(synthetic_record(rng, spec, HOSTILE, length=40), meta=meta)
    said = {"shard_seconds": 1.0, "engine": HOSTILE, "device": HOSTILE}
    writer.commit("a", [record], drops={HOSTILE: 3}, provenance=said)
    writer.publish()
    cache = teachercache.open(url)
    register(cache, HOSTILE, 0.5)
    return cache
