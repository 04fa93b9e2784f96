"""Generate mode, continuations of a student, de-duplication over a corpus, sampling, and the preview."""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import teachercache
from pipeline.config import load_job
from pipeline.running.job import run_job
from teachercache.errors import UsageError
from tests.pipeline.conftest import documents, pipeline, verify, write_jsonl


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
def test_corpus_dedup_keeps_the_first_copy_and_never_one_that_is_cached_elsewhere(job_file, tmp_path):
    docs = documents(40)
    write_jsonl(tmp_path / "in" / "m.jsonl", [*docs, docs[3] | {"id": "copy-inside"}])
    recipe = {"filters": {"dedup": "corpus"}}
    job = job_file(tmp_path / "cache", [tmp_path / "in" / "*.jsonl"], recipe=recipe, run={"shard_bytes": 1000})
    assert pipeline("run", job).returncode == 0
    # a file that sorts before the cached one, with copies and one new document
    write_jsonl(
        tmp_path / "in" / "a.jsonl",
        [docs[5] | {"id": "late"}, docs[6] | {"id": "late2"}, {"id": "new", "text": "fresh"}],
    )
    result = pipeline("run", job)
    assert result.returncode == 0, result.stdout + result.stderr
    ids = collections.Counter(r.doc_id for r in teachercache.open(str(tmp_path / "cache")).records())
    assert set(ids) == {d["id"] for d in docs} | {"new"}
    assert verify(tmp_path / "cache").returncode == 0
    status = json.loads(pipeline("status", job, "--json").stdout)
    assert status["drops"] == {"duplicate": 3}


@pytest.mark.slow
def test_sampling_takes_the_same_documents_each_time(job_file, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(200, 40))
    seen = []
    for name in ("one", "two"):
        job = job_file(tmp_path / name, [path], corpus={"sample": 0.3})
        assert pipeline("run", job).returncode == 0
        seen.append(sorted(r.doc_id for r in teachercache.open(str(tmp_path / name)).records()))
    assert seen[0] == seen[1]
    assert 30 <= len(seen[0]) <= 90


def test_plan_shows_documents_with_their_masks(job_file, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(3))
    job = job_file(tmp_path / "cache", [path])
    result = pipeline("plan", job, "--show", "2", "--rate", "1000")
    assert result.returncode == 0, result.stderr
    assert "document 0 says" in result.stdout
    assert re.search(r"token 0\] d«ocument 0 says.*»$", result.stdout, re.M)  # nothing precedes the first token
    assert "GPU-hours" in result.stdout
    assert not (tmp_path / "cache").exists()


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
        ids, logprobs = expected_columns(r.input_ids, 8, vocab)
        np.testing.assert_array_equal(r.topk_ids, ids[r.row_pos, 1:])
        np.testing.assert_allclose(r.topk_logprobs, logprobs[r.row_pos, 1:], rtol=1e-3)
