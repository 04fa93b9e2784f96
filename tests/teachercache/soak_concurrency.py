"""One cache, five processes, a given time: two writers, an optimiser, a collector, a reader; nothing may be lost.

    python -m tests.teachercache.soak_concurrency [SECONDS] [ROUNDS]

Manifests are split after five entries and the grace period is the shortest one, so parts, key runs, orphans and replaced
files come and go all the time. Writers take the same shards in different orders, give some uploads up, and publish
after each commit.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import teachercache
from teachercache.errors import MissingObject, NotACache, StoreUnavailable
from teachercache.store.ledger import Ledger
from teachercache.store.store import Store
from teachercache.testing import synthetic_records, synthetic_spec
from teachercache.upkeep.gc import collect
from teachercache.upkeep.optimize import optimize
from teachercache.upkeep.verify import verify
from teachercache.write import publish as publishing
from teachercache.write.attempt import ShardAttempt
from teachercache.write.writer import CacheWriter

SPEC = synthetic_spec(vocab_size=50, top_k=3)
GRACE_S = 60.0
KEPT = 3  # manifests
ROOT = Path(__file__).resolve().parents[2]


def records_of(shard: int):
    return synthetic_records(SPEC, 1 + shard % 3, seed=shard, prefix=f"s{shard}", length=4)


def write(writer: CacheWriter, rng: random.Random, until: float) -> dict[str, int]:
    """Commit shards 0, 1, … in a shuffled order within each twenty, so that both writers meet on most of them."""
    counts: Counter[str] = Counter()
    first = 0
    while time.time() < until:
        shards = list(range(first, first + 20))
        rng.shuffle(shards)
        for shard in shards:
            if time.time() >= until:
                break
            if rng.random() < 0.1:
                with ShardAttempt(writer.store, SPEC, f"s{shard}", grace_seconds=GRACE_S) as attempt:
                    attempt.build(records_of(shard))
                    attempt.upload()
                counts["given up"] += 1
            elif f"s{shard}" not in writer.committed():
                counts["won" if writer.commit(f"s{shard}", records_of(shard)).won else "lost"] += 1
            writer.publish()
            counts["published"] += 1
        first += 20
    return dict(counts)


def tidy(writer: CacheWriter, rng: random.Random, until: float) -> dict[str, int]:
    counts: Counter[str] = Counter()
    while time.time() < until:
        counts["merged"] += optimize(writer, target_bytes=rng.choice([5_000, 50_000, 10**9])).bins
        time.sleep(rng.random())
    return dict(counts)


def clean(writer: CacheWriter, rng: random.Random, until: float) -> dict[str, int]:
    counts: Counter[str] = Counter()
    while time.time() < until:
        found = collect(writer.store, SPEC, grace_seconds=GRACE_S, keep_manifests=KEPT, dry_run=False)
        for kind in ("manifests", "parts", "orphans", "replaced", "void", "scratch"):
            counts[kind] += len(getattr(found, kind))
        time.sleep(rng.random())
    return dict(counts)


def read(writer: CacheWriter, rng: random.Random, until: float) -> dict[str, int]:
    """Read the newest manifest whole: every document once, none of those before missing."""
    counts: Counter[str] = Counter()
    before: set[str] = set()
    while time.time() < until:
        try:
            cache = teachercache.open(writer.url)
            documents = [record.doc_id for record in cache.records(columns={"doc_id"})]
        except NotACache:
            time.sleep(0.2)
            continue
        except MissingObject:
            counts["expired under the reader"] += 1  # it must have: the newest of them are kept
            continue
        assert len(documents) == len(set(documents)), "a document is there twice"
        assert before <= set(documents), f"manifest {cache.manifest.number} lost {sorted(before - set(documents))[:3]}"
        before = set(documents)
        counts["read"] += 1
        counts["parts"] = max(counts["parts"], len(cache.manifest.parts))
    return dict(counts) | {"documents": len(before)}


ROLES = {"writer-1": write, "writer-2": write, "optimiser": tidy, "collector": clean, "reader": read}


def act(url: str, role: str, seed: int, seconds: float) -> dict[str, int]:
    """Be one of the five; an outage that the loaded machine makes is waited out, anything else ends it."""
    publishing.PART_ENTRIES = 5
    until = time.time() + seconds
    total: Counter[str] = Counter()
    while time.time() < until:
        writer = CacheWriter(Store.open(url), SPEC, grace_seconds=GRACE_S)
        try:
            total.update(ROLES[role](writer, random.Random(seed), until))
        except StoreUnavailable:
            total["outages"] += 1
    return dict(total)


def one_round(url: str, seconds: float, seed: int) -> dict[str, object]:
    """Run the five, then settle: what was committed is there, once, and verifies."""
    writer = teachercache.create(url, SPEC)
    writer.commit("s0", records_of(0))  # a cache without a document is refused by whoever publishes it
    writer.publish()
    command = [sys.executable, "-m", "tests.teachercache.soak_concurrency", "act", url]
    started = {
        role: subprocess.Popen(
            [*command, role, str(seed * 10 + i), str(seconds)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=ROOT,
        )
        for i, role in enumerate(ROLES)
    }  # fmt: skip
    report: dict[str, object] = {"seed": seed, "seconds": seconds}
    failed = []
    for role, process in started.items():
        out, err = process.communicate(timeout=seconds + 300)
        if process.returncode:
            failed.append(f"{role}: {err[-1500:]}")
        else:
            report[role] = json.loads(out.splitlines()[-1])
    assert not failed, "\n".join(failed)
    manifest = CacheWriter(writer.store, SPEC, grace_seconds=GRACE_S).publish()
    expected = {
        record.doc_id
        for shard in writer.committed()
        if shard.startswith("s") and shard[1:].isdigit()
        for record in records_of(int(shard[1:]))
    }
    found = Counter(r.doc_id for r in teachercache.open(url).records(columns={"doc_id"}))
    assert set(found) == expected, (
        f"lost {sorted(expected - set(found))[:5]}, strange {sorted(set(found) - expected)[:5]}"
    )
    twice = sorted(name for name, count in found.items() if count > 1)
    assert not twice, f"{twice} are there twice"
    assert expected, "the time was over before the first commit"
    problems = verify(writer.store, SPEC).problems
    assert not problems, problems[:3]
    numbers = Ledger(writer.store).manifest_numbers()
    report |= {"manifests": numbers[-1], "files": len(manifest.files), "replaced": len(manifest.replaced)}
    return report | {"parts": len(manifest.parts), "documents": len(expected), "lost": 0}


def main() -> None:
    if sys.argv[1:2] == ["act"]:
        url, role, seed, seconds = sys.argv[2:]
        print(json.dumps(act(url, role, int(seed), float(seconds))))
        return
    from tests.servers import serve

    duration, rounds = float(sys.argv[1] if len(sys.argv) > 1 else 120), int(sys.argv[2] if len(sys.argv) > 2 else 3)
    with tempfile.TemporaryDirectory() as folder, serve("localbucket", Path(folder, "s3")) as server:
        os.environ.update(server.env())
        bucket = server.new_bucket()
        for seed in range(rounds):
            print(json.dumps(one_round(f"{bucket}/cache-{seed}", duration, seed)), flush=True)
    print(f"{rounds} rounds of {duration:g} s: nothing lost")


if __name__ == "__main__":
    main()
