"""Many processes on one cache, over real S3: nothing shrinks, nothing is there twice, nothing half-made is visible."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import teachercache
from teachercache.errors import Exists, MissingObject, StoreUnavailable
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


def start(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", COMMITTER, *args], stdout=subprocess.PIPE, text=True)


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


def test_16_writers_of_one_object_have_one_winner(any_url):
    store = Store.open(any_url)

    def attempt(i: int) -> bool:
        try:
            store.create("commits/race.json", f"writer {i}".encode())
        except Exists:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        outcomes = list(pool.map(attempt, range(16)))
    assert outcomes.count(True) == 1
    assert store.read("commits/race.json") == f"writer {outcomes.index(True)}".encode()


def test_another_processes_commit_is_seen_at_once(any_url):
    ours, theirs = teachercache.create(any_url, SPEC), teachercache.create(any_url, SPEC)
    assert ours.committed() == set()
    theirs.commit("s", synthetic_records(SPEC, 1))
    assert ours.committed() == {"s"}
    number = theirs.publish().number
    assert teachercache.open(any_url).manifest.number == number
    theirs.commit("t", synthetic_records(SPEC, 1, prefix="t", seed=2))
    assert ours.publish().number == number + 1


def visible(url: str) -> list[str]:
    return [o.path for o in Store.open(url).list("")]


def test_an_exception_while_a_file_is_built_leaves_nothing(any_url):
    writer = teachercache.create(any_url, SPEC)
    before = visible(any_url)

    def records():
        yield from synthetic_records(SPEC, 30, length=2000)  # several row groups are written by then
        raise RuntimeError("the corpus broke")

    with pytest.raises(RuntimeError, match="the corpus broke"):
        writer.commit("s", records())
    assert visible(any_url) == before


def test_an_exception_while_a_file_is_uploaded_leaves_nothing_that_a_reader_sees(any_url, monkeypatch):
    writer = teachercache.create(any_url, SPEC)
    writer.commit("before", synthetic_records(SPEC, 3))
    writer.publish()
    real, calls = Store._put_new, []

    def broken(self, path, data):
        calls.append(path)
        if len(calls) >= 2:
            raise OSError("the cable was cut")
        real(self, path, data)

    monkeypatch.setattr(Store, "_put_new", broken)
    records = synthetic_records(SPEC, 3, prefix="x", seed=1) + synthetic_records(
        SPEC, 3, prefix="y", seed=2, split="heldout"
    )
    with pytest.raises(StoreUnavailable):
        writer.commit("s", records)
    monkeypatch.setattr(Store, "_put_new", real)
    assert writer.committed() == {"before"}
    assert [r.doc_id for r in teachercache.open(any_url).records()] == ["doc-00000", "doc-00001", "doc-00002"]
    assert writer.commit("s", records).won, "running the shard again heals it"
    assert writer.publish().records == 9
    assert verify(Store.open(any_url), SPEC).ok


def test_a_large_file_goes_up_in_parts_and_whole(any_s3_url, tmp_path):
    """Above 100 MB an upload is a multipart one; until it is completed, nothing is there."""
    data = tmp_path / "large"
    data.write_bytes(b"0123456789abcdef" * (105 * 2**20 // 16))
    store = Store.open(any_s3_url)
    store.create("data/large", data)
    assert store.head("data/large").size == data.stat().st_size
    store.create("data/large", data)  # the same content again is a lost acknowledgement
    with pytest.raises(MissingObject):
        store.head("data/other")
