"""show and head: a cache for people."""

from __future__ import annotations

from teachercache.console import text_console
from teachercache.testing import synthetic_records, synthetic_spec
from teachercache.views.show import head_table

SPEC = synthetic_spec()


def test_a_document_named_like_markup_is_shown_by_its_name(capsys):
    (record,) = synthetic_records(SPEC, 1, prefix="app/[id]/[/b]")
    text_console().print(head_table(record, [], 3))
    assert "[id]/[/b]" in capsys.readouterr().out
