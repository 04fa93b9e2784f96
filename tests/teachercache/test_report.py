"""The report as text: self-contained, in order, and names of any kind inert."""

from __future__ import annotations

import re

import pytest

import teachercache
from teachercache.testing import synthetic_records
from teachercache.upkeep.optimize import optimize
from teachercache.views.report import report
from tests.teachercache.caches import PAGE_SPEC, page_cache
from tests.teachercache.sites import hostile_cache
from tests.teachercache.test_page import assert_inert


@pytest.fixture
def cache(tmp_path):
    return page_cache(tmp_path / "cache")


def test_the_page_answers_in_order_and_asks_the_network_for_nothing(cache):
    text = report(cache)
    assert not re.search(r"""(src|href)=(?!["']?data:)|\burl\(|@import""", text)
    assert text.count("<script") == 1
    assert "<b>teacher & co</b>" not in text
    assert "&lt;b&gt;teacher &amp; co&lt;/b&gt;" in text
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles == [
        "Use it", "Teacher, licence, cost", "Three documents", "Which seq_len", "Quality by split and source",
        "Students trained from it", "Left out and repeated", "Bytes by column, codec open", "Identity",
    ]  # fmt: skip
    assert text.count("<svg") == 6
    for words in ("Mass in the top 100", "too_long", "heldout", "topk_logprobs", "synthetic 1", "CC0"):
        assert words in text


def test_an_empty_cache_has_a_page_too(tmp_path):
    writer = teachercache.create(tmp_path, PAGE_SPEC)
    writer.commit("a", [record := synthetic_records(PAGE_SPEC, 1, seed=1)[0]])
    writer.publish()
    optimize(writer, without=[record.doc_id])  # all was taken down
    page = report(teachercache.open(tmp_path))
    assert "There are no rows" in page
    assert "Bytes by column" not in page


def test_hostile_names_stay_text_in_every_field(tmp_path):
    text = report(hostile_cache(tmp_path / 'x"><script>alert(1)</script>' / "c"))
    assert text.count("alert(1)") >= 14  # title, heading, facts, documents, licence, drops, students, identity
    assert_inert(text)
