"""Before anything is written: a first document of every source is scored, and too many drops stop a job."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import teachercache
from pipeline.config import load_job
from pipeline.running.job import run_job
from pipeline.running.tasks import too_many
from pipeline.watching.status import read_quarantine, read_status
from teachercache.errors import TeacherCacheError, UsageError
from tests.pipeline.conftest import documents, pipeline, poison_id, verify, write_jsonl


def everything(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*")) if folder.exists() else []


def mixed(bad: int, good: int) -> list[dict]:
    """Documents of which every so-manieth is bad, evenly spread."""
    docs: list[dict] = documents(bad + good)
    for i in range(bad):
        docs[i * len(docs) // bad] = {"id": f"bad{i}", "text": i}
    return docs


def test_fifty_unusable_documents_end_a_job_and_the_corrected_input_completes_it(job_file, tmp_path):
    """Longer than the plan's sample, which sees good documents at first."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": str(i), "text": "x" * 900 + "\x7f"} for i in range(300)])
    nan = {"engine_args": {"nan": poison_id(tmp_path)}, "max_model_len": 1024}
    job = load_job(job_file(tmp_path / "cache", [path], teacher=nan, run={"shard_bytes": 10**5}))
    with pytest.raises(
        UsageError, match=r"the first 50 documents are left out: nan 50 \(first: .*token 0.*nothing was"
    ) as e:
        run_job(job)
    assert e.value.exit_code == 2
    assert not everything(tmp_path / "cache")
    write_jsonl(path, documents(60))
    result = run_job(job)
    assert result.manifest.complete
    assert result.manifest.documents == 60
    assert verify(tmp_path / "cache").returncode == 0


