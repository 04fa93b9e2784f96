"""Work that has begun keeps its cut; a second recipe for one input is refused."""

from __future__ import annotations

import pytest

from pipeline.config import load_job
from pipeline.running.job import run_job
from teachercache.errors import UsageError
from tests.pipeline.conftest import documents, write_jsonl


def test_what_is_begun_keeps_its_cut_whatever_the_job_file_says_now(job_file, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(60))
    job = job_file(tmp_path / "cache", [path])
    assert run_job(load_job(job)).manifest is not None
    again = run_job(load_job(job, ["run.shard_bytes=500"]))
    assert (again.outcome.tally.committed, again.outcome.reason) == (0, "done")
    assert again.manifest is not None


def test_a_second_recipe_for_an_input_of_one_source_is_refused_before_anything_is_spent(job_file, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(20))
    job = job_file(tmp_path / "cache", [path])
    run_job(load_job(job))
    before = sorted((tmp_path / "cache").rglob("*"))
    with pytest.raises(UsageError, match=r"with another recipe \(recipe.windows.size was 511, is 64\)"):
        run_job(load_job(job, ["recipe.windows.size=64"]))
    assert sorted((tmp_path / "cache").rglob("*")) == before
    # in another source or split it is wanted twice
    assert run_job(load_job(job, ["recipe.windows.size=64", "corpora.0.source=short"])).manifest is not None
    held = load_job(job, ["corpora.0.split=validation", "run.allow_repeated_content=true"])
    assert run_job(held).manifest is not None
