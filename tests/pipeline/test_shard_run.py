"""One shard: generate mode, student continuations, given token ids, exact rows; rows that other plans committed are copied."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import teachercache
import teachercache.write.reuse
from pipeline.config import load_job
from pipeline.running import shard_run
from pipeline.running.job import run_job
from pipeline.watching.status import read_status
from teachercache.errors import UsageError
from tests.pipeline.conftest import documents, pipeline, write_jsonl


def test_generate_scores_prompt_and_continuation_and_masks_the_continuation(job_file, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(10))
    job = job_file(
        tmp_path / "cache",
        [path],
        corpus={"fields": {"prompt": "text", "id": "id"}},
        recipe={"mode": "generate", "generate": {"max_tokens": 5, "seed": 3}},
    )
    result = pipeline("run", job)
    assert result.returncode == 0, result.stdout + result.stderr
    records = list(teachercache.open(str(tmp_path / "cache")).records())
    texts = {d["id"]: d["text"] for d in documents(10)}
    assert len(records) == 10
    for r in records:
        prompt = len(texts[r.doc_id].encode())
        assert len(r.input_ids) == prompt + 5
        assert r.row_pos[r.loss_mask].tolist() == list(range(prompt - 1, prompt + 4))
        assert r.meta["finish_reason"] == "length"
    assert len({r.meta["generate_seed"] for r in records}) == 10


QUESTIONS = [
    {
        "id": f"c{i}",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Is {i} odd?"}],
    }
    for i in range(20)
]

ANSWERED = {"id": "answered", "messages": [*QUESTIONS[0]["messages"], {"role": "assistant", "content": "No."}]}

CHAT = Path(__file__).parent / "templates" / "smollm2.jinja"


@pytest.mark.parametrize("rows", ["all", "masked"])
def test_generate_answers_the_last_turn_of_a_conversation(job_file, tmp_path, tokenizer_folder, rows):
    path = write_jsonl(tmp_path / "a.jsonl", [*QUESTIONS, ANSWERED])
    recipe = {"mode": "generate", "generate": {"seed": 3}, "chat": {"template": str(CHAT), "rows": rows}}
    job = job_file(tmp_path / "cache", [path], corpus={"fields": {"messages": "messages", "id": "id"}}, recipe=recipe)
    result = run_job(load_job(job))  # in this process: importing transformers takes seconds
    assert result.manifest is not None
    assert result.manifest.drops == {"ends_with_assistant": 1}
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    records = {r.doc_id: r for r in teachercache.open(str(tmp_path / "cache")).records()}
    assert set(records) == {q["id"] for q in QUESTIONS}
    for question in QUESTIONS:
        record = records[question["id"]]
        asked = question["messages"][1]["content"]
        prompt = tokenizer.encode(
            f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n",
            add_special_tokens=False,
        ).ids
        assert record.input_ids[: len(prompt)].tolist() == prompt
        written = range(len(prompt), len(record.input_ids))
        assert len(written) == 5
        assert (record.row_pos[record.loss_mask] + 1).tolist() == list(written)
        assert len(record.row_pos) == (5 if rows == "masked" else len(record.input_ids))
        stopped = record.meta["generate_seed"] % 2 == 0  # the stand-in teacher's way to stop
        assert record.meta["finish_reason"] == ("stop" if stopped else "length")
        assert (record.input_ids[-1] == end) == stopped
    assert len({r.meta["finish_reason"] for r in records.values()}) == 2
    assert len({r.meta["generate_seed"] for r in records.values()}) == len(QUESTIONS)


def test_generate_over_answered_conversations_is_refused_before_anything_is_written(job_file, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [ANSWERED | {"id": str(i)} for i in range(12)])
    recipe = {"mode": "generate", "chat": {"template": str(CHAT)}}
    job = job_file(tmp_path / "cache", [path], corpus={"fields": {"messages": "messages", "id": "id"}}, recipe=recipe)
    with pytest.raises(UsageError, match="end with the assistant's answer"):
        run_job(load_job(job))
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_answers_have_the_length_that_the_window_leaves(job_file, tmp_path):
    """A prompt that fills the window is dropped; one that nearly does is continued by what is left, and says `length`."""
    rows = [{"id": "full", "text": "x" * 64}, {"id": "near", "text": "y" * 61}]
    job = job_file(
        tmp_path / "cache",
        [write_jsonl(tmp_path / "a.jsonl", rows)],
        corpus={"fields": {"prompt": "text", "id": "id"}},
        recipe={"mode": "generate", "windows": {"size": 64}},
    )
    assert pipeline("run", job).returncode == 0
    (record,) = teachercache.open(str(tmp_path / "cache")).records()
    assert (record.doc_id, len(record.input_ids), record.meta["finish_reason"]) == ("near", 64, "length")
    assert json.loads(pipeline("status", job, "--json").stdout)["drops"] == {"prompt_too_long": 1}


def test_continuations_that_a_student_wrote_are_scored_with_its_revision_in_the_plan(job_file, tmp_path):
    rows = [{"id": str(i), "text": f"question {i}", "answer": f"answer {i}"} for i in range(5)]
    corpus = {"fields": {"text": "text", "continuation": "answer", "id": "id"}, "student": "step-400"}
    job = job_file(tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", rows)], corpus=corpus)
    assert pipeline("run", job).returncode == 0
    cache = teachercache.open(str(tmp_path / "cache"))
    for r in cache.records():
        assert r.loss_mask.sum() == len("answer 0") + 1  # and the EOS
    (plan,) = (json.loads(p.read_text()) for p in (tmp_path / "cache" / "plans").glob("*.json"))
    assert plan["job"]["corpora"][0]["student"] == "step-400"


@pytest.mark.slow
def test_token_ids_are_taken_as_they_are(job_file, tmp_path):
    rows = [
        {"id": "a", "ids": [1, 2, 3, 4]},
        {"id": "b", "ids": [9999]},
        {"id": "c", "ids": []},
        {"id": "d", "ids": "no"},
    ]
    corpus = {"fields": {"input_ids": "ids", "id": "id"}}
    job = job_file(tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", rows)], corpus=corpus)
    assert pipeline("run", job).returncode == 0
    (record,) = teachercache.open(str(tmp_path / "cache")).records()
    np.testing.assert_array_equal(record.input_ids, [1, 2, 3, 4])
    drops = json.loads(pipeline("status", job, "--json").stdout)["drops"]
    assert drops == {"id_out_of_range": 1, "empty": 1, "wrong_type": 1}


def test_masks_that_do_not_fit_their_ids_cost_only_their_documents(job_file, tmp_path):
    masks = {"a": [True, False, True], "b": [[1], [1, 2], [3]], "c": "yes", "d": [True], "e": [0, 1, 1], "f": None}
    rows = [{"id": name, "ids": [1, 2, 3], "mask": mask} for name, mask in masks.items()]
    corpus = {"fields": {"input_ids": "ids", "id": "id", "loss_mask": "mask"}}
    job = job_file(tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", rows)], corpus=corpus)
    result = run_job(load_job(job))
    assert {r.doc_id for r in teachercache.open(str(tmp_path / "cache")).records()} == {"a", "e"}
    assert result.manifest.drops == {"wrong_type": 4}


def test_any_attempt_draws_the_same_and_another_seed_does_not(job_file, tmp_path):
    """Two caches of one job have one spec digest, so one u a row; the draws differ where the spec does."""
    path = write_jsonl(tmp_path / "a.jsonl", documents(4))
    found = []
    for name, seed in (("one", 0), ("two", 0), ("three", 5)):
        run_job(load_job(job_file(tmp_path / name, [path], rows={"kind": "sampled", "seed": seed})))
        found.append({r.doc_id: r for r in teachercache.open(str(tmp_path / name)).records()})
    for doc_id, record in found[0].items():
        assert record.exact.min() >= 2
        assert record.exact.max() < 8
        np.testing.assert_array_equal(record.topk_ids, found[1][doc_id].topk_ids)
        assert not np.array_equal(record.topk_ids, found[2][doc_id].topk_ids)


def test_sampled_rows_are_those_of_the_definition(job_file, tmp_path, tokenizer_folder):
    from pipeline.teachers.base import RowsWanted
    from pipeline.teachers.noop import expected_sample

    path = write_jsonl(tmp_path / "a.jsonl", documents(5, 300))
    recipe = {"windows": {"size": 128, "min_context": 32}}
    run_job(load_job(job_file(tmp_path / "cache", [path], recipe=recipe, rows={"kind": "sampled"})))
    cache = teachercache.open(str(tmp_path / "cache"))
    for r in cache.records():
        columns = expected_sample(r.input_ids, r.row_pos, RowsWanted.of(cache.spec))
        np.testing.assert_array_equal(r.topk_ids, columns.ids[r.row_pos, 1:])
        np.testing.assert_allclose(r.topk_logprobs, columns.logprobs[r.row_pos, 1:], rtol=1e-3)
        np.testing.assert_array_equal(r.exact, columns.exact[r.row_pos])
        np.testing.assert_array_equal(r.tail_logprob, columns.tail[r.row_pos])


@pytest.mark.slow
def test_rows_are_the_noop_teachers_rows(job_file, tmp_path, tokenizer_folder):
    """What comes out of the cache is what the teacher gave, for every window of every document."""
    from pipeline.teachers.noop import expected_columns
    from teachercache import fingerprint_tokenizer

    path = write_jsonl(tmp_path / "a.jsonl", documents(20, 900))
    job = job_file(tmp_path / "cache", [path], recipe={"windows": {"size": 128, "min_context": 32}})
    assert pipeline("run", job).returncode == 0
    vocab = fingerprint_tokenizer(tokenizer_folder).vocab_size
    records = list(teachercache.open(str(tmp_path / "cache")).records())
    assert len(records) > 100
    for r in records:
        ids, logprobs, entropy, *_ = expected_columns(r.input_ids, 8, vocab)
        np.testing.assert_array_equal(r.topk_ids, ids[r.row_pos, 1:])
        np.testing.assert_allclose(r.topk_logprobs, logprobs[r.row_pos, 1:], rtol=1e-3)
        np.testing.assert_allclose(r.entropy, entropy[r.row_pos], rtol=1e-3)


@pytest.fixture(params=["top_k", "sampled"])
def two_corpora(job_file, tmp_path, request):
    """A cache of ten documents, and a job for a second file that repeats five of them under other names."""
    cache, rows = tmp_path / "cache", {"kind": request.param}
    first = write_jsonl(tmp_path / "a.jsonl", documents(10))
    run_job(load_job(job_file(cache, [first], rows=rows)))
    renamed = [dict(d, id=f"again-{d['id']}") for d in documents(15)[5:]]
    second = write_jsonl(tmp_path / "b.jsonl", renamed)
    return str(cache), load_job(job_file(cache, [second], corpus={"source": "second"}, rows=rows))


def test_rows_of_committed_documents_are_copied_and_counted(two_corpora):
    cache, job = two_corpora
    outcome = run_job(job).outcome
    records = {(r.source, r.doc_id): r for r in teachercache.open(cache).records()}
    assert len(records) == 20
    copied_rows = 0
    for i in range(5, 10):
        ours, theirs = records["second", f"again-doc{i}"], records["s", f"doc{i}"]
        np.testing.assert_array_equal(ours.topk_ids, theirs.topk_ids)
        np.testing.assert_array_equal(ours.topk_logprobs, theirs.topk_logprobs)
        np.testing.assert_array_equal(ours.entropy, theirs.entropy)
        assert (ours.exact is None) == (theirs.exact is None)
        if ours.exact is not None:
            np.testing.assert_array_equal(ours.exact, theirs.exact)
        assert ours.content_key == theirs.content_key
        copied_rows += len(ours.row_pos)
    assert outcome.tally.reused_rows == copied_rows
    status = read_status(cache)
    assert status["reused_rows"] == copied_rows
    assert status["rows"] > copied_rows


def test_only_unknown_documents_reach_the_teacher(two_corpora, monkeypatch):
    _, job = two_corpora
    seen: list[str] = []
    original = shard_run.record_of
    monkeypatch.setattr(
        shard_run, "record_of", lambda window, scored: seen.append(window.doc_id) or original(window, scored)
    )
    run_job(job)
    assert sorted(seen) == sorted(f"again-doc{i}" for i in range(10, 15))


def test_off_computes_everything(two_corpora):
    cache, job = two_corpora
    job = job.model_copy(update={"run": job.run.model_copy(update={"reuse": "off"})})
    assert run_job(job).outcome.tally.reused_rows == 0
    assert read_status(cache)["reused_rows"] == 0


def test_a_file_collected_meanwhile_costs_computing_not_the_document(two_corpora, monkeypatch):
    cache, job = two_corpora
    monkeypatch.setattr(teachercache.write.reuse.ReuseIndex, "get", lambda self, key: None)
    outcome = run_job(job).outcome
    assert outcome.tally.reused_rows == 0
    assert sum(1 for _ in teachercache.open(cache).records(source="second")) == 10


def test_a_plan_does_not_read_its_own_commits_back(job_file, tmp_path, monkeypatch):
    cache, files = tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", documents(10))]
    run_job(load_job(job_file(cache, files)))

    def never(self):
        raise AssertionError("the index was built although no other plan committed anything")

    monkeypatch.setattr(teachercache.CacheWriter, "reuse_index", never)
    assert run_job(load_job(job_file(cache, files))).outcome.tally.found > 0
