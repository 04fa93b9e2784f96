"""What the beginning of a file says about the whole."""

from __future__ import annotations

import pytest

from pipeline.config import load_job, parse_job
from pipeline.corpus.encode import Encoder
from pipeline.corpus.inputs import fingerprint
from pipeline.planning.sample import shape_of, take_sample
from pipeline.running.job import prepare
from teachercache.errors import UsageError
from tests.pipeline.conftest import documents, write_jsonl


def test_documents_longer_than_the_sample_are_counted_over_their_whole_length(tmp_path, tokenizer_folder):
    """A sample is 32 KiB; lines of 600 KB must not make a token a byte look like twenty."""
    job = parse_job(
        {
            "cache": "c",
            "teacher": {"model": str(tokenizer_folder), "engine": "noop", "max_model_len": 512},
            "corpora": [{"files": ["x"], "fields": {"input_ids": "ids"}}],
        }
    )
    path = write_jsonl(tmp_path / "a.jsonl", [{"ids": [7] * 200_000}] * 3)
    file = fingerprint(str(path))
    found = take_sample(file, shape_of(file, job.corpora[0]), job.corpora[0], job, Encoder(job, tokenizer_folder))
    assert found.units == path.stat().st_size // 3
    assert found.tokens / found.units < 1.0


def test_a_field_that_no_document_has_is_refused_with_the_fields_that_there_are(job_file, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(12))
    job = job_file(tmp_path / "cache", [path], corpus={"fields": {"text": "body", "id": "id"}})
    with pytest.raises(UsageError, match=r"expected \{'text': 'body'\}, found \['id', .*'text'\]; correct `fields`"):
        prepare(load_job(job))


def test_a_limit_of_documents_bounds_the_estimate(job_file, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(400))
    (whole,) = prepare(load_job(job_file(tmp_path / "cache", [path]))).planned.estimates
    job = load_job(job_file(tmp_path / "cache", [path]), ["corpora.0.limit_documents=10"])
    (limited,) = prepare(job).planned.estimates
    assert whole.documents == pytest.approx(400, rel=0.1)
    assert limited.documents == pytest.approx(10)
    assert limited.tokens == pytest.approx(whole.tokens / 40, rel=0.1)
