"""Leases say what other jobs work on; they expire, and nothing depends on them."""

from __future__ import annotations

import json
import time

from pipeline.running.leases import StoreLeases
from teachercache import Store
from tests.pipeline.conftest import documents, pipeline, write_jsonl


def test_jobs_see_each_others_leases_until_released_or_expired(any_url):
    store = Store.open(any_url)
    now = [time.time()]
    a, b = (StoreLeases(store, 60, clock=lambda: now[0]) for _ in range(2))
    assert a.others() == set()
    a.announce(["s1", "s2"])
    b.announce(["s3"])
    assert a.others() == {"s3"}
    assert b.others() == {"s1", "s2"}
    now[0] += 30
    a.announce(["s2", "s4"])  # renewed: the newest counts
    assert b.others() == {"s2", "s4"}
    a.release()
    assert b.others() == set()
    a.announce(["s5"])
    now[0] = time.time() + 61
    assert b.others() == set()
    assert len(store.list("leases/")) == 2


def test_a_damaged_lease_is_no_lease(tmp_path):
    store = Store.open(str(tmp_path))
    store.create("leases/other/00000001.json", b"not json")
    assert StoreLeases(store, 60).others() == set()


def test_a_job_writes_its_events_as_json_lines(job_file, tmp_path):
    job = job_file(tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", documents(30))])
    assert pipeline("run", job, "--events", tmp_path / "events.jsonl").returncode == 0
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    commits = [e for e in events if e["event"] == "committed"]
    assert len(commits) == len(list((tmp_path / "cache" / "commits").glob("*.json"))) > 1
    assert all(e["tokens"] > 0 for e in commits)
