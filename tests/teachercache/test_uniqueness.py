"""No document twice, and no content in two splits."""

from __future__ import annotations

import dataclasses

import pytest

import teachercache
from teachercache.errors import RepeatedContent
from teachercache.testing import synthetic_records
from teachercache.upkeep.verify import verify
from tests.teachercache.caches import SPEC, writer_with


def test_content_in_two_splits_is_counted_and_refused_unless_allowed(tmp_path):
    writer = writer_with(tmp_path, range(2))
    leak = dataclasses.replace(synthetic_records(SPEC, 4, seed=1, prefix="s1")[0], doc_id="leaked", split="heldout")
    writer.commit("h", [leak])
    with pytest.raises(RepeatedContent, match="2 records hold content that is in another split"):
        writer.publish()
    assert writer.ledger.manifest_numbers() == [1]
    assert writer.publish(allow_repeated_content=True).repeated_content == 2


def test_the_same_document_committed_by_two_shards_is_refused(tmp_path):
    writer = writer_with(tmp_path, range(2))
    writer.commit("twin", synthetic_records(SPEC, 4, seed=7, prefix="s1"))
    with pytest.raises(teachercache.errors.DuplicateDocument, match="'s1-00000' window 0"):
        writer.publish()
    assert any("committed twice" in p.message for p in verify(writer.store, SPEC).problems)
