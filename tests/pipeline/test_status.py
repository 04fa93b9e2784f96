"""`status` says what the manifest says: after publishing, optimising and collecting, and with work that is not published."""

from __future__ import annotations

from datetime import timedelta

import pytest

import teachercache
from pipeline.watching.status import read_status
from teachercache.store.store import Store
from teachercache.testing import synthetic_records
from teachercache.upkeep.gc import collect
from teachercache.upkeep.optimize import optimize
from tests.teachercache.caches import SPEC, writer_with


def counts(url: str) -> tuple[int, int, int, int]:
    status = read_status(url)
    return status["documents"], status["tokens"], status["rows"], status["bytes"]


def published(url: str) -> tuple[int, int, int, int]:
    manifest = teachercache.open(url).manifest
    return manifest.documents, manifest.tokens, manifest.rows, sum(entry.size for entry in manifest.files)


@pytest.mark.parametrize("in_parts", [False, True])
def test_status_is_the_manifest_after_optimize_and_after_gc(tmp_path, monkeypatch, in_parts):
    if in_parts:
        monkeypatch.setattr("teachercache.write.publish.PART_ENTRIES", 1)
    url, writer = str(tmp_path), writer_with(tmp_path, range(4))
    plain = counts(url)
    assert plain == published(url)

    assert optimize(writer).files_after == 1
    optimized = counts(url)
    assert optimized == published(url)
    assert optimized[:3] == plain[:3], "optimize changes bytes alone"

    aged = Store.open(url).now() + timedelta(days=30)
    monkeypatch.setattr(Store, "now", lambda self: aged)
    assert collect(Store.open(url), SPEC, keep_manifests=1, dry_run=False).objects
    assert len(writer.ledger.manifest_numbers()) == 1
    assert counts(url) == published(url) == optimized

    writer.commit("late", synthetic_records(SPEC, 3, seed=9, prefix="late"))
    late = tuple(new - old for new, old in zip(counts(url), optimized, strict=True))
    assert late[0] == 3, "committed, not yet published"
    assert counts(url) > published(url) == optimized
    writer.publish()
    assert counts(url) == published(url)

    optimize(writer, target_bytes=10**9)
    assert counts(url) == published(url)
    assert counts(url)[0] == plain[0] + 3