def test_fifty_unusable_documents_in_front_end_the_command_and_leave_nothing(job_file, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": f"bad{i}", "text": i} for i in range(50)] + documents(300))
    job = job_file(tmp_path / "cache", [path])
    began = time.monotonic()
    result = pipeline("run", job)
    print(f"ended after {time.monotonic() - began:.1f} s")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "the first 50 documents are left out: wrong_type 50 (first: text is int, expected a string)" in line
    assert not everything(tmp_path / "cache")
    write_jsonl(path, documents(300))
    assert pipeline("run", job).returncode == 0
    manifest = teachercache.open(str(tmp_path / "cache")).manifest
    assert (manifest.complete, manifest.documents) == (True, 300)


def test_the_trial_goes_on_to_later_shards_and_each_source_has_one(job_file, tmp_path):
    few = write_jsonl(tmp_path / "few.jsonl", [{"id": str(i), "text": " "} for i in range(5)])
    good = write_jsonl(tmp_path / "good.jsonl", documents(30))
    job = load_job(job_file(tmp_path / "cache", [few, good], run={"shard_bytes": 1000}))
    assert run_job(job).manifest.documents == 30
    other = {"source": "other", "files": [str(few)], "fields": {"text": "text", "id": "id"}}
    tree = json.loads(job.model_dump_json())
    with pytest.raises(UsageError, match="source 'other' gives no document"):
        run_job(load_job(job_file(tmp_path / "cache", [good]), ["corpora=" + json.dumps([tree["corpora"][0], other])]))
    assert read_status(str(tmp_path / "cache"))["complete"]


def test_a_teacher_that_does_not_load_leaves_nothing_and_the_same_command_then_works(job_file, tmp_path, monkeypatch):
    import pipeline.running.worker as worker

    job = load_job(job_file(tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", documents(5))]))

    def broken(*_: object) -> None:
        raise OSError("the weights cannot be read")

    with monkeypatch.context() as patched:
        patched.setattr(worker, "start_teacher", broken)
        with pytest.raises(OSError, match="weights"):
            run_job(job)
    assert not everything(tmp_path / "cache")
    assert run_job(job).manifest.complete


def test_a_job_of_damaged_files_alone_leaves_nothing(job_file, tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b"\x1f\x8b\x08\x00damaged from the first block on" * 40)
    with pytest.raises(TeacherCacheError, match=r"nothing was written: .*a\.jsonl\.gz.*damaged"):
        run_job(load_job(job_file(tmp_path / "cache", [path])))
    assert not everything(tmp_path / "cache")


@pytest.mark.parametrize("cut", [1500, 10**6])
def test_too_many_drops_stop_a_job_after_its_first_shards_unless_it_allows_them(job_file, tmp_path, cut):
    path = write_jsonl(tmp_path / "a.jsonl", mixed(100, 200))
    job = load_job(job_file(tmp_path / "cache", [path], run={"shard_bytes": cut}))
    with pytest.raises(
        UsageError, match=r"of the first \d+ documents cannot be used: wrong_type \d+ \(first: text is int"
    ):
        run_job(job)
    status = read_status(str(tmp_path / "cache"))
    assert status["committed"] == 0
    allowed = job.model_copy(update={"run": job.run.model_copy(update={"max_drop_share": 0.4})})
    assert run_job(allowed).manifest.drops == {"wrong_type": 100}


def test_a_corrected_input_completes_a_job_that_too_many_drops_stopped(job_file, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", mixed(100, 200))
    job = load_job(job_file(tmp_path / "cache", [path], run={"shard_bytes": 10**6}))
    with pytest.raises(UsageError, match="cannot be used"):
        run_job(job)
    write_jsonl(path, documents(300))
    manifest = run_job(job).manifest
    assert (manifest.complete, manifest.documents) == (True, 300)
    assert verify(tmp_path / "cache").returncode == 0


def test_one_bad_file_among_good_ones_does_not_stop_a_job(job_file, tmp_path):
    """Its shard is held until others are done."""
    bad = write_jsonl(tmp_path / "a.jsonl", mixed(50, 20))
    good = write_jsonl(tmp_path / "b.jsonl", [d | {"id": "b" + d["id"]} for d in documents(400)])
    job = load_job(job_file(tmp_path / "cache", [bad, good], run={"shard_bytes": 12_000}))
    result = run_job(job)
    assert result.manifest.complete
    assert result.manifest.documents == 420
    assert result.manifest.drops == {"wrong_type": 50}


def test_what_the_job_leaves_out_on_purpose_and_small_jobs_are_not_judged():
    assert not too_many(10, {"too_few_tokens": 900, "sampled_out": 9, "duplicate": 9, "too_long": 99}, 0.2)
    assert not too_many(10, {"wrong_type": 39}, 0.2)
    assert too_many(10, {"wrong_type": 40}, 0.2)
    assert not too_many(80, {"wrong_type": 20}, 0.2)
    assert not too_many(0, {"wrong_type": 10**6}, 1.0)


def test_a_window_without_good_rows_takes_its_whole_document_out_and_its_place_is_said(job_file, tmp_path):
    """Of two windows the second is bad; the first, whose rows were good, is not in the cache."""
    docs = documents(6)
    docs[2] = {"id": "two", "text": "a" * 700 + "\x7f" + "b" * 40}
    job = load_job(
        job_file(
            tmp_path / "cache",
            [write_jsonl(tmp_path / "a.jsonl", docs)],
            teacher={"engine_args": {"nan": poison_id(tmp_path)}},
            run={"shard_bytes": 10**6},
        )
    )
    assert run_job(job).manifest.drops == {"nan": 1}
    records = list(teachercache.open(str(tmp_path / "cache")).records())
    assert sorted(r.doc_id for r in records) == sorted(d["id"] for d in docs if d["id"] != "two")
    assert verify(tmp_path / "cache").returncode == 0
    (note,) = read_quarantine(str(tmp_path / "cache"))
    assert note["documents"] == ["two"]
    assert "window 1, which begins at token 383" in note["message"]
    assert "the first in the row at token 127 of the input" in note["message"]


def test_a_document_with_half_a_surrogate_pair_in_its_id_costs_only_itself(job_file, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(3))
    with path.open("a") as file:
        file.write('{"id": "\\ud800x", "text": "hello there"}\n')
    job = job_file(tmp_path / "cache", [path], run={"shard_bytes": 10**6})
    outcome = run_job(load_job(job)).outcome
    assert (outcome.tally.committed, outcome.tally.retries, outcome.tally.conflicts) == (1, 0, 0)
    assert outcome.tally.drops == {"doc_id": 1}
    shown = pipeline("quarantine", job)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"{path}@" in shown.stdout
    assert "surrogate" in shown.stdout


def test_a_second_run_of_a_complete_job_publishes_nothing(job_file, tmp_path):
    job = job_file(tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", documents(20))])
    first = run_job(load_job(job)).manifest
    before = everything(tmp_path / "cache")
    again = pipeline("run", job)
    assert again.returncode == 0
    assert f"manifest {first.number}" in again.stdout
    assert "published" not in again.stdout
    assert everything(tmp_path / "cache") == before
