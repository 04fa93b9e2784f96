"""Entries of `runs/`: anyone who trains writes them, so a bad one is named, and stops no one."""

from __future__ import annotations

import json

import jsonschema
import pytest

import teachercache
from teachercache.format import layout
from teachercache.format.objects import MAX_RUN_BYTES, Run
from teachercache.format.schema import schema_of
from teachercache.format.sealed import seal, utc_now
from teachercache.format.spec import canonical_json
from teachercache.store.ledger import Ledger
from teachercache.upkeep.gc import collect
from teachercache.upkeep.verify import verify
from tests.teachercache.caches import SPEC, make, sealed


def a_run(digit: str = "a", steps: int = 100, heldout_kl: float | None = 0.5, **changes) -> Run:
    values = {
        "spec_digest": SPEC.digest,
        "run": digit * 32,
        "manifest": 1,
        "student": "owner/small",
        "parameters": 10**8,
    }
    return Run(**values | {"steps": steps, "rows": 5, "heldout_kl": heldout_kl, "created": utc_now()} | changes)


def put(cache, run: Run, path: str = "", data: bytes = b"") -> str:
    path = path or layout.run_path(run.run, run.steps)
    cache.store.create(path, data or seal(run))
    return path


@pytest.fixture
def cache(tmp_path):
    return make(tmp_path / "cache")


def test_a_ledger_gives_the_last_entry_of_each_run_best_first_and_gc_and_verify_keep_them(cache):
    for run in (a_run("a", 100, 0.9), a_run("a", 200, 0.4), a_run("b", 50, 0.3), a_run("c", 10, None)):
        put(cache, run)
    runs, bad = Ledger(cache.store).runs()
    assert [(r.run[0], r.steps) for r in runs] == [("b", 50), ("a", 200), ("c", 10)]
    assert bad == 0
    found = verify(cache.store, cache.spec)
    assert (found.ok, found.strange) == (True, [])
    collect(cache.store, cache.spec, grace_seconds=60, keep_manifests=1, dry_run=False)
    assert Ledger(cache.store).runs()[0] == runs
    text = json.loads(cache.store.read(layout.run_path("a" * 32, 200)))
    jsonschema.validate(text, schema_of("run"), cls=jsonschema.Draft202012Validator)


def bad_entries() -> dict[str, tuple[str, bytes, str]]:
    good = a_run("b", 7)
    tree = good.model_dump(mode="json")
    path = layout.run_path(good.run, 7)
    return {
        "truncated": (path, seal(good)[:-9], "TC-E102"),
        "not canonical": (path, sealed(json.dumps(tree).encode()), "TC-E102"),
        "a key more": (path, sealed(canonical_json(tree | {"host": "x"})), "TC-E102"),
        "a number beyond float": (path, sealed(canonical_json(tree).replace(b"0.5", b"1e999")), "TC-E102"),
        "a negative count": (path, sealed(canonical_json(tree | {"steps": -7})), "TC-E102"),
        "a newer format": (path, sealed(canonical_json(tree | {"format_version": 2})), "TC-E206"),
        "too large": (path, seal(good) + b" " * MAX_RUN_BYTES, "TC-E205"),
        "another name": (layout.run_path("c" * 32, 7), seal(good), "TC-E104"),
        "another spec": (path, seal(a_run("b", 7, spec_digest="0" * 64)), "TC-E104"),
    }


@pytest.mark.parametrize("kind", bad_entries())
def test_a_bad_entry_is_left_out_and_verify_names_it(cache, kind):
    path, data, code = bad_entries()[kind]
    put(cache, a_run("a"))
    put(cache, a_run("b"), path, data)
    runs, bad = Ledger(cache.store).runs()
    assert ([r.run[0] for r in runs], bad) == (["a"], 1)
    assert [(p.path, p.code) for p in verify(cache.store, cache.spec).problems] == [(path, code)]
    assert teachercache.open(cache.url).manifest.rows  # no reader of rows needs it
