"""Shard ids depend on what makes rows, and on nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import load_job, parse_job
from pipeline.corpus.encode import Encoder
from pipeline.planning.plan import make_plan
from pipeline.planning.recipe import recipe_digest
from tests.pipeline.conftest import documents, make_tokenizer, write_jsonl

PINNED = "58e41de20f8cbb4c4835b19d39c367fbbd79b33d1cf5db54e238f825fae713ae"


def plan_of(path, *overrides: str):
    job = load_job(path, list(overrides))
    return make_plan(job, Encoder(job, job.teacher.model), "0" * 64).plan


@pytest.mark.parametrize(
    "override",
    [
        "recipe.eos=false",
        "recipe.windows.size=100",
        "corpora.0.sample=0.5",
        "corpora.0.split=other",
        "recipe.chat.rows=masked",
        "corpora.0.fields.id=",
    ],
)
def test_whatever_changes_rows_changes_every_shard(job_file, tmp_path, override):
    job = job_file(tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", documents(50))])
    ids = [{s.shard_id for s in plan_of(job, *o).shards} for o in ((), (override,))]
    assert not ids[0] & ids[1]


def recipe_job(**parts):
    """A job file's tree that names no path of this machine."""
    corpus = {"source": "web", "files": ["in.jsonl"], "fields": {"messages": "chat"}}
    return parse_job({"cache": "c", "teacher": {"model": "m"}, "corpora": [corpus], **parts})


def test_the_digest_of_a_recipe_survives_versions_that_add_options():
    """Pinned: another value here means that every cache of every job is made again; see RECIPE_VERSION."""
    job = recipe_job(recipe={"eos": False, "filters": {"min_tokens": 10}})
    assert recipe_digest(job, job.corpora[0], "{{ messages }}") == PINNED


def test_defaults_that_are_written_out_change_nothing_and_templates_do():
    job, explicit = recipe_job(), recipe_job(recipe={"eos": True, "windows": {"policy": "window", "size": 2047}})
    assert recipe_digest(job, job.corpora[0], "a") == recipe_digest(explicit, explicit.corpora[0], "a")
    assert recipe_digest(job, job.corpora[0], "a") != recipe_digest(job, job.corpora[0], "b")


def test_another_template_of_the_tokenizer_makes_other_shards_of_conversations(job_file, tmp_path):
    """The template is no part of the tokenizer's identity: hubs change it in place."""
    template = (Path(__file__).parent / "templates" / "smollm2.jinja").read_text()
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"m": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    )
    ids = []
    for name, text in (("one", template), ("two", template.replace("<|im_end|>", " <|im_end|>"))):
        model = make_tokenizer(tmp_path / name, template=text)
        job = job_file(tmp_path / "cache", [path], teacher={"model": str(model)}, corpus={"fields": {"messages": "m"}})
        ids.append({s.shard_id for s in plan_of(job).shards})
    assert not ids[0] & ids[1]
