"""Many processes on one cache, over real S3: nothing shrinks, nothing is there twice, nothing half-made is visible."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest

import teachercache
from teachercache.store.ledger import Ledger
from teachercache.store.store import Store
from teachercache.testing import synthetic_records, synthetic_spec
from teachercache.upkeep.verify import verify

SPEC = synthetic_spec()
# A process that commits its shards in its own order and publishes after each. argv: url, order.
COMMITTER = """
import json, sys, teachercache
from teachercache.testing import synthetic_records, synthetic_spec
url, order = sys.argv[1], json.loads(sys.argv[2])
spec = synthetic_spec()
writer = teachercache.create(url, spec, probe=False)
won = 0
for i in order:
    won += writer.commit(f"s{i}", synthetic_records(spec, 4, seed=i, prefix=f"s{i}")).won
    print("published", json.dumps([f.path for f in writer.publish().files]), flush=True)
print("won", won)
"""
# A process that optimises and collects, again and again. argv: url.
KEEPER = """
import sys, teachercache
from teachercache.testing import synthetic_spec
from teachercache.upkeep.gc import collect
from teachercache.upkeep.optimize import optimize
spec = synthetic_spec()
writer = teachercache.create(sys.argv[1], spec, probe=False)
for _ in range(3):
    optimize(writer)
    collect(writer.store, spec, dry_run=False)
"""


def start(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", COMMITTER, *args], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_processes_racing_on_one_cache_lose_nothing_and_never_shrink_it(any_s3_url):
    url = f"{any_s3_url}/cache"
    teachercache.create(url, SPEC)
    orders = [list(range(6)), list(reversed(range(6)))]
    processes = [start(url, json.dumps(order)) for order in orders]
    printed = [p.communicate(timeout=120)[0] for p in processes]
    assert [p.returncode for p in processes] == [0, 0]
    won = sum(int(line.split()[1]) for text in printed for line in text.splitlines() if line.startswith("won"))
    assert won == 6, "each shard is committed exactly once"

    store = Store.open(url)
    ledger = Ledger(store, SPEC)
    numbers = ledger.manifest_numbers()
    assert numbers == list(range(1, len(numbers) + 1))
    held = [{f.path for f in ledger.manifest(n).files} for n in numbers]
    assert all(earlier < later for earlier, later in itertools.pairwise(held)), "each manifest is a strict superset"
    assert len(held[-1]) == 6
    found = verify(store, SPEC)
    assert found.problems == []
    assert found.records == 24


@pytest.mark.slow
def test_one_process_appends_while_another_optimises_and_collects(any_s3_url):
    url = f"{any_s3_url}/cache"
    teachercache.create(url, SPEC).commit("first", synthetic_records(SPEC, 4, seed=99, prefix="first"))
    appender = start(url, json.dumps(list(range(4))))
    keeper = subprocess.Popen([sys.executable, "-c", KEEPER, url])
    appender.communicate(timeout=120)
    assert (appender.returncode, keeper.wait(120)) == (0, 0)
    store = Store.open(url)
    newest = teachercache.create(url, SPEC, probe=False).publish()
    documents = [r.doc_id for r in teachercache.open(url).records(columns={"doc_id"})]
    assert len(documents) == len(set(documents)) == 20
    for number in Ledger(store).manifest_numbers():
        assert len(list(teachercache.open(url, number).records(columns={"doc_id"}))) <= 20, "older pins still read"
    assert verify(store, SPEC, newest).problems == []
