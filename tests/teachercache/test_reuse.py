"""Rows that are committed already are found and copied."""

from __future__ import annotations

import dataclasses

import pytest

import teachercache
from teachercache.testing import synthetic_records
from teachercache.upkeep.gc import collect
from teachercache.upkeep.optimize import optimize
from tests.teachercache.caches import SPEC, writer_with


@pytest.mark.slow
def test_committed_rows_are_found_by_content_key_and_copied(any_url):
    writer = writer_with(any_url, range(3))
    index = writer.reuse_index()
    assert len(index) == 12
    source = synthetic_records(SPEC, 4, seed=1, prefix="s1")[2]
    key = teachercache.content_key(SPEC.digest, source.input_ids, source.row_pos)
    assert key in index
    copied = index.get(key)
    assert copied.doc_id == "s1-00002"
    assert index.get(b"\0" * 16) is None
    writer.commit("again", [dataclasses.replace(copied, doc_id="renamed", source="other", meta={"licence": "MIT"})])
    writer.publish()
    found = next(teachercache.open(any_url).records(source="other"))
    assert found.content_key == key
    assert (found.topk_logprobs == copied.topk_logprobs).all()


def test_reuse_computes_again_what_was_collected_since(tmp_path):
    writer = writer_with(tmp_path, range(2))
    index = writer.reuse_index()
    source = synthetic_records(SPEC, 4, seed=1, prefix="s1")[2]
    key = teachercache.content_key(SPEC.digest, source.input_ids, source.row_pos)
    optimize(writer, without={"s0-00000"})
    collect(writer.store, SPEC, keep_manifests=1, dry_run=False)
    assert index.get(key) is None, "another process merged its file away"
    assert writer.reuse_index().get(key).doc_id == "s1-00002"


def test_reuse_passes_over_a_commit_that_lost_its_file(tmp_path):
    writer = writer_with(tmp_path, range(2))
    result = writer.commit("late", synthetic_records(SPEC, 2, seed=8, prefix="late"))
    writer.store.delete(result.files[0].path)
    assert len(writer.reuse_index()) == 8
