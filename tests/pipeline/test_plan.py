"""Plans: the same input is the same shard, whatever else the corpus, the cluster or the job holds."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import load_job, parse_job
from pipeline.corpus.encode import Encoder
from pipeline.corpus.readers import read_documents
from pipeline.planning.plan import make_plan
from pipeline.planning.recipe import recipe_digest
from pipeline.running.job import prepare, run_job
from teachercache.errors import UsageError
from tests.pipeline.conftest import ROOT, command, documents, environment, make_tokenizer, pipeline, write_jsonl

PINNED = "f6d22ddb812da956ea2844559f410f4b1c6e004c3e74eb1772d0cbe350894594"

# A child begins with the memory of whoever forks it as its peak, and pytest may be large: so a small parent forks the planner.
MEASURED = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def plan_of(path, *overrides: str):
    job = load_job(path, list(overrides))
    return make_plan(job, Encoder(job, job.teacher.model), "0" * 64).plan


def test_adding_a_file_adds_shards_and_changes_none(job_file, tmp_path):
    write_jsonl(tmp_path / "in" / "b.jsonl", documents(50))
    job = job_file(tmp_path / "cache", [tmp_path / "in" / "*.jsonl"])
    before = {s.shard_id for s in plan_of(job).shards}
    write_jsonl(tmp_path / "in" / "a.jsonl", [d | {"id": "x" + d["id"]} for d in documents(30)])
    after = {s.shard_id for s in plan_of(job).shards}
    assert len(before) > 2
    assert before < after


def test_actors_and_machines_change_nothing(job_file, tmp_path):
    job = job_file(tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", documents(50))])
    plans = [plan_of(job, o) for o in ("run.actors=1", "run.actors=64", "run.executor=ray", "teacher.threads=3")]
    assert len({p.digest for p in plans}) == 1


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


def test_a_field_that_no_document_has_is_refused_with_the_fields_that_there_are(job_file, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(12))
    job = job_file(tmp_path / "cache", [path], corpus={"fields": {"text": "body", "id": "id"}})
    with pytest.raises(UsageError, match=r"expected \{'text': 'body'\}, found \['id', .*'text'\]; correct `fields`"):
        prepare(load_job(job))


def test_equal_files_are_cached_once(job_file, tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", documents(10))
    b = write_jsonl(tmp_path / "b.jsonl", documents(10))
    job = load_job(job_file(tmp_path / "cache", [a, b]))
    planned = make_plan(job, Encoder(job, job.teacher.model), "0" * 64)
    assert {s.input for s in planned.plan.shards} == {str(a)}
    assert "same content" in planned.warnings[0]


@pytest.mark.parametrize("size", [1, 7, 50, 333, 10**6])
def test_byte_ranges_give_each_line_once(tmp_path, size):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "é" * (i % 13), "id": str(i)} for i in range(40)])
    corpus = parse_job(
        {"cache": "c", "teacher": {"model": "m", "engine": "noop"}, "corpora": [{"files": [str(path)]}]}
    ).corpora[0]
    total = path.stat().st_size
    ids = [
        raw.value["id"]
        for start in range(0, total, size)
        for raw in read_documents(str(path), corpus, start, min(start + size, total), "bytes")
    ]
    assert ids == [str(i) for i in range(40)]


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet", "txt", "jsonl"])
def test_every_format_gives_the_same_documents(job_file, tmp_path, kind):
    import teachercache

    docs = documents(12)
    path = tmp_path / f"docs.{kind}"
    plain = "".join(json.dumps(d) + "\n" for d in docs).encode()
    corpus: dict = {}
    if kind == "jsonl.gz":
        path.write_bytes(gzip.compress(plain[:400]) + gzip.compress(plain[400:]))  # two members
    elif kind == "jsonl.zst":
        import zstandard

        path.write_bytes(zstandard.compress(plain[:400]) + zstandard.compress(plain[400:]))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(docs), path, row_group_size=5)
    elif kind == "txt":
        path.write_text("\n".join(d["text"] for d in docs))
        corpus = {"fields": {}, "text_unit": "line"}
    else:
        path.write_bytes(plain)
    job = job_file(tmp_path / "cache", [path], corpus=corpus, run={"shard_bytes": 500})
    result = pipeline("run", job)
    assert result.returncode == 0, result.stdout + result.stderr
    records = list(teachercache.open(str(tmp_path / "cache")).records())
    job_config = load_job(job)
    encoder = Encoder(job_config, job_config.teacher.model)
    texts = sorted(encoder.backend.decode(r.input_ids[:-1].tolist()) for r in records)
    assert texts == sorted(d["text"] for d in docs)


@pytest.mark.slow
def test_splits_are_by_the_text_and_stay_apart(job_file, tmp_path):
    import teachercache

    docs = documents(200, 40)
    path = write_jsonl(tmp_path / "a.jsonl", docs)
    job = job_file(tmp_path / "cache", [path], corpus={"splits": {"train": 0.8, "heldout": 0.2}})
    assert pipeline("run", job).returncode == 0
    cache = teachercache.open(str(tmp_path / "cache"))
    parts = {s: {r.doc_id for r in cache.records(split=s)} for s in ("train", "heldout")}
    assert not parts["train"] & parts["heldout"]
    assert len(parts["train"] | parts["heldout"]) == 200
    assert 20 <= len(parts["heldout"]) <= 60


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_million_short_documents_are_planned_in_a_minute_and_a_gibibyte(job_file, tmp_path, kind):
    path = tmp_path / f"million.{kind}"
    if kind == "jsonl":
        with path.open("w") as file:
            for i in range(1_000_000):
                file.write(f'{{"id": "{i}", "text": "short document number {i} of a million"}}\n')
    else:
        ids = [str(i) for i in range(1_000_000)]
        pq.write_table(pa.table({"id": ids, "text": [f"short document number {i} of a million" for i in ids]}), path)
    job = job_file(tmp_path / "cache", [path], run={"shard_bytes": 1_000_000})
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *command("plan", job, "--json")],
        capture_output=True, text=True, cwd=ROOT, env=environment(), check=False,
    )  # fmt: skip
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    peak = int(done.stderr.split()[-1]) / 2**20
    print(f"{kind}: {seconds:.1f} s, children's peak {peak:.2f} GiB, {report['shards']} shards")
    assert seconds < 60
    assert peak < 1
    assert "estimated_tokens" in report["sources"][0]
    assert 0.9e6 <= report["sources"][0]["estimated_documents"] <= 1.1e6
    assert not (tmp_path / "cache").exists()


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


def test_a_limit_of_documents_bounds_the_estimate(job_file, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(400))
    (whole,) = prepare(load_job(job_file(tmp_path / "cache", [path]))).planned.estimates
    job = load_job(job_file(tmp_path / "cache", [path]), ["corpora.0.limit_documents=10"])
    (limited,) = prepare(job).planned.estimates
    assert whole.documents == pytest.approx(400, rel=0.1)
    assert limited.documents == pytest.approx(10)
    assert limited.tokens == pytest.approx(whole.tokens / 40, rel=0.1)


def test_a_relative_cache_in_rays_copy_of_a_folder_is_refused(job_file, tmp_path, monkeypatch):
    """`ray job submit --working-dir .` runs in such a copy: the cache would go with it."""
    job = load_job(
        job_file(tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", documents(3))]), ["cache=build/cache"]
    )
    copy = tmp_path / "_ray_pkg_0123456789abcdef"
    copy.mkdir()
    monkeypatch.chdir(copy)
    with pytest.raises(UsageError, match="found the relative path build/cache"):
        prepare(job)
