"""show and head: a cache for people."""

from __future__ import annotations

import io

from rich.console import Console

from teachercache.testing import synthetic_records, synthetic_spec
from teachercache.views.show import head_table

SPEC = synthetic_spec()


def test_a_document_named_like_markup_is_shown_by_its_name():
    (record,) = synthetic_records(SPEC, 1, prefix="app/[id]/[/b]")
    console = Console(file=io.StringIO(), width=200)
    console.print(head_table(record, [], 3))
    assert "[id]/[/b]" in console.file.getvalue()
