"""The preview shows documents with their masks."""

from __future__ import annotations

import re

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
