"""The preview shows documents with their masks, and the bytes that rows take."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from pipeline.config import RowsConfig
from pipeline.watching.progress import show_plan
from tests.pipeline.conftest import documents, pipeline, write_jsonl


def test_plan_shows_documents_with_their_masks(job_file, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(3))
    job = job_file(tmp_path / "cache", [path])
    result = pipeline("plan", job, "--show", "2", "--rate", "1000")
    assert result.returncode == 0, result.stderr
    assert "document 0 says" in result.stdout
    assert re.search(r"token 0\] d«ocument 0 says.*»$", result.stdout, re.M)  # nothing precedes the first token
    assert "GPU-hours" in result.stdout
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("rows", "size"),
    [({"kind": "top_k", "entries": 100}, 280), ({"kind": "sampled"}, 68), ({"kind": "sampled", "entries": 12}, 44)],
)
def test_plan_counts_the_bytes_of_its_kind_of_rows(rows, size):
    """What was measured on a real teacher is 280, 69 and 42."""
    console, planned = Console(record=True, width=200), SimpleNamespace(estimates=[], warnings=[])
    show_plan(console, planned, RowsConfig.model_validate(rows).spec, None)
    assert f"({size} bytes a row in the open layout)" in console.export_text()
